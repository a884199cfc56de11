"""Host batches to device batches, one ahead, normalised there.

After Apex's ``data_prefetcher`` (NVIDIA, examples/imagenet), with three differences. The host never waits for the next batch
before it hands out one that is ready: a thread of the prefetcher's own waits. One side stream serves the whole life (a
stream per epoch makes the allocator reserve memory anew, timm #2781). Errors and early exits are those of a plain loop.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.feed.normalise import Normalise
from harness.runtime import accelerator
from harness.runtime.accelerator import Accelerator
from harness.watch.clock import StepClock
from harness.watch.marks import named
from harness.watch.stages import Stamps

Batches = Generator[tuple[Tensor, Tensor], None, None]
Augment = Callable[[Tensor, Any], Tensor]
Mix = Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]


_END: Any = object()


class DataPrefetcher:
    """An iterator over device batches ``(images, labels)``.

    On CUDA, a thread takes batches from ``loader`` and issues their copy and normalisation on a side stream while the step
    runs; it is one batch ahead of what was asked for. ``next()`` first sleeps until the device has at most one step left of
    those that it was given, so that the host is never more than two steps ahead, nor their batches' memory. Elsewhere, and
    with ``ahead=False``, each batch is moved when it is asked for. Each ``iter()`` is a new pass and ends the one before it.

    Args:
        loader: gives batches ``(images, labels)``, two tensors ``[N, C, H, W]`` and ``[N]``, or is a feed of this project.
        device: where batches go.
        mean: each channel's mean as fractions of 255, for uint8 images. None leaves values as they are (but cast to
            ``dtype``): floats that are normalised already, or 0..255 of uint8.
        std: each channel's standard deviation as fractions of 255.
        dtype: the images' type on the device (float32, bfloat16 or float16).
        channels_last: lay images out as NHWC.
        clock: is told the two events around each copy, and when each batch was made, if given.
        ahead: None for what the device wants; False to do without the thread and the side stream.
        augment: called with the images on the device, as the loader has them, and its batch; gives others in their place.
        mix: called with the normalised images, the labels on the device and the loader's batch; gives both anew.
        reuse: on a CPU, normalise into memory of earlier batches that no tensor and no array holds any more; up to three
            batches of memory then stay with the prefetcher.

    Attributes:
        first_wait_s: seconds that the first ``next()`` of the latest pass took; None before it.

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
        reuse: bool = False,
    ) -> None:
        self.loader = loader
        own = accelerator.of(device)
        self.device = own.device
        self._ahead = own.has_streams if ahead is None else ahead
        stream = own.side_stream() if self._ahead else None
        with own.on(stream):
            normalise = Normalise(self.device, mean, std, dtype, channels_last, reuse=reuse)
        made_there = getattr(loader, "on_device", False)
        self._now = own.now if clock is None else clock.now
        timed = clock is not None and own.has_streams
        self._mover = _Mover(own, stream, self._now, timed, made_there, augment, normalise, mix)
        self._clock, self._lead = clock, Lead(own, self._now) if own.has_streams else None
        self.first_wait_s: float | None = None
        self._pass: Batches | None = None
        self._end_pass: Callable[[], Any] | None = None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> DataPrefetcher:
        self.close()
        self.first_wait_s = None
        run = _run_ahead if self._ahead else _run_plain
        self._pass = run(self.loader, self._mover, self._clock)
        self._end_pass = weakref.finalize(self, self._pass.close)  # a pass left half-way has a thread
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self._pass is None:
            iter(self)
        assert self._pass is not None
        if self._lead is not None:
            began_s = self._lead.hold()
            if began_s is not None and self._clock is not None:
                self._clock.held(began_s)
        if self.first_wait_s is not None:
            return next(self._pass)
        began_s = self._now()
        first = next(self._pass)
        self.first_wait_s = self._now() - began_s
        return first

    def next(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """The next batch, or ``(None, None)`` at the end of the pass, as Apex's prefetcher has it."""
        try:
            return self.__next__()
        except StopIteration:
            self._pass = None
            return None, None

    def close(self) -> None:
        """End the pass, if one runs, and wait for its thread."""
        self._pass = None
        if self._end_pass is not None:
            self._end_pass()


class _Ready(NamedTuple):
    """A batch on its way.

    ``done`` is recorded behind the last write to the tensors; ``copy`` is the event before and that after the copy, and it;
    ``there_s`` is when the batch was there.
    """

    images: Tensor
    labels: Tensor
    copy: tuple[Any, Any, Any] | None
    done: Any
    stamps: Stamps | None
    there_s: float


class Lead:
    """How far the host is ahead of the device."""

    def __init__(self, own: Accelerator, now: Callable[[], float]) -> None:
        self._own, self._now = own, now
        self._ends = deque((own.event(), own.event()), maxlen=2)  # of the last two steps, as they were launched
        self._recorded = 0

    def hold(self) -> float | None:
        """Sleep until the device has at most one step left; to be called before each step.

        Returns when it went to sleep, or None where the device has no more than that.
        """
        self._ends.rotate()
        self._ends[0].record(self._own.stream())
        self._recorded += 1
        if self._recorded < 2 or self._ends[1].query():
            return None
        began_s = self._now()
        with named("device full"):
            self._ends[1].synchronize()
        return began_s


class _Mover:
    """Moves batches to the device and makes them ready there, on ``stream`` if there is one.

    It holds what the loader gave until its copy is done: the loader may use memory again that nobody holds.

    Args:
        own: the device.
        stream: the side stream; None: all goes to the current one.
        now: the clock.
        timed: record events that a clock can read.
        made_there: the loader makes its batches on the device.
        augment, normalise, mix: what is done to each batch.
    """

    def __init__(
        self,
        own: Accelerator,
        stream: Any,
        now: Callable[[], float],
        timed: bool,
        made_there: bool,
        augment: Augment | None,
        normalise: Normalise,
        mix: Mix | None,
    ) -> None:
        self.own, self.stream, self._now, self._timed, self._made_there = own, stream, now, timed, made_there
        self._augment, self._normalise, self._mix = augment, normalise, mix
        self.outer: Any = None  # the stream that the consumer's work goes to
        self._copying: deque[tuple[Any, Any]] = deque()  # the event behind each copy, and the batch that is copied

    def pulled(self, batches: Iterator[Any], plain: bool) -> _Ready | None:
        """The next of ``batches`` on the device, issued on the side stream if there is one; None at the end.

        A ``plain`` loop has its batch as soon as the loader has given it; one with a thread when all of this is issued.
        """
        there_s: float | None
        if not self.own.has_streams:
            batch = next(batches, _END)
            there_s = self._now() if plain else None
            if batch is _END:
                return None
            with named("copy"):
                return self._prepared(batch, *self._there(batch), None, there_s)
        with self.own.on(self.stream):
            start = self._mark() if self._made_there else None
            batch = next(batches, _END)
            if batch is _END:
                return None
            there_s = self._now() if plain else None
            ready = self._moved(batch, start, there_s)
        self.let_go(most=None if self.stream is None else 1)  # a plain loop must not wait here for the step before
        return ready

    def _there(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The images and labels of ``batch`` on a device without streams."""
        images, labels = _pair(batch)
        return self.own.copy(images), self.own.copy(labels)

    def _moved(self, batch: Any, start: Any, there_s: float | None) -> _Ready:
        images, labels = _pair(batch)
        own = self.own
        is_there = self._made_there or own.holds(images)
        if self.stream is not None and is_there:
            own.keep_for(self.stream, images)
            if not self._made_there:
                self.stream.wait_stream(self.outer)  # the loader's own GPU work may still write to it
        with named("copy"):
            start = end = start or self._mark()
            if not is_there:
                images = own.copy(images)
            if not self._made_there and not own.holds(labels):
                labels = own.copy(labels)
            if not is_there:
                end = own.event(timed=self._timed)
                end.record(own.stream())
                self._copying.append((end, batch))
            return self._prepared(batch, images, labels, (start, end), there_s)

    def _prepared(
        self, batch: Any, images: Tensor, labels: Tensor, copy: tuple[Any, Any] | None, there_s: float | None
    ) -> _Ready:
        """``images`` and ``labels`` of ``batch`` as the network takes them."""
        if self._augment is not None:
            images = self._augment(images, batch)
        images = self._normalise(images)
        if self._mix is not None:
            images, labels = self._mix(images, labels, batch)
        done = None
        if copy is not None and (self._timed or self.stream is not None):
            done = self.own.event(timed=self._timed)
            done.record(self.own.stream())
        stamps = getattr(batch, "stamps", None)
        return _Ready(
            images,
            labels,
            (*copy, done) if copy is not None and self._timed else None,
            done,
            stamps if isinstance(stamps, Stamps) else None,
            self._now() if there_s is None else there_s,
        )

    def _mark(self) -> Any:
        """A timing event at this point of the stream, if a clock reads them."""
        if not self._timed:
            return None
        event = self.own.event(timed=True)
        event.record(self.own.stream())
        return event

    def let_go(self, most: int | None) -> None:
        """Drop the batches that are copied, and wait until at most ``most`` copies are under way; None: for none of them."""
        while self._copying and (self._copying[0][0].query() or (most is not None and len(self._copying) > most)):
            self._copying[0][0].synchronize()  # the host waits for the device, which without a side stream works in between
            self._copying.popleft()


def _pair(batch: Any) -> list[Tensor]:
    """The images and the labels of ``batch``, which has no other part, but for a feed's."""
    parts = list(batch) if isinstance(batch, tuple | list) else [batch]
    if hasattr(batch, "stamps"):
        return parts[:2]
    if len(parts) != 2 or not all(hasattr(part, "to") for part in parts):
        raise TypeError(
            "DataPrefetcher: batches must be (images, labels), two tensors; this loader gives "
            f"{', '.join(type(part).__name__ for part in parts)}: let its collate_fn return these two"
        )
    return parts


def _run_plain(loader: Iterable[Any], move: _Mover, clock: StepClock | None) -> Batches:
    try:
        batches = iter(loader)
        while (ready := move.pulled(batches, plain=True)) is not None:
            _tell(clock, ready)
            yield ready.images, ready.labels
            del ready  # or two batches would stay on the device while the next one is awaited
    finally:
        move.let_go(most=0)


def _run_ahead(loader: Iterable[Any], move: _Mover, clock: StepClock | None) -> Batches:
    own, side = move.own, move.stream
    if side is not None:
        move.outer = own.stream()
        side.wait_stream(move.outer)  # what the loader has on the device may still be written there
    pull = _Pull(loader, move)
    try:
        while (ready := pull.take()) is not None:
            if side is not None:
                current = own.stream()
                current.wait_event(ready.done)  # compute waits for the copy, on the device
                own.keep_for(current, ready.images)  # and the memory is not reused before compute is through
                own.keep_for(current, ready.labels)
            _tell(clock, ready)
            yield ready.images, ready.labels
            del ready
    finally:
        pull.stop()
        move.let_go(most=0)


def _tell(clock: StepClock | None, ready: _Ready) -> None:
    if clock is None:
        return
    if ready.copy is not None:
        clock.copied(*ready.copy)
    clock.arrived(ready.stamps, ready.there_s)


class _Pull:
    """The thread of one pass: takes a batch from the loader, moves it, and stops until that one is taken.

    The permit keeps it exactly one ahead: it is given back when a batch is handed out, before the step is launched.
    """

    def __init__(self, loader: Iterable[Any], move: _Mover) -> None:
        self._loader, self._move = loader, move
        self._ready, self._permit = move.own.queue(), move.own.queue()
        self._permit.put(True)
        self._thread = move.own.start(self._work, "prefetch")

    def take(self) -> _Ready | None:
        """The next batch, or None at the end; raises what the loader raised."""
        item: _Ready | BaseException | None = self._ready.get()
        if isinstance(item, BaseException):
            try:
                raise item
            finally:
                del item  # or its traceback would keep this frame, and this frame the error, and both the loader's iterator
        self._permit.put(True)
        return item

    def stop(self) -> None:
        """End the thread; waits for the loader's current ``next()`` to come back."""
        self._permit.put(False)
        self._thread.join()

    def _work(self) -> None:
        try:
            self._move.own.make_current()
            batches = iter(self._loader)
            try:
                while self._permit.get() and (ready := self._move.pulled(batches, plain=False)) is not None:
                    self._ready.put(ready)
                    del ready
                self._ready.put(None)
            finally:
                if hasattr(batches, "close"):
                    batches.close()
        except BaseException as error:  # handed to the consumer, who raises it
            self._ready.put(error)
