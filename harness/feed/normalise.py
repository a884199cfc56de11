"""Normalises uint8 images on the device: in the network's type and memory format."""

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
        self._on_host = accelerator.of(device).kind == "cpu"
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
