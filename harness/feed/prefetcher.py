"""Moves host batches to the device, one ahead of the step, and normalises them there.

After Apex's ``data_prefetcher`` (NVIDIA, examples/imagenet), with three differences. The host never
waits for the next batch before it hands out one that is ready: a thread of the prefetcher's own
waits. One side stream serves the whole life (a stream per epoch makes the allocator reserve more
memory, timm #2781). Errors and early exits are those of a plain loop.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.feed.mover import Augment, Mix, Mover, Normalise, Ready
from harness.runtime import accelerator
from harness.runtime.accelerator import Accelerator
from harness.watch.clock import StepClock
from harness.watch.spans import named

_log = logging.getLogger("wellfed")
Batches = Generator[tuple[Tensor, Tensor], None, None]


class DataPrefetcher:
    """An iterator over device batches ``(images, labels)``.

    On CUDA, a thread takes batches from ``loader`` and issues their copy and normalisation on a
    side stream while the step runs; it is one batch ahead of what was asked for. ``next()`` first
    sleeps until the device has at most one step left, so that the host is never more than two
    steps ahead, nor their batches' memory. Elsewhere, and with
    ``ahead=False``, each batch is moved when it is asked for. On a CPU it is normalised into memory
    of earlier batches that no tensor and no array holds any more; up to three batches of memory
    stay with the prefetcher. Each ``iter()`` is a new pass and ends the pass before.

    Args:
        loader: gives batches ``(images, labels)``, two tensors ``[N, C, H, W]`` and ``[N]``, or is
            a feed of this project.
        device: where batches go.
        mean: each channel's mean as fractions of 255, for uint8 images. None leaves values as they
            are: uint8 images stay uint8, and floats that are normalised already are cast to
            ``dtype``.
        std: each channel's standard deviation as fractions of 255.
        dtype: the type of floats on the device (float32, bfloat16 or float16).
        channels_last: lay images out as NHWC.
        clock: is told the two events around each copy, and when each batch was made, if given.
        ahead: None for what the device wants; False to do without the thread and the side stream.
        augment: called with the images on the device, as the loader has them, and its batch; gives
            others in their place.
        mix: called with the normalised images, the labels on the device and the loader's batch;
            gives others in their place.

    Raises:
        ValueError: ``mean`` and ``std`` do not fit each other, or, from ``next()``, the images.
        TypeError: from ``next()``, for a batch with other parts than these two; none is dropped.
        Whatever ``loader`` raises, from ``next()``, in place of the batch that it was raised for.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        clock: StepClock | None = None,
        ahead: bool | None = None,
        augment: Augment | None = None,
        mix: Mix | None = None,
    ) -> None:
        self.loader = loader
        own = accelerator.of(device)
        if not own.tells:
            _log.warning("DataPrefetcher: device=%s: no batch is copied ahead on this type", device)
        self.device = own.device
        self._ahead = own.has_streams if ahead is None else ahead
        stream = own.side_stream() if self._ahead else None
        with own.on(stream):
            normalise = Normalise(self.device, mean, std, dtype, channels_last)
        made_there = getattr(loader, "on_device", False)
        self._mover = Mover(own, stream, clock, made_there, augment, normalise, mix)
        self._lead = Lead(own, clock) if own.has_streams else None
        self._pass: Batches | None = None
        self._end_pass: Callable[[], Any] | None = None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> DataPrefetcher:
        self.close()
        self._pass = _batches(self.loader, self._mover, self._ahead)
        # a pass left half-way has a thread
        self._end_pass = weakref.finalize(self, self._pass.close)
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self._pass is None:
            iter(self)
        assert self._pass is not None
        if self._lead is not None:
            self._lead.hold()
        return next(self._pass)

    def next(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Returns the next batch, or ``(None, None)`` at the end, as Apex's prefetcher does."""
        try:
            return self.__next__()
        except StopIteration:
            self._pass = None
            return None, None

    def close(self) -> None:
        """Ends the pass, if one runs, and waits for its thread."""
        self._pass = None
        if self._end_pass is not None:
            self._end_pass()


class Lead:
    """How far the host is ahead of the device; ``clock`` is told of each sleep, if given."""

    def __init__(self, own: Accelerator, clock: StepClock | None) -> None:
        self._own = own
        self._clock = clock
        # of the last two steps, as they were launched
        self._ends = deque((own.event(), own.event()), maxlen=2)
        self._recorded = 0

    def hold(self) -> None:
        """Sleeps until the device has at most one step left; call it before each step."""
        self._ends.rotate()
        self._ends[0].record(self._own.stream())
        self._recorded += 1
        if self._recorded < 2 or self._ends[1].query():
            return
        began_s = (self._clock or self._own).now()
        with named("device full"):
            self._ends[1].synchronize()
        if self._clock is not None:
            self._clock.held(began_s)


def _batches(loader: Iterable[Any], move: Mover, ahead: bool) -> Batches:
    """Iterates over one pass; with a thread if ``ahead``, else batch by batch as asked for."""
    own = move.own
    side = move.stream
    if side is not None:
        move.outer = own.stream()
        # what the loader has on the device may still be written there
        side.wait_stream(move.outer)
    pull = None
    if ahead:
        pull = _Pull(loader, move)
        take = pull.take
    else:
        take = partial(move, iter(loader), plain=True)
    try:
        while (ready := take()) is not None:
            if side is not None:
                current = own.stream()
                # compute waits for the copy, on the device
                current.wait_event(ready.events[-1])
                # and the memory is not reused before compute is through
                own.keep_for(current, ready.images)
                own.keep_for(current, ready.labels)
            if move.clock is not None:
                if own.has_streams:
                    move.clock.copied(*ready.events)
                move.clock.arrived(ready.stamps, ready.there_s)
            yield ready.images, ready.labels
            # or two batches would stay on the device while the next one is awaited
            del ready
    finally:
        if pull is not None:
            pull.stop()
        move.let_go(most=0)


class _Pull:
    """The thread of one pass: moves a batch, and stops until that batch is taken.

    The permit keeps the thread exactly one batch ahead: it is given back when a batch is handed
    out, before the step is launched.
    """

    def __init__(self, loader: Iterable[Any], move: Mover) -> None:
        self._loader = loader
        self._move = move
        self._ready = move.own.queue()
        self._permit = move.own.queue()
        self._permit.put(True)
        self._thread = move.own.start(self._work, "prefetch")

    def take(self) -> Ready | None:
        """Returns the next batch, or None at the end; raises what the loader raised."""
        ready: Ready | BaseException | None = self._ready.get()
        if isinstance(ready, BaseException):
            try:
                raise ready
            finally:
                # the error's traceback keeps this frame: the two would keep each other
                del ready
        self._permit.put(True)
        return ready

    def stop(self) -> None:
        """Ends the thread; waits for the loader's current ``next()`` to come back."""
        self._permit.put(False)
        self._thread.join()

    def _work(self) -> None:
        try:
            self._move.own.make_current()
            batches = iter(self._loader)
            try:
                while self._permit.get():
                    ready = self._move(batches, plain=False)
                    self._ready.put(ready)
                    if ready is None:
                        break
                    del ready
            finally:
                if hasattr(batches, "close"):
                    batches.close()
        except BaseException as error:
            # handed to the consumer, who raises it
            self._ready.put(error)
