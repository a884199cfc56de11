"""Copies batches to the device, one ahead of the step, and normalises them there.

After Apex's ``data_prefetcher`` (NVIDIA, examples/imagenet), with three differences. The host never
waits for the next batch before it hands out one that is ready: a thread of the prefetcher's own
waits. One side stream serves the whole life (a stream per epoch makes the allocator reserve more
memory, timm #2781). Errors and early exits are as in a plain loop.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..clock.clock import StepClock
from ..clock.spans import named
from ..clock.stages import Stamps
from ..runtime import accelerator
from ..runtime.accelerator import Accelerator
from . import nest
from .base import Backend, BufferPool, HostBatch

_log = logging.getLogger("wellfed")
Batches = Generator[Any, None, None]
Augment = Callable[[Tensor, Any], Tensor]
Mix = Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]
_END: Any = object()
# torch normalises fewer values in one thread, and sooner than NumPy is called
_SMALL = 1 << 15


class DataPrefetcher:
    """An iterator over batches on the device, each in the form in which ``loader`` gives it.

    Where there are streams, as on CUDA, a thread takes batches from ``loader`` and issues their
    copy and normalisation on a side stream while the step runs; it is one batch ahead of what was
    asked for. ``next()`` first sleeps until the device has at most one step left, so that the host
    is never more than two steps ahead, nor their batches' memory. Elsewhere, and with
    ``ahead=False``, each batch is moved when it is asked for. On a CPU it is normalised into memory
    of earlier batches that no tensor and no array holds any more; up to three batches of memory
    stay with the prefetcher. Each ``iter()`` is a new pass and ends the pass before.

    Args:
        loader: gives batches, such as ``(images, labels)``, of tensors in any nest of dictionaries,
            lists, tuples, named tuples and dataclasses; other parts stay as they are. Or it is a
            feed of this project.
        device: where batches go.
        mean: each channel's mean as fractions of 255, for uint8 images ``[N, C, H, W]``. None
            leaves values as they are: uint8 images stay uint8, and floats that are normalised
            already are cast to ``dtype``.
        std: each channel's standard deviation as fractions of 255.
        dtype: the type of images on the device (float32, bfloat16 or float16).
        channels_last: lay images out as NHWC.
        images: the part of a batch that ``mean``, ``std``, ``dtype`` and ``channels_last`` are for,
            as an index, a key or an attribute; None: the first of a sequence, or the one tensor.
        clock: gets the two events around each copy, and when each batch was made, if given.
        ahead: None for what the device wants; False to do without the thread and the side stream.
        augment: called with the images on the device, as the loader has them, and its batch; gives
            others in their place.
        mix: called with the normalised images, the labels on the device and the loader's batch;
            gives others in their place.

    Raises:
        ValueError: ``mean`` and ``std`` do not fit each other, or, from ``next()``, the images.
        TypeError: from ``next()``, for a batch without a tensor, or without ``images``.
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
        images: str | int | None = None,
        clock: StepClock | None = None,
        ahead: bool | None = None,
        augment: Augment | None = None,
        mix: Mix | None = None,
    ) -> None:
        self.loader = loader
        own = accelerator.get(device)
        if not own.tells:
            _log.warning("DataPrefetcher: device=%s: no batch is copied ahead on this type", device)
        self.device = own.device
        if ahead is None:
            ahead = own.has_streams
        stream = own.side_stream() if ahead else None
        with own.on(stream):
            normalise = Normalise(self.device, mean, std, dtype, channels_last)
        made_there = isinstance(loader, Backend) and loader.made_on_device
        must = normalise.changes or images is not None
        self._transfer = _Transfer(
            own, stream, ahead, clock, made_there, augment, normalise, mix, images, must
        )
        self._lead = HostLeadLimiter(own, clock) if own.has_events else None
        self._pass: Batches | None = None
        self._end_pass: Callable[[], Any] | None = None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> DataPrefetcher:
        self.close()
        self._pass = _batches(self.loader, self._transfer)
        # a pass left half-way has a thread
        self._end_pass = weakref.finalize(self, self._pass.close)
        return self

    def __next__(self) -> Any:
        if self._pass is None:
            iter(self)
        assert self._pass is not None
        if self._lead is not None:
            self._lead.hold()
        return next(self._pass)

    def next(self) -> Any:
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


class Normalise:
    """Turns images into ``(value / 255 - mean) / std`` in the network's type and format.

    Args:
        device: where the images are.
        mean: each channel's mean as fractions of 255; None leaves values as they are, and integers
            in their type.
        std: each channel's standard deviation as fractions of 255.
        dtype: the type of the result.
        channels_last: lay images out as NHWC.

    Raises:
        ValueError: ``mean`` and ``std`` do not fit each other, ``dtype`` is no floating-point type,
            or, from a call, the images do not fit.
    """

    def __init__(
        self,
        device: torch.device,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        dtype: torch.dtype,
        channels_last: bool,
    ) -> None:
        self._plain = mean is None and std is None
        # otherwise float32 images of NCHW stay as they are
        self.changes = not self._plain or dtype != torch.float32 or channels_last
        given = ((), ()) if self._plain else (mean, std)
        try:
            # arrays and tensors too
            values = np.array([[float(value) for value in each] for each in given])  # type: ignore
            if not np.isfinite(values).all() or (values[1] <= 0).any():
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                f"DataPrefetcher: mean={mean} and std={std}: give both, or none, with one finite "
                "value for each channel, std above 0"
            ) from None
        if not self._plain and not dtype.is_floating_point:
            raise ValueError(f"DataPrefetcher: dtype={dtype}: use float32, bfloat16 or float16")
        self._dtype = dtype
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        self._on_host = accelerator.get(device).is_host
        scaled = torch.from_numpy(np.stack([255.0 * values[0], 1.0 / (255.0 * values[1])]))
        self._mean, self._scale = scaled.float().to(device)[:, None, :, None, None]
        # of results on a CPU
        self._pool = BufferPool(0, 0)

    def __call__(self, images: Tensor) -> Tensor:
        """Returns ``images`` normalised; the caller's own memory stays as it is."""
        if self._plain:
            dtype = self._dtype if images.is_floating_point() else images.dtype
            return images.contiguous(memory_format=self._format).to(dtype)
        channels = self._mean.numel()
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != channels:
            raise ValueError(
                f"DataPrefetcher: images are {images.dtype} {list(images.shape)}; mean and std of "
                f"{channels} values are for torch.uint8 [N, {channels}, H, W], 0..255: load uint8 "
                "(torchvision.transforms.v2.PILToTensor), give one value for each channel, or "
                "leave mean and std out"
            )
        images = images.contiguous(memory_format=self._format)
        if self._on_host and images.numel() >= _SMALL:
            return self._by_rows(images).to(self._dtype)
        return torch.sub(images, self._mean).mul_(self._scale).to(self._dtype)

    def _by_rows(self, images: Tensor) -> Tensor:
        """Returns the values of torch's expression in float32, with the strides of ``images``.

        They lie in memory of earlier results that nothing holds any more, if there is any.

        By NumPy, in this thread only: torch would wait in each operation for threads whose cores
        the loader has.
        """
        size = 4 * images.numel()
        if size > self._pool.slot_bytes:
            # the step's batch, one that waits for the step, and one in the making
            self._pool = BufferPool(3, size)
        memory = self._pool.acquire(size).view(torch.float32)
        result = memory.as_strided(images.shape, images.stride())

        # in rows that are long enough for vector instructions
        count, channels, height, width = images.shape
        given = images
        target = result
        mean = self._mean[0, :, 0].numpy()
        scale = self._scale[0, :, 0].numpy()
        shape = count, channels, height * width
        if not images.is_contiguous():
            given = given.permute(0, 2, 3, 1)
            target = target.permute(0, 2, 3, 1)
            shape = count, height, width * channels
            mean = np.tile(mean[:, 0], width)
            scale = np.tile(scale[:, 0], width)
        rows = target.view(shape).numpy()
        np.subtract(given.view(shape).numpy(), mean, out=rows)
        np.multiply(rows, scale, out=rows)
        return result


class HostLeadLimiter:
    """Bounds how far the host is ahead of the device; ``clock`` gets each sleep, if given."""

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


# a batch on its way to the step, and its tensors; the events before the copy, after it and behind
# the last write, or None where there are none; when it was made, and when it was there
_Issued = tuple[tuple[Any, list[Tensor]], tuple[Any, Any, Any], tuple[Stamps | None, float]]


@dataclass(slots=True)
class _Transfer:
    """Issues batches to the device and makes them ready there.

    Holds what the loader gave until its copy is done: the loader may use memory again that nothing
    holds.

    Attributes:
        own: the device.
        stream: the side stream; None puts all work on the current stream.
        ahead: whether a thread issues batches while the consumer works.
        clock: reads the events, if given.
        made_there: the loader makes its batches on the device.
        augment, normalise, mix: what is done to each batch.
        images: the part that is normalised; None: the first.
        must: whether a batch must have one.
    """

    own: Accelerator
    stream: Any
    ahead: bool
    clock: StepClock | None
    made_there: bool
    augment: Augment | None
    normalise: Normalise
    mix: Mix | None
    images: str | int | None
    must: bool
    # the stream that the consumer's work goes to
    outer: Any = None
    # the event behind each copy, and the batch that is copied
    _copying: deque[tuple[Any, Any]] = field(default_factory=deque)

    def issue(self, batches: Iterator[Any]) -> _Issued | None:
        """Issues the next of ``batches`` to the device; returns None at the end."""
        own = self.own
        now = (self.clock or own).now
        with own.on(self.stream):
            start = end = done = None
            if own.has_streams and self.made_there:
                start = self._mark()
            batch = next(batches, _END)
            if batch is _END:
                return None
            there_s = now()
            parts = batch[:2] if isinstance(batch, HostBatch) else batch
            tensors, at = self._tensors(parts)
            there = [self.made_there or own.holds(each) for each in tensors]
            is_there = all(there)
            if self.stream is not None and any(there):
                for tensor in compress(tensors, there):
                    own.keep_for(self.stream, tensor)
                if not self.made_there:
                    # the loader's own GPU work may still write to them
                    self.stream.wait_stream(self.outer)
            with named("copy"):
                if own.has_streams:
                    start = end = start or self._mark()
                tensors = [
                    each if is_here else own.copy(each)
                    for each, is_here in zip(tensors, there, strict=True)
                ]
                if own.has_streams and not is_there:
                    end = self._mark()
                    self._copying.append((end, batch))
                if at is not None:
                    if self.augment is not None:
                        tensors[at] = self.augment(tensors[at], batch)
                    tensors[at] = self.normalise(tensors[at])
                if self.mix is not None:
                    images, labels = tensors
                    tensors = [*self.mix(images, labels, batch)]
                if own.has_streams:
                    done = self._mark()
        if self.ahead:
            # with all of its work issued; in a plain loop, as soon as the loader has given it
            there_s = now()
        # without a side stream the device works in between, and the host must not wait for it
        if self._copying:
            self.let_go(most=math.inf if self.stream is None else 1)
        stamps = batch.stamps if isinstance(batch, HostBatch) else None
        place = iter(tensors)
        moved = nest.changed(parts, lambda _: next(place))
        return (moved, tensors), (start, end, done), (stamps, there_s)

    def _tensors(self, parts: Any) -> tuple[list[Tensor], int | None]:
        """Returns the tensors of a batch, and the place of the images among them."""
        tensors: list[Tensor] = []
        nest.changed(parts, tensors.append)
        images = None
        if self.images is not None or not hasattr(parts, "keys"):
            with suppress(LookupError, TypeError):
                images = parts if isinstance(parts, Tensor) else nest.find(parts, self.images or 0)
        at = next((i for i, each in enumerate(tensors) if each is images), None)
        if not tensors or (at is None and self.must):
            has = ", ".join(map(repr, getattr(parts, "keys", list)())) or type(parts).__name__
            raise TypeError(
                f"DataPrefetcher: images={self.images!r} names no tensor in this loader's batches "
                f"({has}); give the key, the index or the attribute of the images"
            )
        return tensors, at

    def _mark(self) -> Any:
        """Returns an event at this point of the stream."""
        own = self.own
        event = self.clock.event(own) if self.clock else own.event(timed=True)
        event.record(own.stream())
        return event

    def let_go(self, most: float) -> None:
        """Drops batches that are copied; waits until at most ``most`` copies are under way."""
        copying = self._copying
        # the newest was just issued: asking costs a call
        while len(copying) > min(most, 1):
            end = copying[0][0]
            if not end.query():
                if len(copying) <= most:
                    return
                end.synchronize()
            copying.popleft()


def _issue_ahead(loader: Iterable[Any], transfer: _Transfer, ready: Any, permit: Any) -> None:
    """The thread of one pass: puts a batch into ``ready`` for each True of ``permit``."""
    try:
        transfer.own.make_current()
        batches = iter(loader)
        try:
            while permit.get():
                ready.put(transfer.issue(batches))
        finally:
            if hasattr(batches, "close"):
                batches.close()
    except BaseException as error:
        # handed to the consumer, who raises it
        ready.put(error)


def _batches(loader: Iterable[Any], transfer: _Transfer) -> Batches:
    """Iterates over one pass; a thread issues each batch while the one before it is used."""
    own = transfer.own
    side = transfer.stream
    if side is not None:
        transfer.outer = own.stream()
        # what the loader has on the device may still be written there
        side.wait_stream(transfer.outer)
    ready = own.queue()
    # a True when a batch is handed out, before its step
    permit = own.queue()

    take = ready.get
    if transfer.ahead:
        permit.put(True)
        thread = own.start(partial(_issue_ahead, loader, transfer, ready, permit), "prefetch")
    else:
        take = partial(transfer.issue, iter(loader))
    try:
        while (given := take()) is not None:
            if isinstance(given, BaseException):
                try:
                    raise given
                finally:
                    # the error's traceback keeps this frame: the two would keep each other
                    del given
            if transfer.ahead:
                permit.put(True)
            (batch, tensors), events, arrival = given
            del given
            if side is not None:
                current = own.stream()
                # compute waits for the copy, on the device
                current.wait_event(events[-1])
                # and the memory is not reused before compute is through
                for tensor in tensors:
                    own.keep_for(current, tensor)
                    del tensor
            if transfer.clock is not None:
                if own.has_streams:
                    transfer.clock.copied(*events)
                transfer.clock.arrived(*arrival)
            del tensors
            yield batch
            # or two batches would stay on the device while the next one is awaited
            del batch
    finally:
        if transfer.ahead:
            permit.put(False)
            # waits for the loader's current ``next()`` to come back
            thread.join()
        transfer.let_go(most=0)
