"""Reads thousands of changed files with each reader of files, and counts how each ended.

Whole files of each kind are made, changed by chance and read as a run reads them. A reader may take
a file or refuse it with its own error, in one second of processor time and 300 MB; everything else
is told. A process of its own reads, so that a crash, a hang or a lack of memory is a result too.

    uv run python -m tests.hostile.fuzz.run --write
    uv run python -m tests.hostile.fuzz.run --only "image, PNG" --cases 100 --seed 2
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from scripts.bench.tables import PAGES, machine, machine_line, markdown, parser, write
from tests.hostile.fuzz.readers import READERS, tried

PAGE = PAGES / "fuzz.md"
# of one file: what the table's columns are held to, and what ends the process
_MOST_S = 1.0
_MOST_MB = 300.0
_KILLED_S = 10.0
_ROOM_BYTES = 2 << 30


def peak_mb() -> float:
    """Returns the most memory that this process had since ``reset_peak``, or since its start."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def reset_peak() -> None:
    """Begins another measurement of ``peak_mb``, where the system can."""
    with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def read_all(name: str, cases: range, seed: int, results: Path) -> None:
    """Reads ``cases`` and writes a line for each; a case's signal ends the process."""
    # a lack of memory is an error that the reader raises
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + _ROOM_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # what libraries in C say of damage
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with tempfile.TemporaryDirectory() as folder, results.open("a", buffering=1) as file:
        reader = READERS[name][1](Path(folder))
        for case in cases:
            reset_peak()
            before_mb = peak_mb()
            signal.setitimer(signal.ITIMER_PROF, _KILLED_S)
            # waits without end, as for a pipe
            signal.alarm(60)
            began_s = time.process_time()
            outcome: dict[str, Any] = {}
            try:
                outcome["refused"] = tried(name, reader, seed, case)
            except Exception as error:
                outcome["uncaught"] = f"{type(error).__name__}: {error}"[:200]
                outcome["where"] = traceback.format_exc()[-2000:]
            outcome["cpu_s"] = time.process_time() - began_s
            signal.setitimer(signal.ITIMER_PROF, 0)
            outcome["mb"] = peak_mb() - before_mb
            print(json.dumps(outcome), file=file)


def outcomes(name: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Returns how each of ``count`` files ended."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        found: list[dict[str, Any]] = []
        while len(found) < count:
            child = os.fork()
            if not child:
                try:
                    read_all(name, range(len(found), count), seed, results)
                    os._exit(0)
                except BaseException:
                    results.with_suffix(".error").write_text(traceback.format_exc())
                finally:
                    os._exit(1)
            status = os.waitpid(child, 0)[1]
            found = [json.loads(line) for line in results.read_text().splitlines()]
            if os.WIFSIGNALED(status):
                ended = signal.Signals(os.WTERMSIG(status)).name
                killed = {"uncaught": f"killed by {ended}", "cpu_s": 0.0, "mb": 0.0}
                with results.open("a") as file:
                    print(json.dumps(killed), file=file)
                found.append(killed)
            elif status:
                raise RuntimeError(results.with_suffix(".error").read_text())
        return found


def row(name: str, found: Sequence[dict[str, Any]]) -> dict[str, object]:
    """Returns a row of the table."""
    refused = Counter(each["refused"] for each in found if each.get("refused"))
    uncaught = Counter(each["uncaught"].partition(":")[0] for each in found if "uncaught" in each)
    accepted = sum(each.get("refused") == "" for each in found)
    return {
        "reader": name,
        "files": len(found),
        "accepted": accepted,
        "refused": "; ".join(f"{count} {what}" for what, count in refused.most_common()) or 0,
        "uncaught": "; ".join(f"{count} {what}" for what, count in uncaught.items()) or 0,
        "most processor s": f"{max(each['cpu_s'] for each in found):.2f}",
        "most MB": f"{max(each['mb'] for each in found):.0f}",
    }


def faults(name: str, found: Sequence[dict[str, Any]]) -> list[str]:
    """Returns what there is to tell of each file that ended otherwise than it may."""
    lines: list[str] = []
    traced = set[str]()
    for case, each in enumerate(found):
        if "uncaught" in each:
            kind = each["uncaught"].partition(":")[0]
            lines.append(f"{name}, case {case}: {each['uncaught']}")
            if kind not in traced:
                lines[-1] += f"\n{each.get('where', '')}"
            traced.add(kind)
        elif each["cpu_s"] > _MOST_S or each["mb"] > _MOST_MB:
            lines.append(f"{name}, case {case}: {each['cpu_s']:.2f} s, {each['mb']:.0f} MB")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    made = parser("Read changed files with each reader of files.", PAGE, json=False)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--cases", type=int, help="files of each reader; by default as in the table")
    made.add_argument("--only", action="append", help="a reader; may be given again")
    a = made.parse_args(argv)
    if unknown := {*(a.only or ())} - READERS.keys():
        made.error(f"--only: unknown: {', '.join(unknown)}; there are {'; '.join(READERS)}")
    rows = []
    told: list[str] = []
    for name in a.only or READERS:
        found = outcomes(name, a.cases or READERS[name][0], a.seed)
        rows.append(row(name, found))
        told += faults(name, found)
        print(markdown(rows[-1:]).splitlines()[-1], flush=True)
    files = sum(int(str(each["files"])) for each in rows)
    cases = f" --cases {a.cases}" if a.cases else ""
    page = (
        "# Damaged files\n\n"
        f"{machine_line(machine())}\n\n"
        f"`uv run python -m tests.hostile.fuzz.run --seed {a.seed}{cases}`, "
        f"{time.strftime('%-d %B %Y')}, n={files:,}. Each file is a whole one with one to "
        "eight changes: bits, bytes, lengths, blocks, another file's end, "
        "odd values of JSON and YAML; half of those with a checksum "
        "have the right one. Processor time and memory are those of the worst file, the memory "
        "beside what the process has already.\n\n"
        f"{markdown(rows)}\n"
    )
    print(
        f"\n{page}\n" + "\n".join(told[:40]) + f"\n{len(told)} files ended otherwise than they may"
    )
    if a.write:
        write(PAGE, page)
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
