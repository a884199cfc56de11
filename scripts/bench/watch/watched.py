"""Plants bottlenecks in a third-party script, and compares the diagnoses with TraceML's.

    uv run --with traceml-ai python -m scripts.bench.watch.watched --write

``watched_loop.py`` does not use this project. It runs unmodified under ``wellfed watch``, and again
under TraceML, which is not a dependency; uv adds it for this command. ``CASES`` defines the right
answers in advance.

The other part, ``gain``, runs scripts alternately as they are and with the DataLoader arguments
from ``wellfed watch``, and compares the expected with the measured gain in samples/s.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

from harness.clock.figures import Tag
from scripts.bench.tables import (
    PAGES,
    ROOT,
    listed,
    machine,
    machine_line,
    markdown,
    parser,
    write,
)
from scripts.bench.watch import control_groups
from scripts.bench.watch import planted_acts as acts
from scripts.bench.watch.beside_traceml import RunFailed, environment, theirs

PAGE = PAGES / "watched.md"
LOOP = Path(__file__).with_name("watched_loop.py")
SUPPORT = ROOT / "tests" / "support"
DATA = Path(tempfile.gettempdir(), "wellfed-watched")
PARTS = ("planted", "gain")
# Python arguments that run a script watched
WATCH = ("-m", "wellfed", "watch")
# cores that other programs may use during a run
BUSY = 0.2
# timeout for a run to end
_PATIENCE_S = 240.0
# called periodically with a run's output so far
Meanwhile = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Case:
    """A planted bottleneck, and its expected diagnosis.

    Attributes:
        plant: its name in ``watched_loop.py``.
        size: its size.
        about: description, with the size.
        bottleneck: the kind of a right verdict.
        flags: further flags of the script.
        ranks: number of ranks.
        emulated: whether it runs on an emulated GPU.
        around: context of the run, such as a control group.
    """

    plant: str
    size: float
    about: str
    bottleneck: str
    flags: tuple[str, ...] = ()
    ranks: int = 1
    emulated: bool = False
    around: str = ""


CASES = (
    Case("slow_disk", 25, "25 ms of waiting per file", "storage"),
    Case("decode", 900, "JPEGs of 900 x 900", "decode"),
    Case("slow_transform", 15, "15 ms of work in Warp", "augment"),
    Case("slow_collate", 100, "100 ms of work per batch", "collate"),
    Case("few_workers", 800, "1 worker, JPEGs of 800 x 800", "workers"),
    Case("no_workers", 600, "no workers, JPEGs of 600 x 600", "workers"),
    Case("slow_step", 200, "200 ms of waiting in forward", "compute", ("--steps=25",)),
    Case("compute", 40, "40 more layers, batches of 32", "compute", ("--batch-size=32",)),
    Case("launches", 20, "20 launches of 2 ms per step", "launch", emulated=True),
    Case("collections", 400, "gc.collect() of 400,000 objects after each step", "host"),
    Case("slow_logging", 50, "50 ms per line, in each step", "host"),
    Case("neighbors", 1.5, "1.5 of 2 cores", "neighbors", around="neighbors"),
    Case("slow_rank_data", 25, "25 ms of waiting per file, on rank 1 of 2", "rank", ranks=2),
    Case("slow_rank_forward", 60, "60 ms of waiting in forward, on rank 1 of 2", "rank", ranks=2),
    Case("quota", 0.5, "a control group of 0.5 cores", "quota", around="quota"),
    Case("tiny_memory", 0.3, "memory for 0.3 of the files", "memory", ("--steps", "200"),
         around="memory"),
    Case("nothing", 0, "a step of 100 ms, loading of some 5 ms", "balanced"),
)  # fmt: skip
# scripts for the gain measurement
GAINS: Mapping[str, tuple[str, ...]] = {
    "slow disk, 1 worker": (
        "--read-ms=8", "--workers=1", "--forward-ms=20", "--steps=60",
    ),
    "slow disk, 2 workers": (
        "--read-ms=25", "--workers=2", "--forward-ms=10", "--steps=40",
    ),
    "decode, no workers": (
        "--side=500", "--workers=0", "--forward-ms=20", "--steps=60",
    ),
    "decode, 1 worker": (
        "--side=800", "--workers=1", "--forward-ms=20", "--steps=50",
    ),
    "slow transform, 1 worker": (
        "--warp-ms=10", "--workers=1", "--forward-ms=50", "--steps=50",
    ),
    "late files, 2 workers": (
        "--read-ms=5", "--late=16", "--workers=2", "--forward-ms=40", "--steps=80",
    ),
}  # fmt: skip
FLAGS = {"num_workers": "workers"}
# the seed draws the sizes of these options within this factor
SIZES = "--read-ms", "--side", "--warp-ms", "--forward-ms"
FACTOR = 1.5


def drawn(name: str, seed: int | None) -> list[str]:
    """Returns a script's flags with sizes drawn by ``seed``; None: unchanged."""
    chance = random.Random(f"{seed} {name}")
    flags = []
    for flag in GAINS[name]:
        key, _, value = flag.partition("=")
        if seed is not None and key in SIZES:
            flag = f"{key}={round(int(value) * FACTOR ** chance.uniform(-1, 1))}"
        flags.append(flag)
    return flags


def loop(*flags: str) -> list[str]:
    """Returns the script's command, without an interpreter; files are made once."""
    return [str(LOOP), "--data", str(DATA), *flags]


def ours(
    case: Case, folder: Path, script: Sequence[str], watch: Sequence[str] = WATCH
) -> list[str]:
    """Returns the command by which ``wellfed watch`` runs ``script``."""
    start = [sys.executable]
    if case.emulated:
        watch = [str(SUPPORT / "emulated_watch.py")]
    elif case.ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
    return [*start, *watch, "--out", str(folder / "report"), *script]


def traceml(case: Case, folder: Path, script: Sequence[str]) -> list[str]:
    """Returns the command by which TraceML runs ``script``."""
    found = shutil.which("traceml", path=str(Path(sys.executable).parent)) or "traceml"
    logs = ("--logs-dir", str(folder / "logs"), "--run-name", "run")
    ranks = ("--nproc-per-node", str(case.ranks)) * (case.ranks > 1)
    return [found, "run", script[0], *logs, *ranks, "--args", *script[1:], "--traceml"]


@contextmanager
def around(case: Case, command: list[str]) -> Iterator[tuple[list[str], Meanwhile]]:
    """Yields the command with its bottleneck planted, and a monitor of its output."""
    quiet: Meanwhile = lambda text: None
    if case.around == "neighbors":
        with acts.burning(case.size):
            yield command, quiet
    elif case.around == "quota":
        with control_groups.quota(case.size) as group:
            yield control_groups.within(group, *command), quiet
    elif case.around == "memory":
        # cached pages count for the group that read them first
        for path in DATA.rglob("*.jpg"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with control_groups.group_of("memory") as group:
            within = control_groups.within(group, *command)
            yield within, squeeze(group, case.size)
    else:
        yield command, quiet


def squeeze(group: Path, share: float) -> Meanwhile:
    """Returns a function that limits memory to a ``share`` of a run's files after some steps."""
    limit = group / "memory.limit_in_bytes"

    def meanwhile(text: str) -> None:
        if "trained at" in text:
            limit.write_text("-1")
        elif "step 5:" in text and int(limit.read_text()) > 1 << 40:
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / "memory.usage_in_bytes").read_text()) - int(stat["total_cache"])
            files = (acts.OWN_MB + share * acts.FILES * acts.FILE_MB) * 2**20
            with suppress(OSError):
                limit.write_text(str(round(used + int(stat["total_shmem"]) + files)))

    return meanwhile


def ran(command: Sequence[str], folder: Path, meanwhile: Meanwhile) -> str:
    """Runs a command in ``folder``, and returns its output.

    Raises:
        RunFailed: with the end of its output.
    """
    printed = folder / "printed.txt"
    with printed.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(), stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    until_s = time.monotonic() + _PATIENCE_S
    try:
        while process.poll() is None and time.monotonic() < until_s:
            meanwhile(printed.read_text())
            time.sleep(0.1)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    text = printed.read_text()
    if code:
        raise RunFailed(f"exit code {code}: {text[-2000:]}")
    return text


def judged(case: Case, watch: Sequence[str] = WATCH) -> dict[str, Any]:
    """Returns the ``wellfed watch`` report of a run of ``case``."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with around(case, ours(case, folder, script(case), watch)) as (command, meanwhile):
            ran(command, folder, meanwhile)
        report: dict[str, Any] = json.loads((folder / "report" / "report.json").read_text())
        return report


def script(case: Case) -> list[str]:
    """Returns the script's command with the bottleneck of ``case``."""
    return loop("--plant", case.plant, "--size", str(case.size), *case.flags)


def quoted(case: Case) -> str:
    """Returns TraceML's verdict on a run of ``case``, verbatim."""
    if case.emulated:
        return "(not run: there is no GPU)"
    if importlib.util.find_spec("traceml_ai") is None:
        return "(not installed)"
    calm()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        try:
            with around(case, traceml(case, folder, script(case))) as (command, meanwhile):
                ran(command, folder, meanwhile)
            return theirs(folder)[0]
        except (RunFailed, OSError, KeyError) as error:
            return f"(nothing: {' '.join(str(error).split())[-200:]})"


def planted_row(case: Case) -> dict[str, str]:
    """Returns a row of the table of verdicts."""
    row = {
        "planted": f"{case.plant.replace('_', ' ')}: {case.about}",
        "right is": case.bottleneck,
    }
    calm()
    try:
        verdict = judged(case)["verdict"]
    except pytest.skip.Exception as error:
        return row | {"right": f"skipped: {error}", "wellfed watch": "", "TraceML": ""}
    except RunFailed as error:
        print(error, file=sys.stderr)
        return row | {"right": "no", "wellfed watch": "(failed)", "TraceML": quoted(case)}
    found = verdict["bottleneck"]
    right = "yes" if found == case.bottleneck else f"no: {found}"
    return row | {"right": right, "wellfed watch": verdict["sentence"], "TraceML": quoted(case)}


def timed(flags: Sequence[str]) -> tuple[float, dict[str, Any]]:
    """Returns a watched script's own samples/s, and its report."""
    calm()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        text = ran(ours(CASES[0], folder, loop(*flags)), folder, lambda _: None)
        found = re.search(r"trained at ([\d.]+) samples/s", text)
        assert found
        return float(found[1]), json.loads((folder / "report" / "report.json").read_text())


def pasted(arguments: Mapping[str, object]) -> list[str]:
    """Returns DataLoader arguments as flags of the script."""
    flags = []
    for name, value in arguments.items():
        flag = "--" + FLAGS.get(name, name).replace("_", "-")
        flags.append(flag if value is True else f"{flag}={value}")
    return flags


def gain_row(name: str, rounds: int, seed: int | None) -> dict[str, str]:
    """Returns a row of the gain table, from alternating runs without and with the advice."""
    flags = drawn(name, seed)
    said = []
    expected = []
    gained = []
    # runs disturbed by other programs are repeated
    for _ in range(3 * rounds):
        before, report = timed(flags)
        change = report.get("change")
        if disturbed(report) or change is None:
            continue
        after, later = timed([*flags, *pasted(change["arguments"])])
        if disturbed(later):
            continue
        said.append(", ".join(f"{key}={value}" for key, value in change["arguments"].items()))
        expected.append(change["gain"])
        gained.append(after / before)
        print(f"{name}: {said[-1]}: {expected[-1]:.2f}, {gained[-1]:.2f}", file=sys.stderr)
        if len(said) == rounds:
            break
    row = {"script": f"{name}: `{' '.join(flags)}`", "pasted": "; ".join(dict.fromkeys(said))}
    if not said:
        row["pasted"] = "no change suggested"
        return row | {"expected": "", "measured": "", "off": "", "n": "0"}
    return row | {
        "expected": f"{median(expected):.2f} ({min(expected):.2f} to {max(expected):.2f})",
        "measured": f"{median(gained):.2f} ({min(gained):.2f} to {max(gained):.2f})",
        "off": f"{median(gained) / median(expected) - 1:+.0%}",
        "n": str(len(said)),
    }


def disturbed(report: Mapping[str, Any]) -> bool:
    """Returns whether other programs used cores during a run."""
    return float(report.get("sampled", {}).get(Tag.OTHERS_CPU_CORES, 0.0)) > BUSY


def calm() -> None:
    """Waits until other programs leave the cores idle, for at most some minutes."""
    for _ in range(150):
        if psutil.cpu_percent(2.0) < 100 * BUSY / (os.cpu_count() or 1):
            return


def where() -> str:
    """Returns the machine and the versions in one line."""
    # the runs' threads, not this process's
    line = machine_line(machine() | {"torch_threads": 1})
    with suppress(metadata.PackageNotFoundError):
        line += f"; traceml-ai {metadata.version('traceml-ai')}"
    return line


def planted_part(rows: Sequence[Mapping[str, str]]) -> str:
    right = sum(row["right"] == "yes" for row in rows)
    return f"""## Planted bottlenecks

{where()}

{right} of {len(rows)} verdicts are right.

{markdown(rows)}

One run of each. `watched_loop.py` is a training script in the usual form: torchvision's
`ImageFolder` and `Compose`, a DataLoader of two workers and batches of 8, SGD; a step waits 10 ms
unless stated otherwise, so cores are free. It runs as it is under `wellfed watch`. For
TraceML it has the two lines of its documentation, `init` and `trace_step` around the step; its
Verdict, Why and Next are word for word. Right is the class and the words that the sentence must
have. What waits sleeps. The launches are those of an emulated GPU; no real one was measured, and
TraceML sees none. What comes behind `trace_step`, as collections and logging here, is in none of
TraceML's figures.

Written after the fact: earlier runs of these same cases found faults of the hooks, which were then
fixed. Two steps were made longer and one size of a worker's advice was let go. Sizes are not drawn
anew.

"""


def gain_part(rows: Sequence[Mapping[str, str]], seed: int | None) -> str:
    fresh = """These scripts are not
fresh ones: by their runs the reckoning was corrected once (handing batches over stays), and one
size was changed."""
    if seed is not None:
        fresh = f"""The sizes are
drawn with `--seed {seed}`, and nothing was changed after these runs. By runs of other sizes the
reckoning was corrected once (handing batches over stays)."""
    near = sum(bool(row["off"]) and abs(int(row["off"][:-1])) <= 15 for row in rows)
    return f"""## What the pasted line gives

{where()}

{near} of {len(rows)} are within 15 % of what was expected.

{markdown(rows)}

Each script runs as it is, and then with the arguments of the DataLoader that `wellfed watch` said,
in turns. Measured: samples/s that the script counts itself, from its 21st batch to its end, over
those of the run before; medians (least to most). A pair of runs beside which other programs took
more than {BUSY} cores is run again. {fresh}
Without workers, what handing over will take cannot be known, and the expectation is too high by it.

"""


def kept(part: str) -> str:
    """Returns a part of the page as it is."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    heading = {"planted": "Planted", "gain": "What the pasted"}[part]
    found = re.search(rf"^## {heading}.*?(?=^## |^To repeat)", text, re.M | re.S)
    return found[0] if found else ""


def main(argv: Sequence[str] | None = None) -> int:
    made: argparse.ArgumentParser = parser(
        "Judge planted bottlenecks in a third-party script.", PAGE, json=False
    )
    made.add_argument("--parts", help=f"comma-separated; all: {','.join(PARTS)}")
    made.add_argument("--only", default="", help="substring of plant or script names")
    made.add_argument("--rounds", type=int, default=3, help="pairs of runs of each script")
    made.add_argument("--seed", type=int, help="draw new sizes for the gain scripts")
    options = made.parse_args(argv)
    parts = listed(made, "--parts", options.parts, PARTS)
    planted = []
    gains = []
    for case in CASES:
        if "planted" in parts and options.only in case.plant:
            planted.append(planted_row(case))
            print(" | ".join(planted[-1].values()), flush=True)
    for name in GAINS:
        if "gain" in parts and options.only in name:
            gains.append(gain_row(name, options.rounds, options.seed))
            print(" | ".join(gains[-1].values()), flush=True)
    if options.write:
        text = "# Watching a third-party script\n\n"
        text += planted_part(planted) if planted else kept("planted")
        text += gain_part(gains, options.seed) if gains else kept("gain")
        how = "uv run --with traceml-ai python -m scripts.bench.watch.watched --write"
        write(PAGE, f"{text}To repeat: `{how}`.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
