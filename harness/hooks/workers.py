"""Times reading, transforms and collation inside the workers of a watched loader.

Samples, their order and their random numbers stay the same: torch's own worker loop and fetchers
run, around the given dataset and collate function.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from typing import Any

from torch.utils.data import dataloader
from torch.utils.data._utils.worker import _worker_loop

from ..clock.stages import (
    DECODE,
    READ,
    SAMPLE,
    START,
    Lap,
    StageMeter,
    StageTimer,
    Stamps,
    cells,
    received,
    shared_rows,
)

# batches per worker whose times are kept
_KEPT = 64

torchs_loop: Any = _worker_loop
_kinds: Any = dataloader._DatasetKind
_create_fetcher = _kinds.create_fetcher
# marks stages of the current sample, if it is timed
_lap: Lap | None = None


class Meter:
    """Timings for a loader's workers, in shared memory.

    Args:
        dataset: the loader's dataset.
        workers: the number of workers.
    """

    def __init__(self, dataset: Any, workers: int) -> None:
        self.workers = workers
        self.stages = StageMeter(stages_of(dataset), workers)
        # completion times of each worker's last batches, on ``time.perf_counter``
        self.made = shared_rows(max(1, workers), _KEPT, workers > 0)

    def __call__(self, *args: Any) -> None:
        """Runs a worker process, in place of torch's loop."""
        bound = inspect.signature(torchs_loop).bind(*args).arguments
        hook_libraries()
        with self.timed(bound["worker_id"]):
            torchs_loop(*args)

    @contextmanager
    def timed(self, slot: int) -> Iterator[None]:
        """Times the fetchers created in the block, as worker ``slot``."""
        _kinds.create_fetcher = staticmethod(functools.partial(_fetcher, self, slot))
        try:
            yield
        finally:
            _kinds.create_fetcher = staticmethod(_create_fetcher)

    def stamps(self, batch: int) -> Stamps | None:
        """Returns when ``batch`` of the current pass was made and when it arrived (now)."""
        if not self.workers:
            return None
        # torch assigns batches to workers in turn
        turn, slot = divmod(batch, self.workers)
        made_s = self.made[slot, turn % _KEPT].item()
        return received(made_s)


def stages_of(dataset: Any) -> tuple[str, ...]:
    """Returns the names of the visible stages in making a sample from ``dataset``."""
    names = [READ, DECODE]
    while dataset is not None:
        for own in filter(is_composed, getattr(dataset, "__dict__", {}).values()):
            names += [type(step).__name__ for step in own.transforms]
        inner = getattr(dataset, "dataset", None)
        parts = getattr(dataset, "datasets", None)
        dataset = parts[0] if isinstance(parts, Sequence) and parts else inner
    return (*dict.fromkeys(names), SAMPLE)


def is_composed(transform: Any) -> bool:
    """Returns whether ``transform`` has a sequence of transforms, as ``Compose`` does."""
    # does not call the script's code
    return isinstance(getattr(transform, "__dict__", {}).get("transforms"), Sequence)


class _Samples:
    """A map-style dataset that marks the start and end of timed samples."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        if _lap is None:
            return self._dataset[index]
        _lap(START)
        try:
            return self._dataset[index]
        finally:
            _lap(SAMPLE)


def _fetcher(
    meter: Meter,
    slot: int,
    kind: int,
    dataset: Any,
    auto_collation: bool,
    collate_fn: Callable[..., Any],
    drop_last: bool,
) -> Any:
    """Returns torch's fetcher with its ``fetch`` timed."""
    timer = StageTimer(meter.stages, slot)
    made_s = cells(meter.made, slot)
    turns = count()
    # otherwise, a batch is timed as one sample
    one_by_one = (
        kind == _kinds.Map and auto_collation and not getattr(dataset, "__getitems__", None)
    )
    known = {START, *meter.stages.stages}

    def lap(stage: str) -> None:
        # the time of hidden transforms is attributed to the sample
        if stage in known:
            timer.mark(stage)

    def collated(made: Any) -> Any:
        global _lap
        lap(SAMPLE)
        # all that follows is collation, even if it decodes
        lap(START)
        _lap = None
        return collate_fn(made)

    given = _Samples(dataset) if one_by_one else dataset
    fetcher = _create_fetcher(kind, given, auto_collation, collated, drop_last)
    fetch = fetcher.fetch

    def timed_fetch(index: Any) -> Any:
        global _lap
        size = len(index) if auto_collation else 1
        if timer.begin(size if one_by_one else 1):
            _lap = lap
        try:
            made = fetch(index)
        finally:
            _lap = None
        made_s[next(turns) % _KEPT] = timer.end(size).made_s
        return made

    fetcher.fetch = timed_fetch
    return fetcher


def hook_libraries() -> None:
    """Makes torchvision and Pillow mark their stages, if they are imported."""
    if "PIL.Image" in sys.modules:
        # Pillow imports it with the first image
        _wrap(import_module("PIL.ImageFile").ImageFile, "load", _loading)
    for name, method in (
        ("torchvision.transforms.transforms", "__call__"),
        ("torchvision.transforms.v2._container", "forward"),
    ):
        module = sys.modules.get(name)
        if module is not None:
            _wrap(module.Compose, method, _composing)


def _wrap(owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Replaces a method with ``around(method)``, once."""
    method = getattr(owner, name)
    if not hasattr(method, "__wrapped__"):
        setattr(owner, name, functools.wraps(method)(around(method)))


def _loading(load: Any) -> Any:
    def wrapper(image: Any) -> Any:
        # loaded images have no tiles left
        if _lap is None or not getattr(image, "tile", None):
            return load(image)
        # the file is open, and the image header has been read
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
    """A file that marks its reads with ``lap``."""

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
