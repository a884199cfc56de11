"""Measures how well the tuner chooses, and at what cost, on real loaders.

Beside a grid, loadtune, rules of thumb and an oracle.

For every workload each strategy first chooses its setting. Then all settings are measured with the
same consumer, interleaved in random order: choosing rounds, from which the oracle picks the best
there is, and scoring rounds, in which its pick, every strategy's choice and the oracle's pick once
more (the A/A control) are measured afresh. Ratios are paired by round.

Each measurement is a line of the results file, and what is there is not measured again: stop it
whenever you like.

    uv run scripts/bench_tuner.py --minutes 30
    uv run scripts/bench_tuner.py --only sleep_10 --auto-repeats 10
    uv run scripts/bench_tuner.py --table
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from harness.config import Config
from harness.runtime import workers
from harness.runtime.errors import LoaderError
from scripts.tuner_score import Found, Line, Setting, choosing, steady
from scripts.tuner_workloads import VARIANTS, WORKLOADS, Workload, warm

# the rest is imported where it is used: each worker imports this file, as a user's worker does
# train.py
if TYPE_CHECKING:
    from harness.runtime.distributed import World
    from scripts.tuner_strategies import Rig

# the longest wait for a batch; one that found no room in shared memory never comes
TIMEOUT_S = 8.0
ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "bench_tuner.md"
# set where /dev/shm is the workload's own
_INSIDE = "WELLFED_BENCH_SHM"


class StoppedError(Exception):
    """The time that the user gave is over."""


@dataclass(slots=True)
class Results:
    """The lines of the results file; a line cut off by an interrupt is dropped."""

    path: Path
    lines: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path.exists():
            whole = self.path.read_text(encoding="utf-8").rpartition("\n")[0]
            self.lines = [json.loads(line) for line in whole.splitlines()]
            self.path.write_text(whole + "\n" * bool(whole), encoding="utf-8")

    def add(self, **line: Any) -> None:
        """Append one line."""
        self.lines.append(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def has(self, **facts: Any) -> bool:
        """Whether there is a line with these values."""
        return any(facts.items() <= line.items() for line in self.lines)

    def found(self, workload: str) -> Found:
        """What they say of one workload."""
        return Found.collect(self.lines).get(workload, Found())


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        strategies: the names of those that choose.
        repeats: how often ``auto`` chooses.
        choosing: rounds from which the oracle picks.
        scoring: rounds in which the picks are compared.
        seconds: least window of one measurement.
        deadline: when to stop, on the monotonic clock.
    """

    strategies: tuple[str, ...]
    repeats: int
    choosing: int
    scoring: int
    seconds: float
    deadline: float

    def check(self) -> None:
        """Return, or raise ``StoppedError`` where the time is over."""
        if time.monotonic() > self.deadline:
            raise StoppedError


def run_workload(
    workload: Workload, folder: Path, results: Results, plan: Plan, world: World
) -> None:
    """Everything of one workload that the results lack."""
    from scripts.tuner_strategies import Rig, candidates

    rig = Rig(workload, workload.make(folder), world)
    warm(folder)
    if not results.has(kind="demand", workload=workload.name):
        results.add(kind="demand", workload=workload.name, images_per_s=rig.demand())
    choose(rig, folder, results, plan)
    if workload.changes is not None:
        return
    chosen = results.found(workload.name).chosen()
    for number in range(plan.choosing):
        earlier = results.found(workload.name).earlier(number)
        settings = choosing(candidates(rig), chosen, earlier)
        measure_round(
            rig, "choose", number, [(setting, False) for setting in settings], results, plan
        )
    oracle = results.found(workload.name).oracle()
    assert oracle is not None
    for number in range(plan.scoring):
        entries = [(setting, False) for setting in sorted({oracle[0], *chosen})]
        measure_round(rig, "score", number, [*entries, (oracle[0], True)], results, plan)


def choose(rig: Rig, folder: Path, results: Results, plan: Plan) -> None:
    """Ask each strategy, the repeated one again when the others are through."""
    from scripts.tuner_strategies import REPEATED, STRATEGIES, MissingError

    name = rig.workload.name
    for repeat in range(plan.repeats):
        for strategy in plan.strategies:
            unwanted = strategy != REPEATED and (repeat > 0 or rig.workload.changes is not None)
            if unwanted or results.has(
                kind="choice", workload=name, strategy=strategy, repeat=repeat
            ):
                continue
            plan.check()
            tell(f"{name}: {strategy} chooses")
            try:
                made = STRATEGIES[strategy](rig, folder)
            except MissingError as reason:
                tell(f"{strategy} skipped: {reason}")
                continue
            tell(f"{name}: {strategy} chose {made.setting} in {made.seconds:.1f} s")
            results.add(
                kind="choice", workload=name, strategy=strategy, repeat=repeat,
                seconds=made.seconds,
                setting=None if made.setting is None else str(made.setting), note=made.note,
            )  # fmt: skip


def measure_round(
    rig: Rig,
    phase: str,
    number: int,
    entries: Sequence[tuple[Setting, bool]],
    results: Results,
    plan: Plan,
) -> None:
    """Measures what round ``number`` lacks, in random order, on the same samples."""
    name = rig.workload.name
    # an order and samples that follow from the round alone, in whatever session
    order = [*entries]
    random.Random(f"{name} {phase} {number}").shuffle(order)
    seed = number if phase == "choose" else 1000 + number
    for setting, twin in order:
        key = {
            "kind": "rate",
            "workload": name,
            "phase": phase,
            "round": number,
            "setting": str(setting),
            "twin": twin,
        }
        if results.has(**key):
            continue
        plan.check()
        images, seconds, refused = deliver(
            rig, setting, seed, max(plan.seconds, rig.workload.seconds)
        )
        rate = images / seconds if images else 0.0
        tell(f"{name}: {phase} {number}: {setting} {refused or f'{rate:.0f} images/s'}")
        results.add(**key, images_per_s=rate, images=images, seconds=seconds, refused=refused)


def deliver(rig: Rig, setting: Setting, seed: int, seconds: float) -> tuple[int, float, str | None]:
    """Images, seconds, and why there are none where the loader failed."""
    try:
        with (
            closing(rig.feeds(seed).probe(rig.settings(setting, TIMEOUT_S))) as feed,
            closing(cast(Any, rig.steps(feed))) as steps,
        ):
            return *steady(steps, setting, seconds), None
    except LoaderError as error:
        return 0, 0.0, str(error)


def with_shm(megabytes: int | None) -> list[str]:
    """Returns what runs a command with a /dev/shm of its own, where it is to have one."""
    if megabytes is None:
        return []
    mount = 'mount -t tmpfs -o size="$0"m tmpfs /dev/shm && exec "$@"'
    return ["unshare", "-m" if os.geteuid() == 0 else "-rm", "sh", "-c", mount, str(megabytes)]


def run_apart(workload: Workload, arguments: Sequence[str]) -> bool:
    """Runs this script for one workload with a /dev/shm of its own; False if not permitted."""
    alone = with_shm(workload.shm_mb)
    try:
        tried = subprocess.run([*alone, "true"], capture_output=True, text=True, check=False)
        reason = tried.stderr.strip() if tried.returncode else None
    except FileNotFoundError:
        reason = "there is no unshare"
    if reason is not None:
        tell(f"{workload.name} skipped: {reason}")
        return False
    here = str(Path(__file__).resolve())
    command = [*alone, sys.executable, here, *arguments, "--only", workload.name]
    subprocess.run(command, env={**os.environ, _INSIDE: "1"}, check=True)
    return True


def run(
    names: Sequence[str], arguments: Sequence[str], folder: Path, results: Results, plan: Plan
) -> None:
    """All workloads in turn."""
    workers.start_server(
        ["hydra", "harness.feed.processes", "harness.data.datasets", "scripts.tuner_workloads"]
    )
    from harness.runtime import distributed
    from scripts.measured import machine

    folder.mkdir(parents=True, exist_ok=True)
    with distributed.joined(0, Config(device="cpu")) as world:
        inside = _INSIDE in os.environ
        if not inside:
            today = datetime.now(UTC).date().isoformat()
            results.add(kind="machine", date=today, load=os.getloadavg()[0], machine=machine())
        for name in names:
            plan.check()
            workload = (WORKLOADS | VARIANTS)[name]
            if workload.shm_mb is None or inside:
                run_workload(workload, folder, results, plan, world)
            else:
                minutes = ["--minutes", str((plan.deadline - time.monotonic()) / 60)]
                run_apart(workload, [*arguments, *minutes])
                results.lines = Results(results.path).lines


def tell(text: str) -> None:
    """Prints ``text`` on standard error."""
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Compare the tuner's choices and costs with those of others, on real loaders.",
        epilog="\n".join(
            f"{name:14} {workload.about}" for name, workload in (WORKLOADS | VARIANTS).items()
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--results",
        type=Path,
        default=Path("outputs/bench_tuner.jsonl"),
        help="file of all measurements; it is added to",
    )
    add(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "bench_tuner",
        help="where the data sets are made",
    )
    add("--only", help="which of the workloads below, with commas between; all if not given")
    add("--strategies", help="which strategies, with commas between; all if not given")
    add("--auto-repeats", type=int, default=2, help="how often auto chooses (default 2)")
    add(
        "--choosing-rounds",
        type=int,
        default=2,
        help="rounds from which the oracle picks (default 2)",
    )
    add("--rounds", type=int, default=8, help="scoring rounds (default 8)")
    add("--seconds", type=float, default=2.0, help="least window of one measurement (default 2)")
    add("--minutes", type=float, default=float("inf"), help="stop after so many minutes")
    add("--table", action="store_true", help="measure nothing, print what the results say")
    add(
        "--write", action="store_true", help=f"as --table, and write it to {PAGE.relative_to(ROOT)}"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    a = parser.parse_args(argv)
    from scripts.measured import listed

    names = listed(parser, "--only", a.only, [*WORKLOADS, *VARIANTS])
    results = Results(a.results)
    if not (a.table or a.write):
        from scripts.tuner_strategies import STRATEGIES

        strategies = listed(parser, "--strategies", a.strategies, [*STRATEGIES])
        deadline = time.monotonic() + 60 * a.minutes
        plan = Plan(strategies, a.auto_repeats, a.choosing_rounds, a.rounds, a.seconds, deadline)
        # what a run of this script in another namespace needs
        passed_on = []
        for name in ("results", "folder", "auto_repeats", "choosing_rounds", "rounds", "seconds"):
            passed_on += [f"--{name.replace('_', '-')}", str(getattr(a, name))]
        if a.strategies is not None:
            passed_on += ["--strategies", a.strategies]
        try:
            run(names, passed_on, a.folder, results, plan)
        except StoppedError:
            tell("the time is over; start again to go on")
            return 0
        except KeyboardInterrupt:
            return 130
    from scripts import tuner_page
    from scripts.measured import write

    page = tuner_page.show(results.lines)
    print(page)
    if a.write:
        write(PAGE, page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
