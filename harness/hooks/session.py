"""One process whose training loop is watched: its folder, its figures, its last words."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from harness.feed.interface import FeedSettings
from harness.hooks import advice, patches
from harness.hooks.loops import Followed, Loops
from harness.page import document
from harness.runtime import folder, limits
from harness.runtime.errors import printable
from harness.runtime.files import read_json, write_whole
from harness.watch.board import Board
from harness.watch.clock import StepClock
from harness.watch.evidence import Evidence, RankFigures
from harness.watch.figures import Window, by_tag, told
from harness.watch.goodput import Course
from harness.watch.host import Sampler
from harness.watch.report import closing, report
from harness.watch.station import sampling
from harness.watch.verdict import Verdict, judge
from harness.watch.wording import Statement, stated, typed

# the function of that name hides the module
_spawn: Any = import_module("torch.multiprocessing.spawn")
_torchs_wrap = _spawn._wrap
# where batches come from no loader that is seen
_NO_LOADER = FeedSettings(1, 0, False, None, False, 0.0, "")
# for the other ranks' figures, at the end
_PATIENCE_S = 10.0
_SAMPLE_S = 1.0


class Session:
    """What the hooks see of this process, written down.

    Args:
        name: of the script, for people.
        place: the folder for the report; None: ``outputs/<date>/<time>``.
        tensorboard: whether an event file is written.
        began_s: when the command began, on ``time.perf_counter``.

    Attributes:
        running: the session of this process, until it is finished.
    """

    running: ClassVar[Session | None] = None

    def __init__(self, name: str, place: Path | None, tensorboard: bool, began_s: float) -> None:
        Session.running = self
        self.loops = Loops(self._open, self._window, self._passed)
        self._name = name
        self._place = place
        self._tensorboard = tensorboard
        self._course = Course(began_s)
        self._began = time.time()
        self._stack = ExitStack()
        self._board: Board | None = None
        self._sampler: Sampler | None = None
        self._has_children = False
        # say how fast training is at the end of each pass
        self.tells_passes = False
        # by a signal that the script itself handles
        self.interrupted = False

    def _passed(self, clock: StepClock) -> None:
        """Tells how training went so far."""
        if self.tells_passes and not self.loops.rank:
            for line in closing(told(clock.total(), self.loops.world_size), "samples"):
                _say(line)

    def _window(self, clock: StepClock) -> None:
        """Writes a window of steps."""
        window = clock.close_window()
        if window and window.steps and self._board and self._sampler:
            figures: dict[str, Any] = {**by_tag(window), **self._sampler.read()}
            self._board.scalars(self.loops.updates, figures)

    def _open(self) -> None:
        """Makes the folder, and begins to look at the machine: at the first update."""
        self._course.mark("start")
        if self.loops.rank:
            return
        if self._place is None:
            self._place = folder.new_folder(Path("outputs"))
        wanted = self._place
        numbers = count(1)
        # the report of an earlier run stays
        while (self._place / "report.json").exists():
            self._place = wanted.with_name(f"{wanted.name}-{next(numbers)}")
        folder.own(self._place)
        self._stack.callback(folder.release, self._place)
        board = Board(self._place, tensorboard=self._tensorboard)
        self._board = self._stack.enter_context(board)
        looks = sampling(self.loops.own, self.loops.world_size, _SAMPLE_S)
        self._sampler = self._stack.enter_context(looks)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches what happens in the block, and reports at its end, however it ends.

        What ``torch.multiprocessing`` spawns is watched too.
        """
        own = os.getpid()
        started = _spawn._wrap = _Started(self._name, self._place, self._tensorboard)
        status = "failed"
        try:
            with patches.installed(self.loops):
                yield
            status = "completed"
        except SystemExit as end:
            if not end.code:
                status = "completed"
            raise
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            _spawn._wrap = _torchs_wrap
            self._has_children = started.is_sent
            # a worker that the script forked may come here too
            if os.getpid() == own:
                self.finish("interrupted" if self.interrupted else status)

    def verdict(self) -> Statement:
        """Returns what bounds the steps so far; in the words of the loop."""
        clock = self.loops.clock
        if clock is None:
            return Statement("unknown", None, f"Unknown. {self._why_not()}.")
        return self._stated(judge(self._evidence(clock.total())))

    def finish(self, status: str) -> None:
        """Ends the figures, and writes and says what they come to; a second call does nothing."""
        if Session.running is not self:
            return
        Session.running = None
        try:
            self._finish(status)
        # how the script ends is not up to its report
        except Exception as error:
            _say(f"no report: {type(error).__name__}: {error}")

    def _finish(self, status: str) -> None:
        loops = self.loops
        if loops.fault:
            _say(f"the training was not watched to its end: {loops.fault}")
        loops.finish(completed=status == "completed")
        clock = loops.clock
        if clock is None:
            # those that it started tell theirs
            if not self._has_children:
                _say(f"no training was seen: {self._why_not()}")
            return
        if loops.rank:
            _write_rank(self._rank_figures(clock.total()))
            return
        if self._board is None or self._place is None:
            # there is no folder for it
            return
        self._window(clock)
        with self._stack:
            found = self._report(clock, status)
            self._board.report(found)
            verdict: Statement = found["verdict"]
            self._board.text("verdict", [verdict.sentence, *verdict.evidence])
        document.write_report(self._place)
        for line in self._words(found):
            _say(line)

    def _why_not(self) -> str:
        if not self.loops.followed:
            return "no DataLoader of torch's was made, and no optimizer stepped"
        return "no optimizer of torch's stepped in the thread that began the script"

    def _evidence(self, total: Window) -> Evidence:
        """Returns what is known of the steps so far."""
        loops = self.loops
        main = loops.main
        own = loops.own
        return Evidence(
            window=total,
            stages=main.meter.stages.read() if main and main.meter else None,
            settings=main.settings if main else _NO_LOADER,
            cores=limits.measure(_local_ranks(loops.world_size)).cores,
            device=own.kind,
            half_precision=own.half_precision,
            sampled=self._sampler.means() if self._sampler else {},
            autotuned=main is None,
        )

    def _stated(self, verdict: Verdict) -> Statement:
        """Returns ``verdict`` in the words of the loop."""
        main = self.loops.main
        return stated(verdict, partial(advice.in_script, followed=main) if main else typed)

    def _report(self, clock: StepClock, status: str) -> dict[str, Any]:
        """Returns ``report.json``, as a run of our own leaves it."""
        loops = self.loops
        # most evaluations lie between two epochs
        total = replace(clock.total(), pauses_s={"evaluate": loops.evaluated_s})
        evidence = self._evidence(total)
        if loops.world_size > 1:
            others = _read_ranks(loops.world_size, self._began)
            evidence = replace(evidence, ranks=(self._rank_figures(total), *others))
        verdict = judge(evidence)
        change = None
        expected: list[str] = []
        if main := loops.main:
            change = advice.better(verdict, main)
            offered = ""
            if verdict.kind in ("decode", "augment", "workers"):
                offered = advice.offered(main)
            expected = [str(each) for each in (change, offered) if each]
        return report(
            evidence,
            self._stated(verdict),
            loops.world_size,
            loops.own.name if loops.own.kind == "cuda" else None,
            status=status,
            epochs=main.passes if main else 0,
            steps=loops.updates,
            goodput=self._course.goodput(total),
            loader=main and main.settings,
            loaders=[_told(each) for each in loops.followed],
            change=change,
            expected=expected,
            run={"name": self._place and self._place.name, "overrides": [self._name]},
        )

    def _rank_figures(self, total: Window) -> RankFigures:
        loops = self.loops
        forward_ms = None
        if loops.forwards and loops.own.kind == "cpu":
            forward_ms = 1e3 * loops.forward_s / loops.forwards
        return RankFigures.of(loops.rank, total, forward_ms)

    def _words(self, found: dict[str, Any]) -> Iterator[str]:
        """Iterates over the closing lines."""
        assert self._place is not None
        loops = self.loops
        for main in loops.training():
            settings = main.settings
            yield (
                f"loader         {main.where}: batch_size={settings.batch_size} {settings}, "
                f"{main.passes} passes, {found['steps']} updates"
            )
        yield from closing(found, "samples")
        yield f"verdict        {found['verdict'].sentence}"
        for text in found["expected"]:
            yield f"expected       {text}"
        for each in loops.followed:
            if each.elsewhere:
                yield f"not seen       the DataLoader at {each.where}: another thread iterates it"
        yield f"look at it     {os.path.relpath(self._place / 'report.html')}"


class _Started:
    """Runs a process of ``torch.multiprocessing.spawn``, watched; pickles to that process.

    ``is_sent``: there is one.
    """

    is_sent = False

    def __init__(self, name: str, place: Path | None, tensorboard: bool) -> None:
        self._args = name, place, tensorboard

    def __reduce__(self) -> tuple[object, ...]:
        self.is_sent = True
        return _Started, self._args

    def __call__(self, *args: Any) -> None:
        """Does what torch does in the process."""
        with Session(*self._args, began_s=time.perf_counter()).watching():
            _torchs_wrap(*args)


def _local_ranks(world_size: int) -> int:
    """Returns how many ranks share the processors that this process sees."""
    # those of srun are measured
    alone = 1 if "SLURM_STEP_TASKS_PER_NODE" in os.environ else world_size
    return int(os.environ.get("LOCAL_WORLD_SIZE", alone))


def _told(followed: Followed) -> dict[str, Any]:
    """Returns a loader for the report."""
    found = {"where": followed.where, **asdict(followed.settings)}
    for name in ("trains", "passes", "batches", "waited_s"):
        found[name] = getattr(followed, name)
    return found


def _say(line: str) -> None:
    """Says a line beside what the script prints."""
    with suppress(OSError, ValueError):
        print(f"wellfed: {printable(line)}", file=sys.stderr, flush=True)


def _ranks_folder() -> Path:
    """Returns where the ranks of one job leave their figures: a folder that they share."""
    place = "-".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    return Path("outputs", f".ranks-{place}")


def _write_rank(figures: RankFigures) -> None:
    place = _ranks_folder()
    # the first rank's report is without it then
    with suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        write_whole(place / f"{figures.rank}.json", json.dumps(asdict(figures)).encode())


def _read_ranks(world_size: int, since: float) -> Iterator[RankFigures]:
    """Iterates over the other ranks' figures, as far as they come in time."""
    place = _ranks_folder()
    until_s = time.perf_counter() + _PATIENCE_S
    for rank in range(1, world_size):
        path = place / f"{rank}.json"
        # an earlier job may have left one
        while not path.exists() or path.stat().st_mtime < since:
            if time.perf_counter() > until_s:
                return
            time.sleep(0.05)
        yield RankFigures(**read_json(path))
        path.unlink()
    with suppress(OSError):
        place.rmdir()
