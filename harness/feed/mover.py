"""One batch at a time from the host to the device, normalised there."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.feed.buffers import BufferPool
from harness.feed.interface import HostBatch
from harness.runtime import accelerator
from harness.runtime.accelerator import Accelerator
from harness.watch.clock import StepClock
from harness.watch.spans import named
from harness.watch.stages import Stamps

Augment = Callable[[Tensor, Any], Tensor]
Mix = Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]
_END: Any = object()
# torch normalises fewer values in one thread, and sooner than NumPy is called
_SMALL = 1 << 15


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
        self._plain = mean is None
        try:
            # arrays and tensors too
            means, stds = (
                np.array([float(value) for value in (() if given is None else given)])
                for given in (mean, std)
            )
        except (TypeError, ValueError, OverflowError):
            means = stds = np.array([np.nan])
        fit = means.shape == stds.shape and self._plain == (std is None)
        if not (fit and np.isfinite([means, stds]).all() and (stds > 0).all()):
            raise ValueError(
                f"DataPrefetcher: mean={mean} and std={std}: give both, or none, with one finite "
                "value for each channel, std above 0"
            )
        if not self._plain and not dtype.is_floating_point:
            raise ValueError(f"DataPrefetcher: dtype={dtype}: use float32, bfloat16 or float16")
        self._dtype = dtype
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        self._on_host = accelerator.of(device).kind == "cpu"
        self._mean, self._scale = (
            torch.from_numpy(each.astype(np.float32)).to(device)[None, :, None, None]
            for each in (255.0 * means, 1.0 / (255.0 * stds))
        )
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

        By NumPy, in this thread alone: torch would wait in each operation for threads whose cores
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
        given = images.numpy()
        target = result.numpy()
        mean = self._mean.numpy()[0, :, 0]
        scale = self._scale.numpy()[0, :, 0]
        if images.is_contiguous():
            shape = count, channels, height * width
        else:
            given = given.transpose(0, 2, 3, 1)
            target = target.transpose(0, 2, 3, 1)
            shape = count, height, width * channels
            mean = np.tile(mean[:, 0], width)
            scale = np.tile(scale[:, 0], width)
        target = target.reshape(shape)
        np.subtract(given.reshape(shape), mean, out=target)
        np.multiply(target, scale, out=target)
        return result


class Ready(NamedTuple):
    """A batch on its way to the step.

    Attributes:
        images: on the device, normalised.
        labels: on the device.
        events: before the copy, after the copy, and behind the last write to the tensors; None
            where nobody wants one.
        stamps: when the batch was made.
        there_s: when the batch was there.
    """

    images: Tensor
    labels: Tensor
    events: tuple[Any, Any, Any]
    stamps: Stamps | None
    there_s: float


@dataclass(slots=True)
class Mover:
    """Moves batches to the device and makes them ready there.

    Holds what the loader gave until its copy is done: the loader may use memory again that nothing
    holds.

    Attributes:
        own: the device.
        stream: the side stream; None puts all work on the current stream.
        clock: reads the events, if given.
        made_there: the loader makes its batches on the device.
        augment, normalise, mix: what is done to each batch.
    """

    own: Accelerator
    stream: Any
    clock: StepClock | None
    made_there: bool
    augment: Augment | None
    normalise: Normalise
    mix: Mix | None
    # the stream that the consumer's work goes to
    outer: Any = None
    # the event behind each copy, and the batch that is copied
    _copying: deque[tuple[Any, Any]] = field(default_factory=deque)

    def __call__(self, batches: Iterator[Any], plain: bool) -> Ready | None:
        """Issues the next of ``batches`` to the device; returns None at the end.

        A ``plain`` loop has a batch as soon as the loader has given it; a loop with a thread, when
        all of the work is issued.
        """
        own = self.own
        now = (self.clock or own).now
        timed = self.clock is not None and own.has_streams
        with own.on(self.stream):
            start = self._mark(timed and self.made_there, timed)
            batch = next(batches, _END)
            if batch is _END:
                return None
            there_s = now()
            images, labels = _pair(batch)
            is_there = self.made_there or own.holds(images)
            if self.stream is not None and is_there:
                own.keep_for(self.stream, images)
                if not self.made_there:
                    # the loader's own GPU work may still write to the images
                    self.stream.wait_stream(self.outer)
            with named("copy"):
                start = end = start or self._mark(timed, timed)
                if not is_there:
                    images = own.copy(images)
                if not (self.made_there or own.holds(labels)):
                    labels = own.copy(labels)
                if own.has_streams and not is_there:
                    end = self._mark(True, timed)
                    self._copying.append((end, batch))
                if self.augment is not None:
                    images = self.augment(images, batch)
                images = self.normalise(images)
                if self.mix is not None:
                    images, labels = self.mix(images, labels, batch)
                done = self._mark(timed or self.stream is not None, timed)
        if not plain:
            there_s = now()
        # without a side stream the device works in between, and the host must not wait for it
        self.let_go(most=math.inf if self.stream is None else 1)
        return Ready(
            images,
            labels,
            (start, end, done),
            batch.stamps if isinstance(batch, HostBatch) else None,
            there_s,
        )

    def _mark(self, wanted: bool, timed: bool) -> Any:
        """Returns an event at this point of the stream, if one is wanted."""
        if not wanted:
            return None
        event = self.own.event(timed=timed)
        event.record(self.own.stream())
        return event

    def let_go(self, most: float) -> None:
        """Drops batches that are copied; waits until at most ``most`` copies are under way."""
        copying = self._copying
        while copying and (copying[0][0].query() or len(copying) > most):
            copying[0][0].synchronize()
            copying.popleft()


def _pair(batch: Any) -> Sequence[Tensor]:
    """Returns the images and the labels; a batch of another loader must have no other part."""
    if isinstance(batch, HostBatch):
        return batch.images, batch.labels
    parts = list(batch) if isinstance(batch, tuple | list) else [batch]
    if len(parts) != 2 or not all(hasattr(part, "to") for part in parts):
        raise TypeError(
            "DataPrefetcher: batches must be (images, labels), two tensors; this loader gives "
            f"{', '.join(type(part).__name__ for part in parts)}: let its collate_fn return these "
            "two"
        )
    return parts
