"""Images on the device to what the network takes: normalised, in its type and memory format."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from harness.feed.buffers import BufferPool
from harness.runtime import accelerator

# torch normalises fewer values in one thread, and sooner than NumPy is called
_SMALL = 1 << 15


class Normalise:
    """Turns images into ``(value / 255 - mean) / std`` in the network's type and format.

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
        if (mean is None) != (std is None) or len(mean or ()) != len(std or ()):
            raise ValueError(
                f"DataPrefetcher: mean={mean} and std={std}: give both, or none, with one value "
                "for each channel"
            )
        self._plain = mean is None
        self._dtype = dtype
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        self._means = np.array([255.0 * value for value in mean or ()], np.float32)
        self._scales = np.array([1.0 / (255.0 * value) for value in std or ()], np.float32)
        self._on_host = accelerator.of(device).kind == "cpu"
        # for other devices
        shape = (1, len(self._means), 1, 1)
        self._mean = torch.from_numpy(self._means).to(device).view(shape)
        self._scale = torch.from_numpy(self._scales).to(device).view(shape)
        self._pool = BufferPool(0, 0) if reuse else None

    def __call__(self, images: Tensor) -> Tensor:
        """Returns ``images`` normalised; the caller's own memory stays as it is."""
        if self._plain:
            return images.contiguous(memory_format=self._format).to(self._dtype)
        channels = len(self._means)
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

        By NumPy, in this thread alone: torch would wait in each operation for threads whose cores
        the loader has.
        """
        if self._pool is None:
            result = torch.empty_like(images, dtype=torch.float32)
        else:
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
        if images.is_contiguous():
            shape = count, channels, height * width
            mean = self._means[:, None]
            scale = self._scales[:, None]
        else:
            given = given.transpose(0, 2, 3, 1)
            target = target.transpose(0, 2, 3, 1)
            shape = count, height, width * channels
            mean = np.tile(self._means, width)
            scale = np.tile(self._scales, width)
        target = target.reshape(shape)
        np.subtract(given.reshape(shape), mean, out=target)
        np.multiply(target, scale, out=target)
        return result
