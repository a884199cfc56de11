"""Collects metrics from one watched process, and writes its report.

Suggestions are phrased as changes to the loop.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..clock.clock import StepClock
from ..clock.figures import RankFigures, Window, as_report, by_tag
from ..clock.stages import GROUPS
from ..config import TrainerConfig
from ..feed.base import FeedSettings
from ..monitor.goodput import GoodputTimer
from ..monitor.host import Sampler
from ..monitor.monitor import sampling
from ..monitor.writer import RunWriter
from ..report.evidence import HARM, Evidence, WorkerCost
from ..report.page import document
from ..report.run_report import closing, report, used
from ..report.statement import Statement, stated
from ..report.verdict import Change, Verdict, judge
from ..runtime import accelerator, folder, gpus, limits
from ..runtime.errors import rounded, say
from ..runtime.files import read_json, write_whole
from . import patches
from .loops import LoopTracker, WatchedLoader
from .trial import FASTER

# settings, some with their values, and their counterparts in a user's loop
_WORDS: Mapping[str, str] = {
    "loader.num_workers": "num_workers={}",
    "loader.prefetch_factor": "prefetch_factor={}",
    "loader.pin_memory": "pin_memory={} and .to(device, non_blocking=True)",
    "loader.batch_size": "batch_size={}",
    "loader.persistent_workers": "persistent_workers={}",
    "trainer.precision=bf16": "torch.autocast with torch.bfloat16",
    "trainer.precision=fp16": "torch.autocast with torch.float16 and torch.amp.GradScaler",
    "trainer.channels_last": "model.to(memory_format=torch.channels_last)",
    "trainer.compile": "torch.compile(model)",
    "trainer.num_threads": "OMP_NUM_THREADS={}",
    "watch.window_steps": "logging less often",
}
# whether it does is not visible from outside
_SHARED = "IterableDataset must split its samples by get_worker_info(), or each worker repeats them"


@dataclass(frozen=True, slots=True)
class LoaderCall:
    """New arguments of a loader, and the expected speedup.

    Attributes:
        where: the file and line that created the loader.
        arguments: the new arguments by name.
        gain: ratio of expected to current samples/s.
        note: other effects; empty if none.
    """

    where: str
    arguments: Mapping[str, object]
    gain: float
    note: str

    def __str__(self) -> str:
        typed = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        text = f"DataLoader(..., {typed}) at {self.where}: up to {rounded(self.gain)}x as fast"
        return f"{text}. {self.note}" if self.note else text


def better(verdict: Verdict, followed: WatchedLoader) -> LoaderCall | None:
    """Returns the loader arguments that ``verdict`` suggests.

    None if it suggests neither more workers nor persistent ones.
    """
    found = verdict.shares
    own = followed.settings
    if verdict.kind == "starts":
        stay = {"persistent_workers": True}
        return LoaderCall(followed.where, stay, 1 / (1 - found.starting), "")
    workers = int(verdict.change.get("loader.num_workers", 0))
    if found.cost is None or not found.rate or workers <= own.num_workers:
        return None
    # the transfer time of batches stays the same
    fed = found.rate / max(1 - found.starved * found.made, 0.001)
    gain = min(found.could(), fed, workers / found.cost.wall_s) / found.rate
    arguments: dict[str, object] = {"num_workers": workers}
    if not own.persistent_workers and followed.passes > 1:
        arguments["persistent_workers"] = True
    if found.window.stall_basis == "device" and not own.pin_memory:
        arguments["pin_memory"] = True
    note = ""
    stages = found.stages.stages if found.stages else {}
    if followed.streams:
        note = f"The {_SHARED}"
    elif any(cost.wall_s and name not in GROUPS for name, cost in stages.items()):
        note = (
            "Random transforms draw different numbers: torch seeds the global generators in each "
            "worker. An object's own generator is copied and repeats: seed it in worker_init_fn"
        )
    return LoaderCall(followed.where, arguments, gain, note)


def offered(images: Any, cost: WorkerCost | None) -> list[str]:
    """Returns the change that adds wellfed's decoder, if it supports the dataset ``images``.

    ``cost`` is the cost of its samples.
    """
    if images is None:
        return []
    # imports torchvision
    from .faster import faster

    effect = "decodes, crops, resizes and flips in one pass"
    with suppress(ValueError, AttributeError):
        faster(images)
        return [f"{FASTER}: {effect}"]
    kind = type(images)
    if (
        cost is None
        or cost.parts.get("decode", 0.0) < HARM
        or kind.__module__.startswith("torchvision.")
    ):
        return []
    for name, own in vars(images).items():
        with suppress(ValueError, AttributeError):
            faster(own)
            return [
                f"self.{name} = wellfed.faster(self.{name}), and wellfed.load_image(path) for "
                f"Image.open(path) in {kind.__name__}: {effect}"
            ]
    return []


def in_script(change: Change, followed: WatchedLoader) -> str:
    """Returns the settings in ``change`` as code for the user's loop."""
    return ", ".join(_in_script(name, value, followed) for name, value in change.items())


def _in_script(name: str, value: int | bool | str, followed: WatchedLoader) -> str:
    room, _, argument = name.partition(".")
    if argument == "autotune":
        tuned = "" if followed.streams else " (wellfed.tune finds them)"
        return f"other arguments of the DataLoader at {followed.where}{tuned}"
    text = _WORDS.get(f"{name}={value}") or _WORDS[name].format(value)
    if room != "loader":
        return text
    now = getattr(followed.settings, argument)
    condition = ""
    if followed.streams and argument == "num_workers" and int(value) > now:
        condition = f"; the {_SHARED}"
    if followed.remade and argument == "persistent_workers":
        condition = "; create it once, before the epochs"
    return f"{text} in the DataLoader at {followed.where} (now {now}{condition})"


# the function of that name hides the module
_spawn: Any = import_module("torch.multiprocessing.spawn")
_torchs_wrap = _spawn._wrap
# for batches that come from no watched loader
_NO_LOADER = WatchedLoader("", FeedSettings(1, 0, False, None, False, 0.0, ""))
# wait for the other ranks' metrics at the end
_PATIENCE_S = 10.0
_SAMPLE_S = 1.0
# time between progress lines
_TELL_S = 30.0
# reported for a loader, in addition to its settings
_TOLD = ("where", "trains", "passes", "batches", "waited_s", "started_s")


class Session(LoopTracker):
    """Records and reports training in this process.

    Args:
        name: the script's name, for display.
        place: the folder for the report; None for ``outputs/<date>/<time>``.
        tensorboard: whether to write an event file.
        base: the base for relative paths, even if the script changes directory; None for the
            current folder.
        began_s: when the command began, on ``time.perf_counter``; None for now.

    Attributes:
        running: the session of this process, until it is finished.
    """

    running: ClassVar[Session | None] = None

    def __init__(
        self,
        name: str,
        place: Path | None,
        tensorboard: bool = True,
        base: Path | None = None,
        began_s: float | None = None,
    ) -> None:
        super().__init__()
        Session.running = self
        self._name = name
        self._base = base or Path.cwd()
        self._place = place and self._base / place
        self._tensorboard = tensorboard
        self._course = GoodputTimer(began_s or time.perf_counter())
        self._began = time.time()
        self._stack = ExitStack()
        self._writer: RunWriter | None = None
        self._sampler: Sampler | None = None
        self._has_children = False
        # print the speed at the end of each pass
        self.tells_passes = False
        # set by a signal that the script handles
        self.interrupted = False
        # print progress every _TELL_S seconds
        self.tells = False
        self._told = 0.0, ""
        self.on_first_update: Callable[[], None] | None = None

    def on_pass(self, clock: StepClock) -> None:
        """Prints the speed so far."""
        if self.tells_passes and not self.rank:
            for line in closing(as_report(clock.total(), self.world_size), "samples"):
                say(line)

    def on_window(self, clock: StepClock) -> None:
        """Writes a window of steps."""
        window = clock.close_window()
        if window and window.steps and self._writer and self._sampler:
            figures: dict[str, Any] = {**by_tag(window), **self._sampler.read()}
            self._writer.scalars(self.updates, figures)
            if self.tells and time.perf_counter() > self._told[0] + _TELL_S:
                self._tell(clock.total())

    def _tell(self, total: Window) -> None:
        """Prints progress, and a suggested change if it is new."""
        verdict = judge(self._evidence(total))
        change = self.main and better(verdict, self.main)
        new = f"; {change}" if change and str(change) != self._told[1] else ""
        self._told = time.perf_counter(), str(change or self._told[1])
        waits = total.data_wait_fraction or 0.0
        step = f"{total.step_ms.median:.1f} ms per step, " if total.step_ms else ""
        say(f"so far         {step}data wait {waits:.0%}, {verdict.kind}{new}")

    def on_start(self) -> None:
        """Creates the folder and starts sampling the machine, at the first update."""
        self._course.mark("start")
        self._told = time.perf_counter(), ""
        if self.on_first_update:
            self.on_first_update()
        if self.rank:
            return
        if self._place is None:
            self._place = folder.new_folder(self._base / "outputs")
        wanted = self._place
        numbers = count(1)
        # keep the report of an earlier run
        while (self._place / "report.json").exists():
            self._place = wanted.with_name(f"{wanted.name}-{next(numbers)}")
        if self._place != wanted:
            say(f"{wanted.name} already has a report; writing this one to {self._place.name}")
        folder.own(self._place)
        self._stack.callback(folder.release, self._place)
        writer = RunWriter(self._place, tensorboard=self._tensorboard)
        self._writer = self._stack.enter_context(writer)
        looks = sampling(self.own, self.world_size, _SAMPLE_S)
        self._sampler = self._stack.enter_context(looks)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches what happens in the block, and reports at its end, however it ends.

        Processes spawned by ``torch.multiprocessing`` are watched too.
        """
        started = _spawn._wrap = _Started(self._name, self._place, self._tensorboard, self._base)
        status = "failed"
        try:
            with patches.installed(self):
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
            self.finish("interrupted" if self.interrupted else status)

    def verdict(self) -> Statement:
        """Returns the bottleneck of the steps so far, in terms of the loop."""
        clock = self.clock
        if clock is None:
            return Statement("unknown", None, f"Unknown. {self._why_not()}.")
        return self._stated(judge(self._evidence(clock.total())))

    def finish(self, status: str) -> None:
        """Writes and prints the report; does nothing in a second call or a forked process."""
        if Session.running is not self:
            return
        Session.running = None
        try:
            self._finish(status)
        # a failing report must not change how the script ends
        except Exception as error:
            say(f"no report: {type(error).__name__}: {error}")

    def _finish(self, status: str) -> None:
        if self.fault:
            say(f"watching stopped before the end of training: {self.fault}")
        self.end(completed=status == "completed")
        clock = self.clock
        if clock is None:
            # its child processes report their own
            if not self._has_children:
                why = f": {self._why_not()}" if status != "failed" else " before the script failed"
                say(f"no training was detected{why}")
            return
        if self.rank:
            figures = RankFigures.of(self.rank, clock.total(), self.forward_ms)
            path = _ranks(self._base) / f"{self.rank}.json"
            # the first rank's report then lacks it
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, json.dumps(asdict(figures)).encode())
            return
        if self._writer is None or self._place is None:
            # there is no folder for the report
            return
        self.on_window(clock)
        with self._stack:
            found = self._report(clock, status)
            self._writer.report(found)
            verdict: Statement = found["verdict"]
            self._writer.text("verdict", [verdict.sentence, *verdict.evidence])
        document.write_report(self._place)
        for line in self._words(found):
            say(line)

    def _why_not(self) -> str:
        loader = "" if self.followed else "no torch DataLoader was iterated over, and "
        return (
            f"{loader}no torch optimizer stepped in the thread that started the script. "
            "wellfed.StepClock times other loops; in another process, put `with "
            "wellfed.watching():` around the loop"
        )

    def _evidence(self, total: Window) -> Evidence:
        """Returns the measurements of the steps so far."""
        main = self.main or _NO_LOADER
        own = self.own
        return Evidence(
            window=total,
            stages=main.meter.stages.read() if main.meter else None,
            settings=main.settings,
            cores=limits.measure(_local_ranks(self.world_size)).cores,
            device=own.kind,
            half_precision=own.half_precision,
            sampled=self._sampler.means() if self._sampler else {},
            autotuned=main is _NO_LOADER,
            trainer=TrainerConfig(num_threads=torch.get_num_threads()),
            starts=main.starts,
            started_s=main.started_s,
        )

    def _stated(self, verdict: Verdict) -> Statement:
        """Returns ``verdict`` in terms of the loop."""
        main = self.main
        if main is None:
            others = [f"; the one at {it.where} gave {it.batches} batches" for it in self.followed]
            text = (
                f"Unknown. No DataLoader fed the {self.updates} steps{''.join(others)}. Try: "
                "`for batch in wellfed.watched(batches):`, or for a function "
                "`batches = iter(wellfed.watched(iter(get_batch, None)))` and next(batches)"
            )
            return Statement("unknown", None, text)
        return stated(verdict, partial(in_script, followed=main))

    def _report(self, clock: StepClock, status: str) -> dict[str, Any]:
        """Returns ``report.json``, in the format of a training run."""
        # most evaluations are between epochs
        total = replace(clock.total(), pauses_s={"evaluate": self.evaluated_s})
        evidence = self._evidence(total)
        if self.world_size > 1:
            own = RankFigures.of(0, total, self.forward_ms)
            evidence = replace(evidence, ranks=(own, *self._other_ranks()))
        verdict = judge(evidence)
        change = None
        expected: list[str] = []
        if main := self.main:
            change = better(verdict, main)
            expected = [str(change)] if change else []
            kind = verdict.kind
            if kind == "neighbors" and verdict.shares.cost and verdict.shares.starved >= HARM:
                kind = verdict.shares.cost.kind
            if kind in ("decode", "augment", "workers"):
                expected += offered(main.images, verdict.shares.cost)
        return report(
            evidence,
            self._stated(verdict),
            self.world_size,
            None if self.own.is_host else self.own.name,
            status=status,
            epochs=main.passes if main else 0,
            steps=self.updates,
            goodput=self._course.goodput(total),
            loader=main and main.settings,
            loaders=[
                {name: getattr(each, name) for name in _TOLD} | used(each.settings)
                for each in self.followed
            ],
            change=change,
            expected=expected,
            run={"name": self._place and self._place.name, "overrides": [self._name]},
        )

    def _other_ranks(self) -> Iterator[RankFigures]:
        """Yields the other ranks' metrics, if they arrive in time."""
        place = _ranks(self._base)
        until_s = time.perf_counter() + _PATIENCE_S
        for rank in range(1, self.world_size):
            path = place / f"{rank}.json"
            # an earlier job may have left one
            while not path.exists() or path.stat().st_mtime < self._began:
                if time.perf_counter() > until_s:
                    return
                time.sleep(0.05)
            yield RankFigures(**read_json(path))
            path.unlink()
        with suppress(OSError):
            place.rmdir()

    def _words(self, found: dict[str, Any]) -> Iterator[str]:
        """Yields the closing lines."""
        assert self._place is not None
        for main in self.training():
            settings = main.settings
            yield (
                f"loader         {main.where}: batch_size={settings.batch_size} {settings}, "
                f"{main.passes} passes, {main.batches} batches, {found['steps']} steps"
            )
        idle = gpus.idle_names() if self.own.is_host and not gpus.are_hidden() else []
        if idle:
            how = "move the network and each batch to it: .to('cuda')"
            if not accelerator.count():
                how = "this torch cannot use it; install a CUDA build"
            yield f"not used       {idle[0]} is idle; {how}"
        yield from closing(found, "samples")
        yield f"verdict        {found['verdict'].sentence}"
        # a verdict about other programs has a suggestion of its own
        label = "also helps" if found["verdict"].bottleneck == "neighbors" else "suggestion"
        for text in found["expected"]:
            yield f"{label:14} {text}"
        for each in self.followed:
            if each.elsewhere:
                yield f"not measured   the DataLoader at {each.where} is used in another thread"
        yield f"look at it     {os.path.relpath(self._place / 'report.html', self._base)}"


os.register_at_fork(after_in_child=lambda: setattr(Session, "running", None))


class _Started:
    """Runs a watched process of ``torch.multiprocessing.spawn``; pickled to that process.

    ``is_sent`` is set once it has been pickled.
    """

    is_sent = False

    def __init__(self, *args: Any) -> None:
        self._args = args

    def __reduce__(self) -> tuple[object, ...]:
        self.is_sent = True
        return _Started, self._args

    def __call__(self, *args: Any) -> None:
        """Runs torch's function in the process."""
        name, place, tensorboard, base = self._args
        with Session(name, place, tensorboard, base).watching():
            _torchs_wrap(*args)


def _local_ranks(world_size: int) -> int:
    """Returns the number of ranks that share this process's cores."""
    # with srun, each task's own cores are measured
    alone = 1 if "SLURM_STEP_TASKS_PER_NODE" in os.environ else world_size
    return int(os.environ.get("LOCAL_WORLD_SIZE", alone))


def _ranks(base: Path) -> Path:
    """Returns the folder for the metrics from this job's ranks."""
    job = "-".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    return base / "outputs" / f".ranks-{job}"
