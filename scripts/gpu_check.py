"""Runs all measurements that need a CUDA GPU, in at most eight minutes.

    python scripts/gpu_check.py

needs the packages in ``NEEDED``, but no installation of this project and no network. The most
informative parts run first; ``--group`` selects later ones. Each part has its own process, so hangs
and device errors end only that part. ``gpu_check.json`` is written after every row, so no result is
lost. Without a CUDA device, parts run on a CPU as far as possible.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
NEEDED = {
    "torch": "torch", "torchvision": "torchvision", "numpy": "numpy", "PIL": "pillow",
    "psutil": "psutil",
    "pynvml": "nvidia-ml-py", "tensorboard": "tensorboard", "pytest": "pytest",
    "hydra": "hydra-core==1.3.2",
    "omegaconf": "omegaconf==2.3.0", "antlr4": "antlr4-python3-runtime==4.9.3", "yaml": "PyYAML",
    "simplejpeg": "simplejpeg", "packaging": "packaging", "xxhash": "xxhash",
}  # fmt: skip
"""Modules and their distributions."""
GROUPS = {
    "conformance": {"conformance": 120, "events": 60},
    "demand": {"demand": 460},
    "stall": {"stall": 200, "prefetcher": 60},
    "unsettled": {"finish": 60, "staging": 70, "pinning": 140},
    "tests": {"pytest": 360, "copies": 90},
    "launches": {"launches": 460},
    "compiled": {"stall_compiled": 200, "launches_compiled": 260},
    "feeds": {"feeds": 460},
    "feeds_compiled": {"feeds_compiled": 460},
    "peers": {"peers": 460},
}
"""Parts, most informative first, with their time limits in seconds."""
PARTS = "scripts.gpu.parts"
DEADLINE_S = 475.0
# a part starts only if this much time is left
LEAST_S = {
    "demand": 150.0, "stall": 60.0, "stall_compiled": 100.0, "pytest": 90.0, "pinning": 40.0,
    "launches": 270.0, "launches_compiled": 260.0, "feeds": 300.0, "feeds_compiled": 300.0,
    "peers": 300.0,
}  # fmt: skip
# last seconds of its time, in which a part should end by itself
_PUT_AWAY_S = 5.0
_PATHS = re.compile(r"(?<![\w.])~?/[^\s'\"`,;:()<>\[\]{}|]+")
_IDS = re.compile(r"\b(GPU|MIG)-[0-9a-fA-F-]{36}\b|\b\d{1,3}(\.\d{1,3}){3}\b")

Row = dict[str, Any]


def missing() -> str:
    """Returns a line that names missing packages and how to get them, or ""."""
    absent = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if not absent:
        return ""
    names = " ".join(absent)
    return (
        f"gpu_check: missing: {names}. With a network: python -m pip install {names}. Without: on "
        "a machine with a network, the same Python and the same CPU type, python -m pip wheel "
        f"--no-deps -w wheels {names}; then here: python -m pip install --no-index --no-deps "
        "wheels/*.whl"
    )


def scrubbed(value: Any) -> Any:
    """Returns ``value`` without paths, addresses and values of the environment."""
    if isinstance(value, dict):
        return {key: scrubbed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [scrubbed(item) for item in value]
    if not isinstance(value, str):
        return value
    value = re.sub(r"[^\s'\"]*/site-packages/", "", value.replace(f"{ROOT}/", ""))
    for secret in _secrets():
        value = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "***", value)
    return _IDS.sub("***", _PATHS.sub("***", value))


def _secrets() -> list[str]:
    """Returns secrets, the longest first, so that substrings leave no remainder."""
    home = os.path.expanduser("~")
    host = platform.node()
    told = re.compile(r"v?\d+(\.\d+)+[-+.\w]*|x86_64|aarch64|amd64")
    found = {
        value for value in os.environ.values() if len(value) >= 6 and not told.fullmatch(value)
    }
    found |= {str(ROOT), home, Path(home).name, host, host.partition(".")[0]}
    found |= {os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")}
    return sorted(found - {"", "/", "root", "localhost"}, key=len, reverse=True)


class Findings:
    """The results so far, in a file that is complete at any time."""

    def __init__(self, path: Path, groups: dict[str, dict[str, int]], quick: bool) -> None:
        self._path = path
        parts = [
            {"part": part, "group": group, "status": "not run"}
            for group in groups
            for part in groups[group]
        ]
        self.parts: dict[str, Row] = {row["part"]: row for row in parts}
        date = time.strftime("%Y-%m-%d", time.gmtime())
        self._whole: Row = {"date": date, "machine": {}, "quick": quick, "parts": parts}
        self.write()

    def begin(self, name: str) -> None:
        """Marks a part as running in the file."""
        part = self.parts[name]
        part |= {"status": "cut short", "seconds": 0.0, "found": "", "rows": [], "problems": []}
        self.write()

    def add(self, name: str, said: Row, seconds: float) -> None:
        """Adds a part's output."""
        part, (kind, value) = self.parts[name], next(iter(scrubbed(said).items()))
        part["seconds"] = round(seconds, 1)
        if kind == "machine":
            self._whole["machine"] = value
        elif kind == "row":
            part["rows"].append(value)
        elif kind == "wrong":
            part["problems"].append(value)
        else:
            part["found"] = " ".join(value.split())
            part["status"] = "wrong" if kind == "ok" and part["problems"] else kind
        self.write()

    def write(self) -> None:
        """Writes the file atomically."""
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(self._whole, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self._path)


def said_by(name: str, limit_s: float, quick: bool, scratch: Path) -> Iterator[Row]:
    """Yields a part's output as it arrives; kills the part after ``limit_s``.

    The last row is its outcome: ``ok``, ``skipped``, ``failed`` or ``cut short``.
    """
    limit = str(max(1.0, limit_s - _PUT_AWAY_S))
    command = [sys.executable, "-m", PARTS, name, limit, str(scratch), *["--quick"] * quick]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    log = scratch / f"{name}.log"
    until = time.monotonic() + limit_s
    with log.open("wb") as errors:
        child = subprocess.Popen(
            command, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, "WELLFED_CACHE": str(scratch / "cache")},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
        )  # fmt: skip
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    listener = threading.Thread(target=_listen, args=(child.stdout, lines), daemon=True)
    listener.start()
    try:
        while line := lines.get(timeout=max(0.0, until - time.monotonic())):
            # a truncated line
            with contextlib.suppress(ValueError):
                yield json.loads(line)
        _gone(child)
        if child.returncode:
            yield {"failed": f"ended with {child.returncode}: {_last_words(log)}"}
    except queue.Empty:
        yield {"cut short": f"not done after {limit_s:.0f} s: {_last_words(log)}"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        # a part that hangs in the driver cannot be killed
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_PUT_AWAY_S)
            listener.join()
            for pipe in (child.stdin, child.stdout):
                assert pipe is not None
                pipe.close()


def _gone(child: subprocess.Popen[bytes]) -> None:
    """Waits briefly until a part and its children are gone.

    While exiting, a part removes its shared memory.
    """
    for _ in range(int(10 * _PUT_AWAY_S)):
        child.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, 0)
            time.sleep(0.1)
            continue
        return


def _listen(stream: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(b"")


def _last_words(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace").strip()[-600:]


def run(
    groups: dict[str, dict[str, int]], findings: Findings, quick: bool, deadline_s: float
) -> None:
    """Runs the parts of ``groups`` in order, as many as time permits."""
    deadline = time.monotonic() + deadline_s
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        for name, limit_s in (
            (part, limit) for group in groups.values() for part, limit in group.items()
        ):
            begin = time.monotonic()
            if deadline - begin < min(LEAST_S.get(name, 15.0), limit_s):
                continue
            findings.begin(name)
            print(f"{name} ...", file=sys.stderr, flush=True)
            for said in said_by(name, min(limit_s, deadline - begin), quick, Path(scratch)):
                findings.add(name, said, time.monotonic() - begin)
            part = findings.parts[name]
            print(
                f"{part['status']}, {part['seconds']} s: "
                f"{'; '.join((part['found'], *part['problems']))}",
                flush=True,
            )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Run all measurements that need a CUDA GPU; without one, run the parts on a "
        "CPU as far as possible.",
        epilog="\n".join(f"{group:15} {', '.join(parts)}" for group, parts in GROUPS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--group",
        choices=GROUPS,
        help="run this group of parts (default: all, until time is up)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and images")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(),
        help="folder for gpu_check.json, or gpu_check-GROUP.json",
    )
    a = parser.parse_args(argv)
    # without its packages nothing can be measured
    if absent := missing():
        print(absent, file=sys.stderr)
        return 2
    groups = {a.group: GROUPS[a.group]} if a.group else GROUPS
    path = a.out / f"gpu_check{'-' + a.group if a.group else ''}.json"
    a.out.mkdir(parents=True, exist_ok=True)
    findings = Findings(path, groups, a.quick)
    run(groups, findings, a.quick, DEADLINE_S)
    # the file, and the parts for which there was no time
    said = str(path)
    left = [name for name, part in findings.parts.items() if part["status"] == "not run"]
    if left:
        said += f"; no time was left for {', '.join(left)}: name their group with --group"
    print(said)
    bad = {"failed", "wrong", "cut short"}
    return int(any(part["status"] in bad for part in findings.parts.values()))


if __name__ == "__main__":
    sys.exit(main())
