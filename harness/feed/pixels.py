"""The images of a data set in one array, as they are before crop and mirror.

A crop is a window into the array. Each image is made once: by the first batch that asks for it. On
a GPU the array lies there and the work is done there, by the same integers.
"""

from __future__ import annotations

import copy
import dataclasses
import mmap
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from harness.data.images import ImageDataset
from harness.data.storage import ArraySource, Source, Subset
from harness.data.transforms import mirror_into
from harness.feed.interface import Failure, HostBatch
from harness.runtime import accelerator
from harness.runtime.folder import log
from harness.runtime.seeding import uniforms


def has_one_form(dataset: object) -> bool:
    """Returns whether these are images that have one form before crop and mirror."""
    return isinstance(dataset, ImageDataset) and dataset.transform.crop in ("pad", "center")


def pixel_bytes(dataset: ImageDataset) -> int:
    """Returns the bytes of the array.

    Before each row lie ``pad`` zeros, before each image as many rows of zeros, at the end both.
    What follows a row or an image are the zeros of the next: neighbours share them.
    """
    pad = _padding(dataset)
    pitch = dataset.image_size + pad
    return 3 * ((len(dataset) * pitch + pad) * pitch + pad)


def _padding(dataset: ImageDataset) -> int:
    """Returns the width of the zeros around an image, which only a pad crop has."""
    transform = dataset.transform
    return transform.pad if transform.crop == "pad" else 0


class InMemoryImages:
    """The images of a data set in one array, for all feeds over the set.

    Args:
        dataset: gives the images; ``has_one_form`` is true of it.
        device: holds the images if it is a GPU with twice the memory free; else the host does.

    Attributes:
        on_device: whether the images lie in the device's memory.
        replaced: samples that could not be read, with others in their places.
        untransformed: a data set that makes what ``keep`` takes: the images as they are before crop
            and mirror.
    """

    def __init__(self, dataset: ImageDataset, device: torch.device | None = None) -> None:
        self._dataset = dataset
        # pixels from one row to the next, and rows from one image to the next
        self._pad = _padding(dataset)
        self._pitch = dataset.image_size + self._pad
        self._own = accelerator.of(device or "cpu")
        self._memory: Tensor | None = None
        if device is not None and (memory := self._own.memory()):
            # Half of it: the network wants some too. What torch has reserved and not allocated does
            # not count: the network's next step takes that.
            count = pixel_bytes(dataset)
            if 2 * count <= memory.free:
                # another process may be quicker
                with suppress(torch.OutOfMemoryError):
                    self._memory = torch.zeros(count, dtype=torch.uint8, device=self._own.device)
            if self._memory is None:
                log.info(
                    "arrays lie on the host: %.1f GB are more than half of the device's free "
                    "%.1f GB",
                    count / 1e9,
                    memory.free / 1e9,
                )
        self.on_device = self._memory is not None
        self._labels = torch.from_numpy(np.array(dataset.source.labels, np.int64))
        if self.on_device:
            self._labels = self._labels.to(self._own.device)
        self._there = np.zeros(len(dataset), bool)
        self.replaced: dict[int, Failure] = {}

        # an array that holds the images already, if one does, and which rows of it
        self._source: tuple[np.ndarray, np.ndarray] | None = None
        source: Source = dataset.source
        rows = np.arange(len(dataset))
        while isinstance(source, Subset):
            rows = source.indices[rows]
            source = source.source
        side = (dataset.image_size, dataset.image_size)
        # a pad crop resizes only what has another size
        resizes = dataset.transform.crop == "center" and dataset.transform.resize
        if not resizes and isinstance(source, ArraySource) and source.images.shape[1:3] == side:
            self._source = source.images, rows

        # without the margin and the mirroring that the transform draws for each epoch
        self.untransformed = copy.copy(dataset)
        self.untransformed.transform = dataclasses.replace(dataset.transform, pad=0, hflip=0.0)

    def missing(self, indices: np.ndarray) -> np.ndarray:
        """Returns the places whose images ``keep`` must be given before ``batch``."""
        places = indices % len(self._there)
        # an array's are taken in without reading
        absent: np.ndarray = places[~self._there[places] & (self._source is None)]
        return absent

    def keep(self, made: HostBatch) -> None:
        """Takes in ``made``, a batch of ``untransformed``."""
        indices = made.indices.numpy()
        self._put(indices, made.images.permute(0, 2, 3, 1).numpy())
        if made.failures:
            self.replaced |= {failure.sample: failure for failure in made.failures}
            # the labels are those of other samples
            where = self._labels.device
            self._labels[made.indices.to(where)] = made.labels.to(where)

    def _put(self, indices: np.ndarray, images: np.ndarray) -> None:
        pitch = self._pitch
        count = len(self._there)
        whole = self._array()[: 3 * count * pitch**2].view(count, pitch, pitch, 3)
        inner = whole[:, self._pad :, self._pad :]
        if self.on_device:
            inner[self._moved(indices)] = self._moved(images)
        else:
            inner.numpy()[indices] = images
        self._there[indices] = True

    def batch(self, epoch: int, indices: np.ndarray, pin_memory: bool) -> tuple[Tensor, Tensor]:
        """Returns the images and labels of an order's ``indices`` in ``epoch``.

        Images are uint8 ``[N, 3, S, S]`` in channels_last memory, labels int64 ``[N]``.
        """
        # images of an array are taken in by the first batch that wants them
        rows = indices % len(self._there)
        new = rows[~self._there[rows]]
        if self._source is not None and len(new):
            pixels, held = self._source
            self._put(new, pixels[held[new]])

        # the place where each crop begins, and whether it is mirrored, by the sample's own numbers
        pitch = self._pitch
        begin = rows * pitch**2
        transform = self._dataset.transform
        pads = transform.crop == "pad"
        drawn = uniforms(self._dataset.seed, epoch, indices, 3 if pads else 1)
        if pads:
            top, left = ((2 * transform.pad + 1) * drawn[:, :2]).astype(np.int64).T
            begin += top * pitch + left
        mirrored = drawn[:, -1] < transform.hflip

        # windows of an image's size by the place of their first pixel: rows of bytes
        memory = self._array()
        size = self._dataset.image_size
        places = len(memory) // 3 - (size - 1) * pitch - size + 1
        windows = memory.as_strided((places, size, 3 * size), (3, 3 * pitch, 1))
        if self.on_device:
            return self._gather(windows, rows, begin, mirrored)
        # By numpy: torch's team of threads would wait for processors that the step has, for longer
        # than all the rest takes.
        cut = windows.numpy()[begin].reshape(len(rows), size, size, 3)
        flipped = np.flatnonzero(mirrored)
        plain = cut[flipped]
        turned = np.empty_like(plain)
        mirror_into(plain, turned)
        cut[flipped] = turned
        images = torch.from_numpy(cut).permute(0, 3, 1, 2)
        labels = torch.from_numpy(self._labels.numpy()[rows])
        if pin_memory:
            return images.pin_memory(), labels.pin_memory()
        return images, labels

    def _gather(
        self, windows: Tensor, rows: np.ndarray, begin: np.ndarray, mirrored: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """As ``batch``, by a few launches for all samples together."""
        places, own, turned = self._moved(np.stack([begin, rows, mirrored]))
        size = self._dataset.image_size
        images = windows.index_select(0, places).view(len(rows), size, size, 3)
        images = torch.where(turned.bool().view(-1, 1, 1, 1), images.flip(2), images)
        return images.permute(0, 3, 1, 2), self._labels.index_select(0, own)

    def _array(self) -> Tensor:
        if self._memory is None:
            size = pixel_bytes(self._dataset)
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
        # the host does not wait for the GPU
        return self._own.copy(self._own.pin(torch.from_numpy(array)))
