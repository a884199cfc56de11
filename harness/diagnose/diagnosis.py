"""``mode=diagnose``: what bounds training, found in a minute on the user's own settings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.config import Config, ConfigError
from harness.data.datasets import ImageDataset
from harness.diagnose.fetch import short_sides
from harness.diagnose.phases import FirstReads, Runs, Session
from harness.diagnose.whatif import NO_CEILING, Facts, WhatIf, judged, what_ifs
from harness.feed.feeds import Feeds
from harness.feed.interface import FeedSettings
from harness.feed.timed import TimedSteps
from harness.runtime import accelerator
from harness.runtime.distributed import World, again
from harness.runtime.folder import log
from harness.runtime.limits import Limits
from harness.tuning.measures import Rate
from harness.tuning.probe import Lab
from harness.watch.board import Board, plain, publish
from harness.watch.console import aligned, live_table
from harness.watch.host import Neighbours
from harness.watch.report import stated, typed
from harness.watch.verdict import HARM, Bottleneck, Verdict, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What bounds training, and what would change it.

    Attributes:
        bottleneck: the class, as in a run's verdict.
        ceiling: speed-up if loading were free; None: the rates are too uneven, or other programs'.
        measured: whether the ceiling rests on real steps; else what they get is estimated.
        sentence: the verdict in words.
        command: what to type next.
        settings: the loader's.
        runs: what was measured.
        what_ifs: what changes would give, by arithmetic.
        notes: what was not measured, and why.
        seconds: what the diagnosis took.
    """

    bottleneck: Bottleneck
    ceiling: float | None
    measured: bool
    sentence: str
    command: str
    settings: FeedSettings
    runs: Runs
    what_ifs: tuple[WhatIf, ...]
    notes: tuple[str, ...]
    seconds: float

    def publish(self, board: Board | None) -> None:
        """Prints the diagnosis; writes ``diagnosis.json`` and a text by ``board``, if any."""
        known = {**plain(self), "stages": self.runs.stages.rows()}
        publish("diagnosis", self.lines(), known, board)

    def lines(self) -> list[str]:
        """Returns stages, changes, notes, the sentence, and what to type next."""
        rows = [
            (s["name"], s["group"], f"{s['wall_ms']:.3g}", f"{s['cpu_ms']:.3g}")
            for s in self.runs.stages.rows()
        ]
        found = [
            "a sample in a worker, files as they are",
            *aligned(("stage", "kind", "ms", "of it on a processor"), rows),
        ]
        if self.what_ifs:
            changes = [
                (w.change, str(Rate.exactly(w.images_per_s)), f"{w.speedup:.2f}x")
                for w in self.what_ifs
            ]
            found.append("what if (arithmetic from the figures above)")
            found += aligned(("", "images/s", "speed-up"), changes)
        notes = [f"note: {note}" for note in self.notes]
        return [*found, *notes, self.sentence, "next:", self.command]


def diagnose(
    feeds: Feeds,
    trainee: TimedSteps,
    limits: Limits,
    overridden: Sequence[str],
    board: Board | None,
) -> Diagnosis:
    """Returns what bounds training; the first rank prints it and writes it.

    Takes a minute at most, besides torch.compile. No trace stays: what steps change is put back,
    random states are as before.

    Args:
        feeds: makes the feeds to be measured.
        trainee: the training step.
        limits: what this rank may use.
        overridden: what the user's command line set.
        board: writes it, on the first rank alone.

    Raises:
        BadSample: a sample cannot be read.
        ConfigError: the data set's stages cannot be told apart.
        LoaderError: loading does not work at all.
    """
    begin = time.perf_counter()
    config = feeds.config
    train = feeds.splits.train
    if not isinstance(train, ImageDataset):
        raise ConfigError(
            "mode=diagnose: needs a source (docs/adding.md); with a Dataset of your own leave mode "
            "out: the run itself ends with a verdict"
        )
    facts = measure(feeds, trainee, limits, train, begin + 60.0)
    half_precision = accelerator.of(trainee.device).half_precision
    verdict = judged(facts, trainer=config.trainer, half_precision=half_precision)
    notes = facts.runs.notes
    own = facts.settings
    refused = facts.fits(replace(own, num_workers=own.num_workers + 1))
    if refused and facts.lost >= HARM:
        notes += (f"no more workers fit: {refused}",)
    diagnosis = Diagnosis(
        bottleneck=verdict.kind,
        ceiling=None if verdict.kind in NO_CEILING else facts.ceiling,
        measured=facts.measured is not None,
        sentence=stated(verdict).sentence,
        command=command(config, overridden, verdict, feeds.world),
        settings=own,
        runs=facts.runs,
        what_ifs=tuple(what_ifs(facts, verdict.kind)),
        notes=notes,
        seconds=time.perf_counter() - begin,
    )
    diagnosis.publish(board)
    return diagnosis


def measure(
    feeds: Feeds, trainee: TimedSteps, limits: Limits, train: ImageDataset, ends: float
) -> Facts:
    """Returns what runs until about ``ends`` found; warns of other programs."""
    config = feeds.config
    world = feeds.world
    neighbours = Neighbours(limits.cores if world.size == 1 else None)
    title = "diagnosing (at most a minute, nothing is trained)"
    columns = (" ", f"{'run':34}", "images/s    ", "")
    with trainee.kept():
        add_row = live_table(title, columns)
        size, notes = fitting_batch(feeds, trainee)
        loader = replace(config.loader, batch_size=size)
        probes = FirstReads(feeds.splits, replace(config, loader=loader), world)
        settings = world.agreed(probes.settings(limits))
        lab = Lab(probes, trainee, limits, world, batch=feeds.noise(size))
        # what surrounds the runs takes time, and what is begun in time and ends late
        runs = Session(lab, probes, train, add_row, ends - 5.0, notes=notes).run(settings)
    others = neighbours.look()
    if others is not None:
        log.warning("%s", neighbours.told(others))

    cost = runs.loading.cost
    assert cost is not None
    # with what a batch takes besides its samples
    wall_s, cpu_s = total(runs.stages.stages.values())
    samples = runs.stages.samples
    cost = replace(cost, wall_s=wall_s / samples, cpu_s=cpu_s / samples)
    loading = replace(runs.loading, cost=cost)
    model = lab.model(runs.demand.images_per_s, runs.step_cpu_s, loading)
    return Facts(
        runs=runs,
        settings=settings,
        model=model,
        device=accelerator.of(trainee.device).kind,
        cores_from="quota" if limits.by_quota else "affinity",
        image_size=train.image_size,
        short_sides=short_sides(train.source),
        # measured may have been smaller batches
        fits=lambda wanted: lab.refusal(replace(wanted, batch_size=config.loader.batch_size)),
        others=others,
    )


def fitting_batch(feeds: Feeds, trainee: TimedSteps) -> tuple[int, list[str]]:
    """Returns the user's batch size, or one whose step takes 2 s, with a note.

    Of longer steps, as on a CPU, a diagnosis would see too few.
    """
    size = feeds.config.loader.batch_size
    if accelerator.of(trainee.device).kind == "cuda":
        return size, []
    # batch normalisation needs more than one image
    run = trainee.demand(feeds.noise(2), 0.0)
    # of the slowest rank
    fastest_s = min(s / n for s, n in zip(run.seconds, run.images, strict=True))
    image_s = -feeds.world.smallest(-fastest_s)
    fitting = max(2, int(2.0 / image_s))
    if fitting >= size:
        return size, []
    whole_s = f"a step on loader.batch_size={size} would take about {size * image_s:.0f} s"
    return fitting, [f"measured with batches of {fitting} images: {whole_s}"]


def command(config: Config, overridden: Sequence[str], verdict: Verdict, world: World) -> str:
    """Returns what to type next: the user's own overrides, and what would help most."""
    more = "loader.autotune=true"
    if verdict.kind in NO_CEILING:
        more = "mode=diagnose"
    elif verdict.kind in ("compute", "balanced"):
        more = typed(verdict.change)
    return again(config, world, overridden, more.split(), "mode")
