"""``mode=diagnose``: what bounds training, found on the user's own settings in a minute, without
training.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.config import ConfigError
from harness.data.images import ImageDataset
from harness.diagnose.fetch import image_sizes
from harness.diagnose.report import Diagnosis, command, sentence
from harness.diagnose.runs import BUDGET_S, COLUMNS, WIDTHS, FirstReads, Runs, Session
from harness.diagnose.whatif import NO_CEILING, Facts, bound, what_ifs
from harness.feed.forms import Feeds
from harness.feed.interface import FeedSettings
from harness.runtime import accelerator
from harness.runtime.folder import LOGGER
from harness.runtime.limits import Limits
from harness.tuning.figures import Trainee
from harness.tuning.model import undisturbed
from harness.tuning.probe import Lab
from harness.watch.board import Board
from harness.watch.console import live_table
from harness.watch.neighbours import Neighbours
from harness.watch.stages import SAMPLE, StageCost, StageTotals

_FEW = 2  # images whose step is tried first: batch normalisation needs more than one
_REST_S = 5.0  # for what surrounds the runs, and for what is begun in time and ends late
_LONGEST_STEP_S = 2.0  # of steps that take longer a diagnosis would see too few

_log = logging.getLogger(LOGGER)


def diagnose(
    feeds: Feeds,
    trainee: Trainee,
    limits: Limits,
    overridden: Sequence[str],
    folder: Path,
    board: Board | None,
) -> Diagnosis:
    """What bounds training, measured in a minute at most; printed and written into ``folder`` by
    the first rank.

    No trace stays: what steps change is put back, random states are as before. What torch.compile
    takes comes on top.

    Args:
        feeds: makes the feeds to be measured.
        trainee: the training step.
        limits: what this rank may use.
        overridden: what the user's command line set.
        folder: the run's.
        board: TensorBoard, on the first rank alone.

    Raises:
        BadSample: a sample cannot be read.
        ConfigError: the data set's stages cannot be told apart.
        LoaderError: loading does not work at all.
    """
    begin = time.perf_counter()
    config = feeds.config
    world = feeds.world
    train = feeds.splits.train
    if not isinstance(train, ImageDataset):
        raise ConfigError(
            "mode=diagnose: cannot look into a Dataset of your own; open sources, or train with "
            "mode=train"
        )
    neighbours = Neighbours(limits.cores if world.size == 1 else None)
    with (
        trainee.kept(),
        live_table(
            f"diagnosing (at most {BUDGET_S:g} s, nothing is trained)", COLUMNS, WIDTHS
        ) as rows,
    ):
        size, notes = _batch_size(feeds, trainee)
        feeds = _with_batches_of(size, feeds)
        own = world.agreed(feeds.settings(limits))
        lab = Lab(probes := FirstReads(feeds), trainee, limits, world, batch=feeds.noise(size))
        session = Session(lab, probes, train, rows, begin + BUDGET_S - _REST_S, notes=notes)
        runs = session.run(own)
    if (others := neighbours.look()) is not None:
        _log.warning("%s", neighbours.told(others))

    def fits(settings: FeedSettings) -> str | None:
        return lab.refusal(dataclasses.replace(settings, batch_size=config.loader.batch_size))

    facts = dataclasses.replace(_facts(runs, own, lab, train, fits), others=others)
    found = bound(facts)
    diagnosis = Diagnosis(
        bottleneck=found.bottleneck,
        ceiling=None if found.bottleneck in NO_CEILING else facts.ceiling,
        measured=facts.is_measured,
        sentence=sentence(facts, found),
        command=command(
            config,
            overridden,
            found.bottleneck,
            accelerator.of(world.device).kind,
            world.local_size,
        ),
        settings=own,
        runs=runs,
        what_ifs=tuple(what_ifs(facts)),
        notes=runs.notes,
        seconds=time.perf_counter() - begin,
    )
    diagnosis.publish(folder if world.is_main else None, board)
    return diagnosis


def _batch_size(feeds: Feeds, trainee: Trainee) -> tuple[int, list[str]]:
    """Images in a batch: the user's, or fewer where a step would take long, as on a CPU, and then a
    note that says so.
    """
    size = feeds.config.loader.batch_size
    if accelerator.of(trainee.device).kind == "cuda" or size <= _FEW:
        return size, []
    run = trainee.demand(feeds.noise(_FEW), 0.0)
    image_s = -feeds.world.smallest(
        -min(s / n for s, n in zip(run.seconds, run.images, strict=True))
    )
    fitting = max(_FEW, int(_LONGEST_STEP_S / image_s))
    if fitting >= size:
        return size, []
    whole_s = f"a step on loader.batch_size={size} would take about {size * image_s:.0f} s"
    return fitting, [f"measured with batches of {fitting} images: {whole_s}"]


def _with_batches_of(size: int, feeds: Feeds) -> Feeds:
    loader = dataclasses.replace(feeds.config.loader, batch_size=size)
    return Feeds(feeds.splits, dataclasses.replace(feeds.config, loader=loader), feeds.world)


def _facts(
    runs: Runs,
    own: FeedSettings,
    lab: Lab,
    train: ImageDataset,
    fits: Callable[[FeedSettings], str | None],
) -> Facts:
    loading = runs.loading
    limits = lab.limits
    trainee = lab.trainee
    assert loading.cost is not None
    stages = runs.stages
    cost = loading.cost
    if stages is None:  # no whole batch came: only what single samples took is known
        whole = StageCost(cost.wall_s * loading.images, cost.cpu_s * loading.images)
        stages = StageTotals(loading.images, 0, whole.wall_s, {SAMPLE: whole})
    else:  # with what a batch takes besides its samples
        wall_s, cpu_s = (
            sum(each) / stages.samples for each in zip(*stages.stages.values(), strict=True)
        )
        cost = dataclasses.replace(cost, wall_s=wall_s, cpu_s=cpu_s)
    return Facts(
        settings=own,
        cores=limits.cores,
        cores_from=limits.sources.get("cores", ""),
        on_cpu=accelerator.of(trainee.device).kind == "cpu",
        overlaps=trainee.overlaps,
        launch_s=lab.launch_s,
        demand=runs.demand,
        step_cpu_s=runs.step_cpu_s,
        cost=undisturbed(cost, loading.settings.num_workers, limits.cores),
        stages=stages,
        delivered=runs.delivered,
        wait_fraction=runs.wait_fraction,
        fetch_per_s=runs.fetch.images_per_s if runs.fetch else None,
        copy_per_s=runs.copy_per_s,
        image_size=train.image_size,
        sizes=image_sizes(train.source),
        fits=fits,
    )
