"""The images of a data set in one array, as they are before crop and mirror: a crop is a window
into it.

That one form of each image is made once: of arrays at once, of files by whoever reads them first.
On a GPU the array and the work on it lie there, by the same integers.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import mmap
from contextlib import suppress
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from harness.data.images import ImageDataset
from harness.data.storage import ArraySource, Source, Subset
from harness.data.transforms import EvalTransform, TrainTransform, Transform, mirror_into
from harness.feed.interface import HostBatch
from harness.runtime import accelerator
from harness.runtime.folder import LOGGER
from harness.runtime.seeding import uniforms

# of a GPU's free memory: the network wants some too
_DEVICE_SHARE = 0.5

_log = logging.getLogger(LOGGER)


def why_not_in_memory(dataset: object) -> str | None:
    """Why the images of ``dataset`` have no one form before crop and mirror; None where they have."""
    if not isinstance(dataset, ImageDataset):
        return f"{type(dataset).__name__} makes each sample anew"
    if isinstance(dataset.transform, EvalTransform) or _crop(dataset.transform) in (
        "pad",
        "center",
    ):
        return None
    return "crops are cut from whole images, which have no common size"


def pixel_bytes(dataset: ImageDataset) -> int:
    """Bytes that the array takes."""
    return 3 * _Layout.of(dataset).pixels


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """Where pixels lie: before each row are ``pad`` zeros, before each image as many rows of them,
    at the end both.

    Beyond the end of a row or an image are the zeros of the next: neighbours share them.
    """

    count: int
    size: int
    pad: int

    @classmethod
    def of(cls, dataset: ImageDataset) -> _Layout:
        transform = dataset.transform
        return cls(len(dataset), dataset.image_size, transform.pad if _pads(transform) else 0)

    @property
    def pitch(self) -> int:
        """Pixels from one row to the next, and rows from one image to the next."""
        return self.size + self.pad

    @property
    def pixels(self) -> int:
        """In all."""
        return (self.count * self.pitch + self.pad) * self.pitch + self.pad

    def images(self, memory: Tensor) -> Tensor:
        """``memory``, uint8 ``[3 * pixels]``, as the images without their zeros, uint8 ``[count,
        size, size, 3]``.
        """
        whole = memory[: 3 * self.count * self.pitch**2].view(self.count, self.pitch, self.pitch, 3)
        return whole[:, self.pad :, self.pad :]

    def windows(self, memory: Tensor) -> Tensor:
        """Windows of an image's size by the place of their first pixel: rows of bytes, uint8
        ``[places, size, 3 * size]``.
        """
        places = self.pixels - (self.size - 1) * self.pitch - self.size + 1
        return memory.as_strided((places, self.size, 3 * self.size), (3, 3 * self.pitch, 1))


class InMemoryImages:
    """The images of a data set in one array, for all feeds over it; ``why_not_in_memory`` has
    nothing against it.

    Args:
        dataset: whose images.
        device: whose memory is to hold them, taken at once; None, or one without twice the memory
            free: the host's does.

    Attributes:
        on_device: whether they lie in the device's memory.
        untransformed: a data set that makes what ``keep`` takes: the images as they are before crop
            and mirror.
    """

    def __init__(self, dataset: ImageDataset, device: torch.device | None = None) -> None:
        self._dataset = dataset
        self._layout = _Layout.of(dataset)
        self._own = accelerator.of(device or "cpu")
        self._memory: Tensor | None = None
        if device is not None and self._own.has_streams:
            self._memory = _taken(self._own, pixel_bytes(dataset))
        self.on_device = self._memory is not None
        self._labels = torch.tensor(
            dataset.labels, device=self._own.device if self.on_device else None
        )
        self._there = np.zeros(len(dataset), bool)
        self._source = _rows_of(dataset)
        # without the margin and the mirroring that the transform draws for each epoch
        self.untransformed = copy.copy(dataset)
        if isinstance(dataset.transform, TrainTransform):
            self.untransformed.transform = dataclasses.replace(dataset.transform, pad=0, hflip=0.0)

    def missing(self, indices: np.ndarray) -> np.ndarray:
        """Those of ``indices`` whose images somebody has to make and to give to ``keep`` before
        ``batch`` can serve them.
        """
        return indices[:0] if self._source is not None else indices[~self._there[indices]]

    def keep(self, made: HostBatch) -> None:
        """Take in ``made``, a batch of ``untransformed``."""
        self._put(made.indices.numpy(), made.images.permute(0, 2, 3, 1).numpy())

    def _fetch(self, indices: np.ndarray) -> None:
        """Take in those of ``indices`` that are not there yet and lie in an array."""
        new = indices[~self._there[indices]]
        if self._source is not None and len(new):
            images, rows = self._source
            self._put(new, images[rows[new]])

    def _put(self, indices: np.ndarray, images: np.ndarray) -> None:
        array = self._layout.images(self._array())
        if not self.on_device:
            array.numpy()[indices] = images
        else:
            array[self._moved(indices)] = self._moved(images)
        self._there[indices] = True

    def batch(self, epoch: int, indices: np.ndarray, pin_memory: bool) -> tuple[Tensor, Tensor]:
        """Images, uint8 ``[N, 3, S, S]`` in channels_last memory, and labels, int64 ``[N]``:
        ``indices`` as of ``epoch``.
        """
        self._fetch(indices)
        begin, mirrored = self._drawn(epoch, indices)
        if self.on_device:
            return self._gathered(indices, begin, mirrored)
        # by numpy: torch's team of threads would wait for processors that the step has, for longer
        # than all the rest takes
        cut = self._layout.windows(self._array()).numpy()[begin]
        flipped = np.flatnonzero(mirrored)
        rows = cut.reshape(len(indices), self._layout.size, -1, 3)
        plain = rows[flipped]
        turned = np.empty_like(plain)
        mirror_into(plain, turned)
        rows[flipped] = turned
        images = torch.from_numpy(cut)
        labels = torch.from_numpy(self._labels.numpy()[indices])
        return _as_images(
            images.pin_memory() if pin_memory else images
        ), labels.pin_memory() if pin_memory else labels

    def _gathered(
        self, indices: np.ndarray, begin: np.ndarray, mirrored: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """As ``batch``, by a few launches for all samples together."""
        # those to be mirrored come last, and lie together
        order = np.argsort(mirrored, kind="stable")
        places, back, rows = self._moved(np.stack([begin[order], np.argsort(order), indices]))
        cut = torch.index_select(self._layout.windows(self._array()), 0, places)
        images = _as_images(cut)
        plain = len(order) - int(np.count_nonzero(mirrored))
        images[plain:] = images[plain:].flip(3)
        return _as_images(cut.index_select(0, back)), self._labels.index_select(0, rows)

    def _drawn(self, epoch: int, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The place where each sample's crop begins, and whether it is mirrored, by the sample's
        own random numbers.
        """
        transform = self._dataset.transform
        pitch = self._layout.pitch
        begin = indices * pitch**2
        if not isinstance(transform, TrainTransform):
            return begin, np.zeros(len(indices), bool)
        drawn = uniforms(self._dataset.seed, epoch, indices, 3 if _pads(transform) else 1)
        if _pads(transform):
            top, left = ((2 * transform.pad + 1) * drawn[:, :2]).astype(np.int64).T
            begin += top * pitch + left
        return begin, drawn[:, -1] < transform.hflip

    def _array(self) -> Tensor:
        if self._memory is None:
            size = 3 * self._layout.pixels
            try:
                # zeros page by page: of numpy's, in huge pages, the first batch would touch nearly
                # all
                pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                raise MemoryError(
                    f"no memory for images of {size / 1e6:.1f} MB ({error.strerror})"
                ) from error
            self._memory = torch.frombuffer(pages, dtype=torch.uint8)
        return self._memory

    def _moved(self, array: np.ndarray) -> Tensor:
        """``array`` on the GPU, which the host does not wait for."""
        return self._own.copy(self._own.pin(torch.from_numpy(array)))


def _rows_of(dataset: ImageDataset) -> tuple[np.ndarray, np.ndarray] | None:
    """The array that holds the images as they are before crop and mirror, and which rows of it;
    None where none does.
    """
    transform = dataset.transform
    side = dataset.image_size
    source: Source = dataset.source
    rows = np.arange(len(dataset))
    while isinstance(source, Subset):
        rows = source.indices[rows]
        source = source.source
    resizes = not _pads(transform) and getattr(transform, "resize", None) is not None
    if resizes or not isinstance(source, ArraySource) or source.images.shape[1:3] != (side, side):
        return None
    return source.images, rows


def _crop(transform: Transform) -> str | None:
    return transform.crop if isinstance(transform, TrainTransform) else None


def _pads(transform: Transform) -> TypeGuard[TrainTransform]:
    return _crop(transform) == "pad"


def _as_images(rows: Tensor) -> Tensor:
    """Rows of bytes, uint8 ``[N, S, 3 * S]``, as the images that they are, uint8 ``[N, 3, S, S]``
    in channels_last memory.
    """
    return rows.view(*rows.shape[:2], -1, 3).permute(0, 3, 1, 2)


def _taken(own: accelerator.Accelerator, count: int) -> Tensor | None:
    """So many zero bytes of the device's memory; None, and a line in the log, where it has no room
    for them.
    """
    # what torch has reserved and not allocated does not count: the network's next step takes that
    free = memory.free if (memory := own.memory()) else 0
    if count <= _DEVICE_SHARE * free:
        with suppress(torch.OutOfMemoryError):
            # somebody else was quicker
            return torch.zeros(count, dtype=torch.uint8, device=own.device)
    _log.info(
        "arrays lie on the host: %.1f GB are more than half of the device's free %.1f GB",
        count / 1e9,
        free / 1e9,
    )
    return None
