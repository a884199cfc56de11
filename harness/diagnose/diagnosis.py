"""Runs ``mode=diagnose``: finds the bottleneck with the user's settings within a minute.

Each run omits part of training: the step without loading, loading without the step, and reading
cold files alone. The method is DS-Analyzer's (Mohan, Phanishayee, Raniwala and
Chidambaram, VLDB 2021) on the user's own dataset, network and loader. Runs that do not fit in the
time are skipped, with a note. The tuner's ``Model`` estimates throughput with and without a change;
the measured throughput is scaled by the ratio, so that the model's errors cancel.
"""

from __future__ import annotations

import io
import math
import os
import random
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import psutil

from ..clock.figures import Ledger, Tag
from ..clock.stages import SAMPLE, StageCost, StageTotals, total
from ..config import Config, ConfigError, Precision
from ..data import shrink
from ..data.datasets import ImageDataset
from ..data.decode import reader
from ..data.storage import FileSource, Source, evenly_spaced, undivided
from ..feed.base import FeedSettings
from ..feed.feeds import Feeds
from ..monitor.console import AddRow, aligned, live_table
from ..monitor.host import Neighbors
from ..monitor.writer import RunWriter, publish
from ..report.evidence import Evidence, worker_cost
from ..report.statement import as_overrides, shrinking_helps, stated
from ..report.verdict import Verdict, judge
from ..runtime import accelerator
from ..runtime.distributed import World, resume_command
from ..runtime.errors import LoaderError
from ..runtime.files import open_regular
from ..runtime.limits import Limits
from ..tuning.lab import LoaderBenchmark
from ..tuning.measures import Model, Rate, Trial
from ..tuning.training_steps import TrainingBenchmark

_ROUNDS = 3
_LOADING_S = 1.5
_DEMAND_S = 1.0
_STEPS_S = 3.0
_FETCH_S = 4.0
# for workers and their first files
_START_S = 2.0
_LATE = "no time was left"
_UNREAD = "no whole batch was read before"
# fields of ``Figures``
_RUNS = (
    "demand", "in_bf16", "step_cpu_s", "loading", "warm", "delivered", "wait_fraction", "fetch",
    "copy_per_s",
)  # fmt: skip
# table rows
_LOADING = "loader only, files as they are"
_DEMAND = "training steps on one preloaded batch"
_BF16 = "training steps in bf16"
_STEPS = "training steps with the loader"
_WARM = "loader only, files already read"
_COLD = "reading cold files"


def files_of(source: Source) -> list[str]:
    """Returns the samples' files, at most 20,000 in random order, if each has its own file."""
    if not isinstance(undivided(source), FileSource):
        return []
    count = len(source)
    return [source.where(i) for i in random.Random().sample(range(count), min(count, 20_000))]


def short_sides(source: Source) -> list[int]:
    """Returns the shorter side lengths, in pixels, of up to 24 samples, within a second.

    Samples that are not image files are skipped.
    """
    found: list[int] = []
    end = time.perf_counter() + 1.0
    for i in evenly_spaced(len(source), 24):
        if time.perf_counter() > end:
            break
        # other files raise errors, and damaged bytes may make Pillow raise anything
        with suppress(Exception):
            data: Any = source.read(i)[0]
            plugin: Any = reader(data)
            found.append(min(plugin(io.BytesIO(data)).size))
    return found


def cold_fetch(files: list[str], readers: int, limit_s: float) -> Rate | str:
    """Returns the files/s read from cold storage by ``readers`` threads, or why it is unknown.

    The files are dropped from the page cache, and nothing is decoded. Other caches remain: those of
    a disk, a virtual machine's host or a file server.
    """
    if not files:
        return "the samples are not files of their own"
    sizes: list[int] = []
    begin = time.perf_counter()

    def work(path: str) -> None:
        # at least one file
        if sizes and time.perf_counter() >= begin + limit_s:
            return
        try:
            with open(open_regular(path), "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                sizes.append(len(file.readall()))
        except OSError as error:
            raise RuntimeError(f"{path} cannot be read: {error.strerror or error}") from error

    try:
        # bytes that this process has read from storage, not from the page cache
        before = psutil.Process().io_counters().read_bytes
        with ThreadPoolExecutor(readers) as pool:
            for _ in pool.map(work, files):
                pass
        seconds = time.perf_counter() - begin
        share = (psutil.Process().io_counters().read_bytes - before) / max(1, sum(sizes))
    except RuntimeError as error:
        return str(error)
    # psutil raises any of these
    except (AttributeError, psutil.Error, OSError):
        return "this system does not distinguish storage reads from page-cache hits"
    if share < 0.9:
        came = f"{share:.0%} of the bytes came from storage"
        return f"the page cache could not be emptied of these files ({came})"
    return Rate.of([len(sizes)], [seconds])


@dataclass(slots=True)
class Session:
    """A diagnosis that performs its runs one after another as long as time remains.

    Every rank makes the same calls.
    """

    lab: LoaderBenchmark
    source: Source
    add_row: AddRow
    ends: float  # on ``now``
    now: Callable[[], float] = time.perf_counter
    fetch: Callable[..., Rate | str] = cold_fetch
    notes: list[str] = field(default_factory=list)
    has_seen: bool = False  # whether every rank has a whole batch to read again

    def run(self, settings: FeedSettings) -> dict[str, Any]:
        """Returns the results of all runs with ``settings``, by their names in ``Figures``.

        Raises:
            BadSample: a sample cannot be read.
            LoaderError: loading fails.
        """
        lab = self.lab
        loading = self._supply(settings)
        cost = loading.cost
        if loading.rate is None or cost is None:
            raise LoaderError(
                f"loading does not work with {settings}: {loading.refused}; "
                "try other loader settings"
            )
        self._row(_LOADING, loading.rate)
        self.has_seen = lab.ranks.smallest(len(lab.probes.cursor.seen)) > 0
        stages = lab.meter.read() if lab.meter else None
        if not stages or not stages.samples:
            # no whole batch arrived; only the times of single samples are known
            stages = StageTotals(1, cost.wall_s, {SAMPLE: StageCost(cost.wall_s, cost.cpu_s)})
        found = {
            "settings": settings,
            "loading": loading,
            "stages": stages,
            **self._rounds(settings, cost.wall_s),
            "warm": self._warm(settings),
            "fetch": self._cold(max(1, settings.num_workers)),
            "copy_per_s": None,
            "notes": self.notes,
        }
        try:
            # from pageable and from pinned memory, on a CUDA device
            seconds = lab.copies_s()
        except RuntimeError as error:
            seconds = None
            self.notes.append(f"copies were not measured: {error}")
        if lab.batch and seconds:
            found["copy_per_s"] = len(lab.batch.labels) / seconds[settings.pin_memory]
        return found

    def in_bf16(self, trainee: TrainingBenchmark) -> Rate | None:
        """Returns the step's rate in bfloat16; None if no time is left."""
        if self._left_s() < 3 * _DEMAND_S:
            self._row(_BF16, None, "", _LATE)
            return None
        with trainee.in_bf16():
            rate, _ = self.lab.demand(_DEMAND_S, Rate.of)
        self._row(_BF16, rate)
        return rate

    def _rounds(self, settings: FeedSettings, sample_s: float) -> dict[str, Any]:
        """Returns the step rates with and without loading, from three rounds if time allows.

        They alternate, so that both face the same contention. A sample took ``sample_s`` to load.
        """
        demands: list[tuple[Rate, float]] = []
        steps: list[tuple[Rate, float]] = []
        # reserved for the loader alone, cold files and their workers
        after_s = 2 * _LOADING_S + _FETCH_S + _START_S
        for _ in range(_ROUNDS):
            began = self.now()
            # the mean, to be comparable with real steps
            demands.append(self.lab.demand(_DEMAND_S, Rate.of))
            trial = self._steps(settings, sample_s, demands[-1][0])
            if trial.rate:
                steps.append((trial.rate, trial.wait_fraction or 0.0))
            # another round may take as long as this one
            if not trial.rate or self._left_s(self.now() - began) <= after_s:
                break
        demand, step_cpu_s = _middle(demands)
        delivered, wait_fraction = _middle(steps) if steps else (None, None)
        self._row(_DEMAND, demand)
        remark = "" if settings.num_workers else "on images read before"
        self._row(_STEPS, delivered, remark, trial.refused)
        return {
            "demand": demand,
            "step_cpu_s": step_cpu_s,
            "delivered": delivered,
            "wait_fraction": wait_fraction,
        }

    def _steps(self, settings: FeedSettings, sample_s: float, demand: Rate) -> Trial:
        """Returns a trial of real steps, rejected if the first few would exceed the time left.

        Without workers, this process itself reads and cannot abandon a file that hangs, so it
        rereads earlier samples.
        """
        workers = settings.num_workers
        batch_s = settings.batch_size * sample_s
        each_s = settings.batch_size / demand.images_per_s + batch_s / max(1, workers)
        # the first batch, some uncounted ones, two counted ones
        need_s = _START_S + batch_s + _STEPS_S + 4 * each_s
        if not workers and not self.has_seen:
            refused = _UNREAD
        elif need_s > (left_s := self._left_s()):
            refused = (
                f"the first batches would take {need_s:.0f} s; {max(0.0, left_s):.0f} s were left"
            )
        else:
            return self.lab.attempt(settings, "steps", _STEPS_S)
        return Trial(settings, "steps", refused=refused)

    def _warm(self, settings: FeedSettings) -> Trial | None:
        """Returns the rate for files already read; None if no time is left or nothing was read."""
        missing: str | None = _LATE
        if not self.has_seen:
            missing = _UNREAD
        elif self._left_s() > 2 * _LOADING_S + _START_S:
            self.lab.warm = True
            trial = self._supply(settings)
            self._row(_WARM, trial.rate, "warm", trial.refused)
            return trial if trial.rate else None
        self._row(_WARM, None, "", missing)
        return None

    def _cold(self, readers: int) -> Rate | None:
        """Returns the slowest rank's rate for cold files; None if a rank could not measure it."""
        limit_s = min(_FETCH_S, self._left_s() - _START_S)
        found: Rate | str = _LATE
        if limit_s > 0:
            found = self.fetch(files_of(self.source), readers, limit_s)
        every = self.lab.ranks.gathered(found)
        if missing := [each for each in every if isinstance(each, str)]:
            self._row(_COLD, None, "", missing[0])
            return None
        slowest: Rate = min(every)
        self._row(_COLD, slowest, f"{readers} files at a time, nothing decoded")
        return slowest

    def _left_s(self, less_s: float = 0.0) -> float:
        """Returns the fewest seconds left on any rank, after subtracting its own ``less_s``."""
        return self.lab.ranks.smallest(self.ends + self.lab.first_s - self.now() - less_s)

    def _supply(self, settings: FeedSettings) -> Trial:
        """Returns loader-only throughput, with at least one worker, which can be terminated."""
        working = replace(settings, num_workers=max(1, settings.num_workers))
        return self.lab.attempt(working, "supply", _LOADING_S)

    def _row(
        self, name: str, rate: Rate | None, remark: str = "", missing: str | None = None
    ) -> None:
        """Adds a row to the table, and a note if a value is missing."""
        if missing:
            self.notes.append(f"not measured: {name} ({missing})")
        self.add_row((name, str(rate or "-"), missing or remark))


def _middle(rounds: list[tuple[Rate, float]]) -> tuple[Rate, float]:
    """Returns the medians over rounds; the rate of a single round keeps its interval."""
    rates, others = zip(*rounds, strict=True)
    rate = rates[0]
    if len(rates) > 1:
        rate = Rate.typical([each.images_per_s for each in rates], 1.0)
    return rate, median(others)


# the rates are too uneven, or include other programs
_NO_CEILING = ("unknown", "neighbors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A diagnosis's measurements, and values derived from them; None if not measured.

    Attributes:
        settings: the loader's settings.
        demand: images/s of the step on a preloaded batch.
        in_bf16: the same in bfloat16.
        step_cpu_s: CPU seconds of the step per image.
        loading: the loader only, with the files as they were.
        stages: the workers' time in ``loading``, by stage.
        model: model of throughput, by the cost of a sample with the files as they are.
        warm: the loader only, with files read before.
        delivered: images/s of real steps; without workers, on samples read before.
        wait_fraction: fraction of time in which these steps waited for data.
        fetch: rate of reading cold files.
        copy_per_s: images/s of copies to a CUDA device, from the memory that the settings choose.
        notes: skipped runs with reasons, one sentence each.
        device: cpu, cuda or mps.
        by_quota: whether a quota limits the cores.
        image_size: side length of the crop, in pixels.
        short_sides: shorter side lengths of some stored images, in pixels.
        fits: returns why settings do not fit this machine, or None.
        others: cores that other programs used in the meantime; None if harmless.
    """

    settings: FeedSettings
    demand: Rate
    step_cpu_s: float
    loading: Trial
    stages: StageTotals
    model: Model
    in_bf16: Rate | None = None
    warm: Trial | None = None
    delivered: Rate | None = None
    wait_fraction: float | None = None
    fetch: Rate | None = None
    copy_per_s: float | None = None
    notes: Sequence[str] = ()
    device: str
    by_quota: bool
    image_size: int
    short_sides: Sequence[int]
    fits: Callable[[FeedSettings], str | None]
    others: float | None

    @property
    def estimated(self) -> float:
        """Images/s of steps, as estimated by the model."""
        return self.model.delivered(self.settings.num_workers)

    @property
    def measured(self) -> float | None:
        """Images/s of real steps; None if not measured, or not on first reads."""
        cost = self.model.cost
        # without workers, steps ran on samples read before, without their waits
        if self.delivered and (self.settings.num_workers or cost.cpu_s > 0.5 * cost.wall_s):
            return self.delivered.images_per_s
        return None

    @property
    def got(self) -> float:
        """Images/s of steps: measured if possible; otherwise, estimated by the model."""
        return self.measured or self.estimated

    @property
    def ceiling(self) -> float:
        """Speedup if loading were free."""
        return max(1.0, self.model.demand / self.got)

    @property
    def lost(self) -> float:
        """Fraction of time lost to loading: steps wait, and are faster without loading."""
        lost = 1 - 1 / self.ceiling
        if self.measured and self.wait_fraction is not None:
            return min(lost, self.wait_fraction)
        return lost

    @property
    def most_workers(self) -> int:
        """The smallest number of workers that fits and gives the highest throughput."""
        own = self.settings
        model = self.model
        # no more than the tuner would try
        cap = max(8, int(4 * model.cores), own.num_workers)
        wanted = min(model.workers_for(model.reachable), cap)
        while wanted > 1 and self.fits(replace(own, num_workers=wanted)):
            wanted -= 1
        # 0 for a backend that never has workers
        return replace(own, num_workers=wanted).num_workers


def judged(found: Figures, **network: Any) -> Verdict:
    """Returns the verdict on a run with these measurements.

    Args:
        found: the measurements.
        network: ``trainer`` and ``half_precision``, as ``Evidence`` has them.
    """
    # batches that are made in time but reach the step late wait for copies or transfers
    where = "make"
    if found.got < 0.8 * found.estimated:
        # copies are hardly faster than the steps, so they fill the time
        where = "move" if (found.copy_per_s or math.inf) < 1.25 * found.got else "transport"
    window = replace(
        Ledger().window(),
        steps=100,
        images_per_s=found.got,
        stall_fraction=found.lost,
        stall_basis="host" if found.device == "cpu" else "device",
        shares={"starved": found.lost, "compute": 1 - found.lost},
        wait_parts={"make": 0.0, where: 1.0},
    )
    model = found.model
    verdict = judge(
        Evidence(
            window=window,
            stages=found.stages,
            settings=found.settings,
            cores=model.cores,
            by_quota=found.by_quota,
            device=found.device,
            sampled={Tag.CPU_CORES: (model.cost.cpu_s + model.step_cpu_s) * found.got},
            autotuned=False,
            most_workers=found.most_workers,
            others=found.others,
            ceiling=found.ceiling,
            **network,
        )
    )
    uneven = any(rate and rate.is_uneven for rate in (found.demand, found.delivered))
    if uneven and verdict.kind != "neighbors":
        return Verdict("unknown", verdict.shares, why="uneven")
    return verdict


def what_ifs(found: Figures, bottleneck: str) -> dict[str, float]:
    """Returns images/s with each change, the ceiling first; empty if there is no ceiling."""
    if bottleneck in _NO_CEILING:
        return {}
    got = found.got
    rates = {"loading were free (the ceiling)": max(found.model.demand, got)}
    # if transfers are the limit, changes elsewhere do not help
    if bottleneck not in ("transport", "copy"):
        copies = found.copy_per_s or math.inf
        for change, model, workers in _changes(found):
            given = got / found.estimated * model.delivered(workers)
            rates[change] = max(got, min(model.demand, copies, given))
    if found.fetch:
        rates["every file came cold from storage"] = min(got, found.fetch.images_per_s)
    return rates


def _changes(found: Figures) -> Iterator[tuple[str, Model, int]]:
    """Yields the description of each change, with the model and the workers that result from it."""
    model = found.model
    own = found.settings.num_workers
    if found.in_bf16:
        rate = found.in_bf16.images_per_s
        # on a CPU, the step's CPU time shrinks with its duration
        step_s = model.step_cpu_s * (model.demand / rate if found.device == "cpu" else 1.0)
        yield "trainer.precision=bf16", replace(model, demand=rate, step_cpu_s=step_s), own
    if (workers := found.most_workers) > own:
        yield f"loader.num_workers={workers}", model, workers
    for more in (1, 2, 4):
        widened = replace(found.settings, num_workers=own + more)
        if widened.num_workers and found.fits(widened) is None:
            # a step on the same cores is faster in proportion, at best
            faster = 1 + more / model.cores * (found.device == "cpu")
            wider = replace(model, cores=model.cores + more, demand=faster * model.demand)
            yield f"{more} more core{'s' * (more > 1)}, and a worker for each", wider, own + more

    # savings per sample, as fractions of its wall and CPU time
    stages = found.stages.stages
    sample = worker_cost(found.stages)
    assert sample is not None
    whole_s, whole_cpu_s = total(stages.values())
    read, decode = (stages.get(name, StageCost(0.0, 0.0)) for name in ("read", "decode"))
    wall = (read.wall_s + decode.wall_s) / whole_s
    cpu = (read.cpu_s + decode.cpu_s) / max(whole_cpu_s, 1e-9)
    # time that reads wait for anything but a core
    waits = (read.wall_s - sample.contention * read.cpu_s) / whole_s
    savings = {
        "a disk twice as fast": (waits / 2, 0.0),
        "preloaded decoded images (no reading, no decoding)": (wall, cpu),
    }
    # as for evaluation, and with room for random crops
    sides = found.short_sides
    for crops in (1.15, 2.0):
        short = crops * found.image_size
        gone = sum(1 - min(1.0, short / side) ** 2 for side in sides) / max(1, len(sides))
        savings[f"files with a short side of {short:.0f} pixels"] = gone * wall, gone * cpu
    for words, (wall, cpu) in savings.items():
        if wall > 0.02:
            wall_s = max(0.001, 1 - wall) * model.cost.wall_s
            cost = replace(model.cost, wall_s=wall_s, cpu_s=(1 - cpu) * model.cost.cpu_s)
            yield words, replace(model, cost=cost), own


def diagnose(
    feeds: Feeds,
    trainee: TrainingBenchmark,
    limits: Limits,
    overridden: Sequence[str],
    writer: RunWriter | None,
) -> dict[str, Any]:
    """Returns the bottleneck; the first rank prints it and writes ``diagnosis.json``.

    Takes at most a minute, excluding torch.compile. Random states and any state changed by steps
    are restored.

    Args:
        feeds: makes the feeds to measure.
        trainee: the training step.
        limits: resources available to this rank.
        overridden: the command-line overrides.
        writer: writes the file; only on the first rank.

    Raises:
        BadSample: a sample cannot be read.
        ConfigError: the dataset has no separate stages.
        LoaderError: loading fails.
    """
    begin = time.perf_counter()
    config = feeds.config
    found = measure(feeds, trainee, limits, begin + 60.0)
    half_precision = accelerator.get(trainee.device).half_precision
    verdict = judged(found, trainer=config.trainer, half_precision=half_precision)
    if verdict.kind == "decode":
        verdict.shares.shrinks = shrink.speedup(feeds.splits.train)
    diagnosis = {
        "bottleneck": verdict.kind,
        "ceiling": None if verdict.kind in _NO_CEILING else found.ceiling,
        # else the throughput of real steps is estimated
        "measured": found.measured is not None,
        "sentence": stated(verdict).sentence,
        "command": command(config, overridden, verdict, feeds.world),
        "settings": found.settings,
        "runs": {name: run for name in _RUNS if (run := getattr(found, name)) is not None},
        "stages": found.stages.rows(),
        "what_ifs": [
            {"change": change, "images_per_s": rate, "speedup": rate / found.got}
            for change, rate in what_ifs(found, verdict.kind).items()
        ],
        "notes": found.notes,
        "seconds": time.perf_counter() - begin,
    }
    publish("diagnosis", lines(diagnosis), diagnosis, writer)
    return diagnosis


def lines(diagnosis: Mapping[str, Any]) -> list[str]:
    """Returns stages, changes, notes, the sentence and the next command."""
    rows = [
        (s["name"], s["group"], f"{s['wall_ms']:.3g}", f"{s['cpu_ms']:.3g}")
        for s in diagnosis["stages"]
    ]
    found = [
        "a sample in a worker, files as they are",
        *aligned(("stage", "kind", "ms", "CPU ms"), rows),
    ]
    if changes := diagnosis["what_ifs"]:
        found.append("what if (calculated from the numbers above)")
        found += aligned(
            ("", "images/s", "speedup"),
            [
                (w["change"], str(Rate.exactly(w["images_per_s"])), f"{w['speedup']:.2f}x")
                for w in changes
            ],
        )
    found += [f"note: {note}" for note in diagnosis["notes"]]
    return [*found, diagnosis["sentence"], "next:", diagnosis["command"]]


def measure(feeds: Feeds, trainee: TrainingBenchmark, limits: Limits, ends: float) -> Figures:
    """Returns the measurements from runs until about ``ends``; warns about other programs."""
    config = feeds.config
    world = feeds.world
    train = feeds.splits.train
    if not isinstance(train, ImageDataset):
        raise ConfigError(
            "mode=diagnose: needs a source (docs/how-to/own-model-and-data.md); with your own "
            "Dataset, omit mode: the run itself ends with a verdict"
        )
    neighbors = Neighbors(limits.cores if world.size == 1 else None)
    title = "diagnosing (up to a minute, no training)"
    columns = ("run".ljust(len(_DEMAND)), "images/s    ", "")
    with trainee.preserved_state():
        add_row = live_table(title, columns)
        size, notes = fitting_batch(feeds, trainee)
        loader = replace(config.loader, batch_size=size)
        probes = Feeds(feeds.splits, replace(config, loader=loader), world)
        settings = world.agreed(probes.settings(limits))
        lab = LoaderBenchmark(probes, trainee, limits, world, batch=feeds.noise(size))
        # setup takes time, and runs may end late
        session = Session(lab, train.source, add_row, ends - 5.0, notes=notes)
        runs = session.run(settings)
        trainer = config.trainer
        if (
            trainer.precision is Precision.fp32
            and not trainer.compile
            and accelerator.get(trainee.device).half_precision == "bf16"
        ):
            runs["in_bf16"] = session.in_bf16(trainee)
    others = neighbors.warned()

    # including the time of a batch beyond its samples
    stages = runs["stages"]
    wall_s, cpu_s = (each / stages.samples for each in total(stages.stages.values()))
    loading = runs["loading"]
    loading = replace(loading, cost=replace(loading.cost, wall_s=wall_s, cpu_s=cpu_s))
    return Figures(
        **runs,
        model=lab.model(runs["demand"].images_per_s, runs["step_cpu_s"], loading),
        device=accelerator.get(trainee.device).kind,
        by_quota=limits.by_quota,
        image_size=train.image_size,
        short_sides=short_sides(train.source),
        # smaller batches may have been measured
        fits=lambda wanted: lab.refusal(replace(wanted, batch_size=config.loader.batch_size)),
        others=others,
    )


def fitting_batch(feeds: Feeds, trainee: TrainingBenchmark) -> tuple[int, list[str]]:
    """Returns the user's batch size, or one whose step takes 2 s, with a note.

    If steps took longer, as on a CPU, a diagnosis would see too few of them.
    """
    size = feeds.config.loader.batch_size
    if accelerator.get(trainee.device).has_streams:
        return size, []
    # batch normalization needs more than one image
    run = trainee.demand(feeds.noise(2), 0.0)
    # on the slowest rank
    fastest_s = min(s / n for s, n in zip(run.seconds, run.images, strict=True))
    image_s = feeds.world.largest(fastest_s)[0]
    fitting = max(2, int(2.0 / image_s))
    if fitting >= size:
        return size, []
    why = f"a step with loader.batch_size={size} takes too long"
    return fitting, [f"measured with batches of {fitting} images: {why}"]


def command(config: Config, overridden: Sequence[str], verdict: Verdict, world: World) -> str:
    """Returns the next command, with the user's overrides and the most helpful change."""
    root = config.data.root
    if root and shrinking_helps(verdict) and not verdict.change:
        return shlex.join(["wellfed", "shrink", root, f"{root.rstrip('/')}-small"])
    more = "loader.autotune=true"
    if verdict.kind in _NO_CEILING:
        # fewer torch threads, alongside other programs
        fewer = as_overrides(verdict.change) if verdict.kind == "neighbors" else ""
        more = f"{fewer} mode=diagnose"
    elif verdict.kind in ("compute", "balanced"):
        more = as_overrides(verdict.change)
    return resume_command(config, world, overridden, more.split(), "mode")
