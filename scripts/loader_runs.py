"""Measures loaders in use: training, start and memory, the index, the tuner."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from functools import partial
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import psutil

from harness.config import BackendName, TunerConfig
from harness.data import datasets
from harness.data.datasets import ImageDataset
from harness.data.storage import Source
from harness.feed.base import PROCESSES
from harness.feed.feeds import Feeds
from harness.monitor import console
from harness.runtime import distributed
from harness.runtime.errors import BadSample
from harness.training.state import make_state
from harness.training.step import Step, device_batches
from harness.tuning.tuner import tune
from scripts import loader_measures as measures
from scripts.bench_tuner import deliver
from scripts.loader_data import CLASSES
from scripts.loader_measures import (
    Found,
    array_feeds,
    composed,
    counts,
    feeds,
    of_files,
    of_form,
    probed,
    window,
)
from scripts.loader_peers import BATCH_SIZE, EXAMPLES, Counts, counted, examples
from scripts.loader_score import AGAIN, BARE
from scripts.tuner_score import Ratio, Setting
from scripts.tuner_strategies import Rig, trained
from scripts.tuner_workloads import WORKLOADS, warm

# of measuring what was chosen, in turns until ratios are known so well
_MOST_TURNS = 12
_CLEAR = 0.03
# the longest that one reader of the index waits for the other
_READ_LIMIT_S = 600.0


def step(root: str, side: int, seconds: float) -> Found:
    """Returns the window of the training step alone, on one batch over and over."""
    with probed(feeds(*of_files(root, side), *of_form(PROCESSES, 0))) as (made, feed):
        batch = next(iter(feed))
        return window(_steps(made, _normalised(made, itertools.repeat(batch))), seconds, skip=3)


def training(row: str, root: str, side: int, workers: int, seconds: float) -> Found:
    """The window of training on a form of this project's, or on pytorch/examples' loader."""
    form = PROCESSES if row == EXAMPLES else row
    with probed(feeds(*of_files(root, side), *of_form(form, workers))) as (made, feed):
        batches = _normalised(made, feed)
        if row == EXAMPLES:
            batches = iter(examples(Path(root), workers, side))
        return window(_steps(made, batches), seconds, workers)


def _normalised(made: Feeds, batches: Any) -> Iterator[Any]:
    return iter(device_batches(batches, made.config, made.world.device))


def _steps(made: Feeds, batches: Iterator[Any]) -> Counts:
    """The images of each step of a small network's training on ``batches``, when it is done."""
    step = Step(make_state(made.config, CLASSES, made.world, made.steps_per_epoch()))
    return trained(step, batches)


def paced(
    root: str,
    form: str,
    workers: int,
    share: float,
    others: Sequence[int],
    seconds: float,
    back: bool,
) -> Found:
    """Returns what a device takes that sleeps through its steps, from ours and theirs.

    Args:
        root: the tree of files.
        form: this project's.
        workers: of it.
        share: the device takes this share of what the form supplies when nothing consumes.
        others: the numbers of workers that the other loader is tried with.
        seconds: of each window.
        back: begin with the last.
    """
    wanted = [*of_files(root), *of_form(form, workers)]
    with feeds(*wanted) as (made, settings):

        def ours(step_s: float) -> Found:
            with closing(made.probe(settings)) as feed:
                return window(_paced(counts(feed), step_s), seconds, workers)

        def theirs(count: int, step_s: float) -> Found:
            batches = _paced(counted(examples(Path(root), count)), step_s)
            return window(batches, seconds, count)

        # the device takes a share of what the form can supply
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
    """Returns seconds to the first batch, and memory when each worker made three.

    Memory is the proportional set: what several processes share counts once. ``row`` BARE: without
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


def index(root: str) -> Found:
    """Seconds from the settings to a training and a validation set."""
    config = composed(*of_files(root))
    begin = time.perf_counter()
    datasets.load(config.data, config.augment, config.seed)
    return {"seconds": time.perf_counter() - begin}


def index_readers(root: str, method: str) -> Found:
    """Returns a worker's own memory before and after it has read every sample.

    Another worker does the same beside it, in another random order.
    """
    config = composed(*of_files(root))
    context: Any = multiprocessing.get_context(method)
    train = datasets.load(config.data, config.augment, config.seed).train
    assert isinstance(train, ImageDataset)
    answers = context.SimpleQueue()
    together = context.Barrier(2)
    readers = [
        context.Process(target=_read_all, args=(train.source, together, answers), daemon=True)
        for _ in range(2)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    found: Found = answers.get()
    return found


def _read_all(source: Source, together: Barrier, answers: SimpleQueue[Found]) -> None:
    order = np.random.default_rng().permutation(len(source))
    # what the first reads import and allocate
    _read(source, order[:1000])
    before_mb = _own_mb(together)
    _read(source, order)
    answers.put({"before_mb": before_mb, "after_mb": _own_mb(together)})


def _own_mb(together: Barrier) -> float:
    """Memory that this process alone has, while all of them live and are as far."""
    together.wait(_READ_LIMIT_S)
    own_mb = float(psutil.Process().memory_full_info().uss / 1e6)
    together.wait(_READ_LIMIT_S)
    return own_mb


def _read(source: Source, order: np.ndarray) -> None:
    for index in order:
        # an empty file holds no image
        with suppress(BadSample):
            source.read(int(index))


def tuned(workload: str, folder: str, rounds: int, seconds: float) -> Found:
    """Returns the tuner's choice of all forms and of each, and what they deliver in turns."""
    one = WORKLOADS[workload]
    with distributed.joined(0, composed()) as world, console.speaking(False):
        rig = Rig(one, one.make(Path(folder)), world)
        rig.config.loader.autotune = True
        warm(Path(folder))
        choices: dict[str, str] = {}
        costs: dict[str, float] = {}
        for form in ("auto", *rig.feeds().backends):
            begin = time.perf_counter()
            choices[form] = str(_choice(rig, BackendName[form]))
            costs[form] = time.perf_counter() - begin
        settings = sorted(set(choices.values()))
        rates: dict[str, list[float]] = {setting: [] for setting in settings}
        # there and back
        for number in range(max(_MOST_TURNS, 2 * rounds)):
            for setting in settings if number % 2 == 0 else reversed(settings):
                images, taken_s, _ = deliver(
                    rig, Setting.parse(setting), number // 2, max(seconds, one.seconds)
                )
                rates[setting].append(images / taken_s if images else 0.0)
            # until the widest interval of a ratio to the fastest is narrow enough
            best = max(rates.values(), key=mean)
            found = [Ratio.of(each, best) for each in rates.values()]
            widest = max(ratio.high - ratio.low for ratio in found)
            if number + 1 >= 2 * rounds and number % 2 and widest <= _CLEAR:
                break
    return {
        "choices": choices,
        "costs_s": costs,
        "rates": rates,
        "mean": {s: mean(r) for s, r in rates.items()},
    }


def _choice(rig: Rig, form: BackendName) -> Setting:
    """The tuner's, of ``form``, or of all where that is ``auto``."""
    rig.config.loader.backend = form
    made = rig.feeds()
    own = found = made.settings(rig.limits)
    # it has one setting
    if form is not BackendName.arrays:
        found = tune(
            made, rig.trainee, own, TunerConfig(max_workers=rig.most), rig.limits, rig.world
        ).settings
    return Setting.of(found.num_workers, found.prefetch_factor, found.backend)


MEASURES: dict[str, Callable[..., Found]] = {
    function.__name__: function
    for function in (
        measures.peer, measures.recipe, measures.form, measures.passes, measures.pixels,
        measures.filtered, measures.per_item, measures.arrays,
        measures.equal, step, training, paced, start, index, index_readers, tuned,
    )
}  # fmt: skip
