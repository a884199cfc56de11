"""Measures loaders in use: training, start and memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from harness.feed.base import PROCESSES
from harness.feed.feeds import Feeds
from harness.training.state import make_state
from harness.training.step import Step, device_batches
from scripts.bench.loader import measures
from scripts.bench.loader.data import CLASSES
from scripts.bench.loader.measures import (
    Found,
    array_feeds,
    counts,
    feeds,
    of_files,
    of_form,
    probed,
    window,
)
from scripts.bench.loader.peers import BATCH_SIZE, EXAMPLES, Counts, counted, examples
from scripts.bench.loader.score import AGAIN, BARE


def step(root: str, side: int, seconds: float) -> Found:
    """Returns the window of only the training step, repeated on one batch."""
    with probed(feeds(*of_files(root, side), *of_form(PROCESSES, 0))) as (made, feed):
        batch = next(iter(feed))
        return window(_steps(made, _normalized(made, itertools.repeat(batch))), seconds, skip=3)


def training(row: str, root: str, side: int, workers: int, seconds: float) -> Found:
    """Returns the window of training with a wellfed backend or pytorch/examples' loader."""
    form = PROCESSES if row == EXAMPLES else row
    with probed(feeds(*of_files(root, side), *of_form(form, workers))) as (made, feed):
        batches = _normalized(made, feed)
        if row == EXAMPLES:
            batches = iter(examples(Path(root), workers, side))
        return window(_steps(made, batches), seconds, workers)


def _normalized(made: Feeds, batches: Any) -> Iterator[Any]:
    return iter(device_batches(batches, made.config, made.world.device))


def _steps(made: Feeds, batches: Iterator[Any]) -> Counts:
    """Trains a small network on ``batches``; yields each step's images when it is done."""
    step = Step(make_state(made.config, CLASSES, made.world, made.steps_per_epoch()))
    step.model.train()
    for done, (images, labels) in enumerate(batches, 1):
        step(images, labels)
        # as training reads its loss
        if done % 10 == 0:
            step.read()
        yield len(labels)


def paced(
    root: str,
    form: str,
    workers: int,
    share: float,
    others: Sequence[int],
    seconds: float,
    back: bool,
) -> Found:
    """Returns the throughput of a sleeping device with wellfed's loader and the other one.

    Args:
        root: the tree of files.
        form: the wellfed backend.
        workers: its workers.
        share: the device's rate, as a fraction of the backend's loader-only throughput.
        others: numbers of workers to try with the other loader.
        seconds: length of each window.
        back: reverse the order.
    """
    wanted = [*of_files(root), *of_form(form, workers)]
    with feeds(*wanted) as (made, settings):

        def ours(step_s: float) -> Found:
            with closing(made.probe(settings)) as feed:
                return window(_paced(counts(feed), step_s), seconds, workers)

        def theirs(count: int, step_s: float) -> Found:
            batches = _paced(counted(examples(Path(root), count)), step_s)
            return window(batches, seconds, count)

        # the device takes a fraction of the backend's throughput
        supply = _rate(ours(0.0))
        step_s = BATCH_SIZE / (share * supply)
        # ours twice as a control, theirs with each number of workers
        runs = [(name, partial(ours, step_s)) for name in (form, form + AGAIN)]
        runs += [(f"{EXAMPLES} {count}", partial(theirs, count, step_s)) for count in others]
        rates = {name: _rate(run()) for name, run in (reversed(runs) if back else runs)}
    return {"supply": supply, "demand": share * supply, "rates": rates}


def _paced(batches: Counts, step_s: float) -> Counts:
    for size in batches:
        time.sleep(step_s)
        yield size


def _rate(found: Found) -> float:
    return float(found["images"] / found["wall_s"])


def start(row: str, root: str, folder: str, workers: int) -> Found:
    """Returns seconds to the first batch, and memory after three batches per worker.

    Memory is the proportional set size, which counts shared memory once. ``row`` BARE: without
    a loader.
    """
    if row == EXAMPLES:
        return _started(examples(Path(root), workers), workers)
    form = PROCESSES if row == BARE else row
    made_by = feeds(*of_files(root), *of_form(form, workers))
    if form == "arrays":
        made_by = array_feeds(folder, form)
    with (
        made_by as (made, settings),
        nullcontext(["none"]) if row == BARE else closing(made.probe(settings)) as loader,
    ):
        return _started(loader, workers)


def _started(loader: Iterable[object], workers: int) -> Found:
    begin = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first_s = time.perf_counter() - begin
    for _ in itertools.islice(batches, 3 * workers):
        pass
    tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return {
        "first_s": first_s,
        "memory_mb": sum(process.memory_full_info().pss for process in tree) / 1e6,
    }


MEASURES: dict[str, Callable[..., Found]] = {
    function.__name__: function
    for function in (
        measures.peer, measures.recipe, measures.form, measures.passes, measures.pixels,
        measures.filtered, measures.per_item, measures.arrays,
        measures.equal, step, training, paced, start,
    )
}  # fmt: skip
