"""Copies batches to the device, one ahead of the step, and normalizes them there.

Follows Apex's ``data_prefetcher`` (NVIDIA, examples/imagenet), with three differences. The next
batch never delays a ready one, because a separate thread waits for the loader. A single side stream
is used throughout (one stream per epoch would make the allocator reserve more memory, timm #2781).
Errors and early exits behave as in a plain loop.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
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
from ..runtime.folder import log
from . import nest
from .base import Backend, BufferPool, HostBatch

Batches = Generator[Any, None, None]
Augment = Callable[[Tensor, Any], Tensor]
Mix = Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]
_END: Any = object()
# below this size, torch uses one thread and is faster than a numpy call
_SMALL = 1 << 15
# the same if torch has only one thread: above it, the memory for results is no longer reused
_SMALL_OF_ONE = 1 << 18


class DataPrefetcher:
    """An iterator over batches on the device, with the same structure as the ``loader``'s batches.

    On devices with streams, such as CUDA, a thread takes batches from ``loader`` and issues their
    copy and normalization on a side stream while the step runs, one batch ahead of the consumer.
    ``next()`` first sleeps until the device has at most one step left, so the host and the memory
    for its batches are never more than two steps ahead. On other devices, and with ``ahead=False``,
    each batch is moved on request. On a CPU, it is normalized into memory from earlier batches that
    no tensor or array uses; the prefetcher keeps memory for up to three batches. Each ``iter()``
    starts a new pass and ends the previous one.

    Args:
        loader: yields batches, such as ``(images, labels)``, of tensors in nested dictionaries,
            lists, tuples, named tuples and dataclasses; other parts are passed through. It can also
            be a wellfed feed.
        device: target device for the batches.
        mean: channel means as fractions of 255, for uint8 images ``[N, C, H, W]``. With None,
            values are unchanged: uint8 images stay uint8, and floats are only cast to ``dtype``.
        std: channel standard deviations as fractions of 255.
        dtype: the type of images on the device (float32, bfloat16 or float16).
        channels_last: whether to lay out images as NHWC.
        images: index, key or attribute of the part of a batch to which ``mean``, ``std``, ``dtype``
            and ``channels_last`` apply; None: the first in a sequence, or the only tensor.
        clock: receives the events around each copy, and the time at which each batch was made.
        ahead: None: depends on the device; False: use no thread and no side stream.
        augment: called with the unnormalized images on the device and the loader's batch; returns
            new images.
        mix: called with the normalized images, the labels on the device and the loader's batch;
            returns new images and labels.

    Raises:
        ValueError: ``mean`` and ``std`` do not match each other or (from ``next()``) the images.
        TypeError: from ``next()``, for a batch without a tensor, or without ``images``.
        Any error of ``loader``, from ``next()``, instead of the batch.
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
            log.warning("DataPrefetcher: device=%s does not support copying batches ahead", device)
        self.device = own.device
        if ahead is None:
            ahead = own.has_streams
        stream = own.side_stream() if ahead else None
        with own.on(stream):
            normalize = Normalize(self.device, mean, std, dtype, channels_last)
        made_there = isinstance(loader, Backend) and loader.made_on_device
        must = normalize.changes or images is not None
        self._transfer = _Transfer(
            own, stream, ahead, clock, made_there, augment, normalize, mix, images, must
        )
        self._lead = HostLeadLimiter(own, clock) if own.has_events else None
        self._pass: Batches | None = None
        self._end_pass: Callable[[], Any] | None = None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> DataPrefetcher:
        self.close()
        self._pass = _batches(self.loader, self._transfer)
        # an unfinished pass may have a thread
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
        """Ends the current pass, if any, and joins its thread."""
        self._pass = None
        if self._end_pass is not None:
            self._end_pass()


class Normalize:
    """Converts images to ``(value / 255 - mean) / std`` in the network's dtype and layout.

    Args:
        device: device of the images.
        mean: channel means as fractions of 255; None leaves values and integer types unchanged.
        std: channel standard deviations as fractions of 255.
        dtype: type of the result.
        channels_last: whether to lay out images as NHWC.

    Raises:
        ValueError: ``mean`` and ``std`` do not match, ``dtype`` is not a floating-point type, or,
            from a call, the images do not match.
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
        # otherwise NCHW float32 images are unchanged
        self.changes = not self._plain or dtype != torch.float32 or channels_last
        given = ((), ()) if self._plain else (mean, std)
        try:
            # also works for arrays and tensors
            values = np.array([[float(value) for value in each] for each in given])  # type: ignore
            if not np.isfinite(values).all() or (values[1] <= 0).any():
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                f"DataPrefetcher: mean={mean} and std={std}: pass both or neither, with one finite "
                "value per channel and std above 0"
            ) from None
        if not self._plain and not dtype.is_floating_point:
            raise ValueError(f"DataPrefetcher: dtype={dtype}: use float32, bfloat16 or float16")
        self._dtype = dtype
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        self._on_host = accelerator.get(device).is_host
        scaled = torch.from_numpy(np.stack([255.0 * values[0], 1.0 / (255.0 * values[1])]))
        self._mean, self._scale = scaled.float().to(device)[:, None, :, None, None]
        # for results on a CPU
        self._pool = BufferPool(0, 0)

    def __call__(self, images: Tensor) -> Tensor:
        """Returns normalized ``images``; the caller's memory is unchanged."""
        if self._plain:
            dtype = self._dtype if images.is_floating_point() else images.dtype
            return images.contiguous(memory_format=self._format).to(dtype)
        channels = self._mean.numel()
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != channels:
            raise ValueError(
                f"DataPrefetcher: images are {images.dtype} {list(images.shape)}; mean and std of "
                f"{channels} values need torch.uint8 [N, {channels}, H, W], 0..255; load uint8 "
                "(torchvision.transforms.v2.PILToTensor), pass one value per channel, or "
                "omit mean and std"
            )
        images = images.contiguous(memory_format=self._format)
        small = _SMALL if torch.get_num_threads() > 1 else _SMALL_OF_ONE
        if self._on_host and images.numel() >= small:
            return self._by_rows(images).to(self._dtype)
        return torch.sub(images, self._mean).mul_(self._scale).to(self._dtype)

    def _by_rows(self, images: Tensor) -> Tensor:
        """Returns the same float32 values as torch's expression, with the strides of ``images``.

        Reuses memory from earlier results that nothing references. Uses numpy in this thread,
        because each torch operation would wait for threads whose cores the loader uses.
        """
        size = 4 * images.numel()
        if size > self._pool.slot_bytes:
            # the step's batch, a waiting batch, and the one being made
            self._pool = BufferPool(3, size)
        memory = self._pool.acquire(size).view(torch.float32)
        result = memory.as_strided(images.shape, images.stride())

        # rows long enough for vector instructions
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
    """Limits the host's lead over the device; reports sleeps to ``clock``."""

    def __init__(self, own: Accelerator, clock: StepClock | None) -> None:
        self._own = own
        self._clock = clock
        # the ends of the last two steps, in launch order
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


# a prefetched batch and its tensors; events before the copy, after it and after the last write, or
# None; when it was made, and when it arrived
_Issued = tuple[tuple[Any, list[Tensor]], tuple[Any, Any, Any], tuple[Stamps | None, float]]


@dataclass(slots=True)
class _Transfer:
    """Issues batches to the device, and prepares them there.

    Keeps each loader batch until its copy is done, because the loader reuses unreferenced memory.

    Attributes:
        own: the target device.
        stream: the side stream; None puts all work on the current stream.
        ahead: whether a thread issues batches while the consumer works.
        clock: reads the events, if given.
        made_there: whether the loader makes batches on the device.
        augment, normalize, mix: applied to each batch.
        images: the part to normalize; None: the first.
        must: whether every batch must have this part.
    """

    own: Accelerator
    stream: Any
    ahead: bool
    clock: StepClock | None
    made_there: bool
    augment: Augment | None
    normalize: Normalize
    mix: Mix | None
    images: str | int | None
    must: bool
    # the consumer's stream
    outer: Any = None
    # the event after each copy, and the batch being copied
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
            if self.stream is not None and any(there):
                for tensor in compress(tensors, there):
                    own.keep_for(self.stream, tensor)
                if not self.made_there:
                    # the loader's GPU work may still write to them
                    self.stream.wait_stream(self.outer)
            with named("copy"):
                if own.has_streams:
                    start = end = start or self._mark()
                tensors = [
                    each if is_here else own.copy(each)
                    for each, is_here in zip(tensors, there, strict=True)
                ]
                if own.has_streams and not all(there):
                    end = self._mark()
                    self._copying.append((end, batch))
                if at is not None:
                    if self.augment is not None:
                        tensors[at] = self.augment(tensors[at], batch)
                    tensors[at] = self.normalize(tensors[at])
                if self.mix is not None:
                    images, labels = tensors
                    tensors = [*self.mix(images, labels, batch)]
                if own.has_streams:
                    done = self._mark()
        if self.ahead:
            # once all of its work is issued; in a plain loop, once the loader returns it
            there_s = now()
        # without a side stream the device computes in between, and the host must not wait
        if self._copying:
            self.let_go(most=math.inf if self.stream is None else 1)
        stamps = batch.stamps if isinstance(batch, HostBatch) else None
        place = iter(tensors)
        moved = nest.changed(parts, lambda _: next(place))
        return (moved, tensors), (start, end, done), (stamps, there_s)

    def _tensors(self, parts: Any) -> tuple[list[Tensor], int | None]:
        """Returns the tensors of a batch, and the index of the images among them."""
        tensors: list[Tensor] = []
        nest.changed(parts, tensors.append)
        images = None
        if self.images is not None or not hasattr(parts, "keys"):
            name = self.images or 0
            with suppress(LookupError, TypeError, AttributeError):
                if isinstance(parts, Tensor):
                    images = parts
                elif isinstance(name, str) and not isinstance(parts, Mapping):
                    images = getattr(parts, name)
                else:
                    images = parts[name]
        at = next((i for i, each in enumerate(tensors) if each is images), None)
        if not tensors or (at is None and self.must):
            has = ", ".join(map(repr, getattr(parts, "keys", list)())) or type(parts).__name__
            raise TypeError(
                f"DataPrefetcher: images={self.images!r} is not a tensor in this loader's batches "
                f"({has}); pass the images' key, index or attribute"
            )
        return tensors, at

    def _mark(self) -> Any:
        """Returns an event recorded at this point in the stream."""
        own = self.own
        event = self.clock.event(own) if self.clock else own.event(timed=True)
        event.record(own.stream())
        return event

    def let_go(self, most: float) -> None:
        """Drops copied batches; waits until at most ``most`` copies are pending."""
        copying = self._copying
        # skip the newest, which was just issued, because a query costs a call
        while len(copying) > min(most, 1):
            end = copying[0][0]
            if not end.query():
                if len(copying) <= most:
                    return
                end.synchronize()
            copying.popleft()


def _issue_ahead(loader: Iterable[Any], transfer: _Transfer, ready: Any, permit: Any) -> None:
    """Runs one pass's thread, which puts a batch into ``ready`` for each True in ``permit``."""
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
        # raised by the consumer
        ready.put(error)


def _batches(loader: Iterable[Any], transfer: _Transfer) -> Batches:
    """Iterates over one pass; a thread issues each batch while the previous one is used."""
    own = transfer.own
    side = transfer.stream
    if side is not None:
        transfer.outer = own.stream()
        # the loader's device memory may still be written
        side.wait_stream(transfer.outer)
    ready = own.queue()
    # True when a batch is returned, before its step
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
                    # avoids a reference cycle between error and frame
                    del given
            if transfer.ahead:
                permit.put(True)
            (batch, tensors), events, arrival = given
            del given
            if side is not None:
                current = own.stream()
                # compute waits for the copy on the device
                current.wait_event(events[-1])
                # and the memory is only reused after compute
                for tensor in tensors:
                    own.keep_for(current, tensor)
                    del tensor
            if transfer.clock is not None:
                if own.has_streams:
                    transfer.clock.copied(*events)
                transfer.clock.arrived(*arrival)
            del tensors
            yield batch
            # otherwise, two batches would stay on the device while waiting for the next one
            del batch
    finally:
        if transfer.ahead:
            permit.put(False)
            # waits for the loader's current ``next()``
            thread.join()
        transfer.let_go(most=0)
