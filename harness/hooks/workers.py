"""Times what the workers of somebody's loader do, in the workers themselves.

Samples, their order and their random numbers stay as they are: torch's own worker loop and fetchers
run, around the data set and the collate function that they were given.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import count, repeat
from typing import Any

from torch.utils.data import dataloader
from torch.utils.data._utils.worker import _worker_loop

from harness.watch.rows import Rows
from harness.watch.stages import DECODE, READ, SAMPLE, START, Lap, StageMeter, StageTimer, Stamps

# batches of a worker, of which it is known when they were made
_KEPT = 64

torchs_loop: Any = _worker_loop
_kinds: Any = dataloader._DatasetKind
_create_fetcher = _kinds.create_fetcher
# tells the stages of the sample that is being made, if that is timed
_lap: Lap | None = None
# of this worker, or of the pass whose batches this process itself makes
_own: tuple[Meter, int] | None = None


class Meter:
    """What the workers of one loader do, in memory that they share.

    Args:
        dataset: the loader's.
        workers: how many it has.
    """

    def __init__(self, dataset: Any, workers: int) -> None:
        self.workers = workers
        self.stages = StageMeter(stages_of(dataset), workers)
        # when each worker's last batches were made, on ``time.perf_counter``
        self.made = Rows(max(1, workers), _KEPT, shared=workers > 0)

    def stamps(self, batch: int) -> Stamps | None:
        """Returns when ``batch`` of the running pass was made, and that it is here now."""
        if not self.workers:
            return None
        # torch gives batches to the workers in turn
        turn, slot = divmod(batch, self.workers)
        made_s = self.made.row(slot)[turn % _KEPT]
        now_s = time.perf_counter()
        return Stamps(made_s, made_s, now_s, now_s)


class Worker:
    """Torch's worker loop, timed; takes its place and its arguments in a new process."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def __call__(self, *args: Any) -> None:
        """Does the work of one worker process."""
        bound = inspect.signature(torchs_loop).bind(*args).arguments
        hook_libraries()
        with timed(self._meter, bound["worker_id"]):
            torchs_loop(*args)


@contextmanager
def timed(meter: Meter, slot: int) -> Iterator[None]:
    """Times the fetchers that are made in the block, as worker ``slot``."""
    global _own
    _own = meter, slot
    _kinds.create_fetcher = staticmethod(_fetcher)
    try:
        yield
    finally:
        _kinds.create_fetcher = staticmethod(_create_fetcher)
        _own = None


def stages_of(dataset: Any) -> tuple[str, ...]:
    """Returns the names of what making a sample of ``dataset`` takes, as far as that is seen."""
    names = [READ, DECODE]
    while dataset is not None:
        for attribute in ("transform", "transforms"):
            steps = getattr(getattr(dataset, attribute, None), "transforms", ())
            if isinstance(steps, Sequence):
                names += [type(step).__name__ for step in steps]
        inner = getattr(dataset, "dataset", None)
        parts = getattr(dataset, "datasets", None)
        dataset = parts[0] if isinstance(parts, Sequence) and parts else inner
    return (*dict.fromkeys(names), SAMPLE)


class _Samples:
    """A map-style data set, each of whose samples may be timed."""

    def __init__(self, dataset: Any, lap: Lap) -> None:
        self._dataset = dataset
        self._lap = lap
        self.timers: Iterator[StageTimer | None] = repeat(None)

    def __getitem__(self, index: Any) -> Any:
        with _lapping(self._lap if next(self.timers, None) else None):
            return self._dataset[index]


@contextmanager
def _lapping(lap: Lap | None) -> Iterator[None]:
    """Has what runs in the block tell its stages to ``lap``."""
    global _lap
    if lap is None:
        yield
        return
    _lap = lap
    lap(START)
    try:
        yield
    finally:
        lap(SAMPLE)
        _lap = None


def _fetcher(
    kind: int, dataset: Any, auto_collation: bool, collate_fn: Callable[..., Any], drop_last: bool
) -> Any:
    """Returns torch's fetcher with its ``fetch`` timed."""
    assert _own is not None
    meter, slot = _own
    timer = StageTimer(meter.stages, slot)
    made_s = meter.made.row(slot)
    turns = count()
    one_by_one = (
        kind == _kinds.Map and auto_collation and not getattr(dataset, "__getitems__", None)
    )
    known = {START, *meter.stages.stages}

    def lap(stage: str) -> None:
        # a transform that is not seen from outside counts for the sample
        if stage in known:
            timer.lap(stage)

    samples = _Samples(dataset, lap)

    def collated(made: Any) -> Any:
        if _lap is not None:
            _lap(SAMPLE)
        timer.collate()
        return collate_fn(made)

    given = samples if one_by_one else dataset
    fetcher = _create_fetcher(kind, given, auto_collation, collated, drop_last)
    fetch = fetcher.fetch

    def timed_fetch(index: Any) -> Any:
        size = len(index) if auto_collation else 1
        timers = timer.begin(size if one_by_one else 1)
        timer.fill()
        if one_by_one:
            samples.timers = iter(timers or ())
            made = fetch(index)
        else:
            with _lapping(lap if timers else None):
                made = fetch(index)
        made_s[next(turns) % _KEPT] = timer.end(size).made_s
        return made

    fetcher.fetch = timed_fetch
    return fetcher


def hook_libraries() -> None:
    """Has torchvision's and Pillow's functions tell their stages, where they are imported."""
    if "PIL.Image" in sys.modules:
        # which Pillow imports with the first image
        _wrap(import_module("PIL.ImageFile").ImageFile, "load", _loading)
    for name, method in (
        ("torchvision.transforms.transforms", "__call__"),
        ("torchvision.transforms.v2._container", "forward"),
    ):
        module = sys.modules.get(name)
        if module is not None:
            _wrap(module.Compose, method, _composing)


def _wrap(owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Puts ``around(the method)`` in the place of a method, once."""
    method = getattr(owner, name)
    if not hasattr(method, "__wrapped__"):
        setattr(owner, name, around(method))


def _loading(load: Any) -> Any:
    @functools.wraps(load)
    def wrapper(image: Any) -> Any:
        # what was loaded before has no tiles left
        if _lap is None or not getattr(image, "tile", None):
            return load(image)
        # the file was opened, and the head of the image read
        _lap(READ)
        file = image.fp
        image.fp = reads = _Reads(file, _lap)
        loaded = load(image)
        _lap(DECODE)
        if image.fp is reads:
            image.fp = file
        return loaded

    return wrapper


class _Reads:
    """A file that tells ``lap`` when it reads."""

    def __init__(self, file: Any, lap: Lap) -> None:
        self._file = file
        self._lap = lap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, *size: int) -> Any:
        self._lap(DECODE)
        data = self._file.read(*size)
        self._lap(READ)
        return data


def _composing(call: Any) -> Any:
    @functools.wraps(call)
    def wrapper(compose: Any, *inputs: Any) -> Any:
        if _lap is None or not compose.transforms:
            return call(compose, *inputs)
        _lap(SAMPLE)
        outputs: Any = None
        for step in compose.transforms:
            outputs = step(*inputs)
            inputs = outputs if len(inputs) > 1 else (outputs,)
            if _lap is not None:
                _lap(type(step).__name__)
        return outputs

    return wrapper
