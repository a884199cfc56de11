"""Images on the device to what the network takes: normalised, in its type and memory format."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from harness.feed.buffers import BufferPool
from harness.runtime import accelerator

# batches in use: the step's, one that waits for the step, and one in the making
_SLOTS = 3
# values that torch normalises in one thread, and sooner than NumPy is called
_SMALL = 1 << 15


class Normalise:
    """Images to ``(value / 255 - mean) / std`` in ``dtype`` and the memory format of the network.

    Args:
        device: where the images are.
        mean: each channel's mean as fractions of 255; None leaves values as they are.
        std: each channel's standard deviation as fractions of 255.
        dtype: the type of the result.
        channels_last: lay images out as NHWC.
        reuse: on a CPU, write into memory of earlier results that nothing holds any more.

    Raises:
        ValueError: ``mean`` and ``std`` do not fit each other, or, from a call, the images.
    """

    def __init__(
        self,
        device: torch.device,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        dtype: torch.dtype,
        channels_last: bool,
        *,
        reuse: bool = False,
    ) -> None:
        if len({None if values is None else len(values) for values in (mean, std)}) > 1:
            raise ValueError(
                f"DataPrefetcher: mean={mean} and std={std}: give both, or none, with one value "
                "for each channel"
            )
        self._plain = mean is None
        self._dtype = dtype
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        self._means = tuple(255.0 * value for value in mean or ())
        self._scales = tuple(1.0 / (255.0 * value) for value in std or ())
        if not self._plain:
            self._mean, self._scale = (
                torch.tensor(values, device=device).view(1, -1, 1, 1)
                for values in (self._means, self._scales)
            )
        self._on_host = accelerator.of(device).kind == "cpu"
        self._pool = BufferPool(0, 0) if reuse else None

    def __call__(self, images: Tensor) -> Tensor:
        """``images`` normalised; the caller's own memory stays as it is."""
        if self._plain:
            return images.contiguous(memory_format=self._format).to(self._dtype)
        channels = len(self._means)
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != channels:
            raise ValueError(
                f"DataPrefetcher: images are {images.dtype} {list(images.shape)}; mean and std of "
                f"{channels} values are "
                f"for torch.uint8 [N, {channels}, H, W], 0..255: load uint8 "
                "(torchvision.transforms.v2.PILToTensor), give "
                "one value for each channel, or leave mean and std out"
            )
        images = images.contiguous(memory_format=self._format)
        if self._on_host and images.numel() >= _SMALL:
            return self._by_rows(images).to(self._dtype)
        result = torch.sub(images, self._mean).mul_(self._scale)
        return result if self._dtype is torch.float32 else result.to(self._dtype)

    def _by_rows(self, images: Tensor) -> Tensor:
        """The values of torch's expression in float32, in rows that are long enough for vector
        instructions.

        By NumPy, in this thread alone: torch would wait in each operation for threads whose cores
        the loader has.
        """
        result = self._memory(images)
        count, channels, height, width = images.shape
        given = images.numpy()
        target = result.numpy()
        if images.is_contiguous():
            shape = count, channels, height * width
            mean, scale = (_tiled(values, 1)[:, None] for values in (self._means, self._scales))
        else:
            given = given.transpose(0, 2, 3, 1)
            target = target.transpose(0, 2, 3, 1)
            shape = count, height, width * channels
            mean = _tiled(self._means, width)
            scale = _tiled(self._scales, width)
        given = given.reshape(shape)
        target = target.reshape(shape)
        np.subtract(given, mean, out=target)
        np.multiply(target, scale, out=target)
        return result

    def _memory(self, images: Tensor) -> Tensor:
        """Memory for the float32 values of ``images``, with the strides of ``images``."""
        if self._pool is None:
            return torch.empty_like(images, dtype=torch.float32)
        size = images.numel() * torch.float32.itemsize
        if size > self._pool.slot_bytes:
            self._pool = BufferPool(_SLOTS, size)
        return (
            self._pool.acquire(size).view(torch.float32).as_strided(images.shape, images.stride())
        )


@functools.lru_cache(maxsize=16)
def _tiled(values: tuple[float, ...], times: int) -> np.ndarray:
    return np.tile(np.array(values, np.float32), times)
