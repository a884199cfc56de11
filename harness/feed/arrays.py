"""Backends without workers: ``arrays``, of images that all lie in memory, and noise."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import closing, suppress
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from harness.data.datasets import ImageDataset
from harness.data.storage import ArraySource, Subset
from harness.data.transforms import mirror_into
from harness.feed.interface import ARRAYS, Backend, Failure, FeedSettings, HostBatch
from harness.feed.order import AnyOrder, Order
from harness.feed.threads import ThreadFeed
from harness.runtime import accelerator
from harness.runtime.folder import log
from harness.runtime.seeding import uniforms
from harness.watch.stages import START, StageMeter, StageTimer

# the stage of cropping and mirroring a batch
_GATHER = "gather"


def has_fixed_size(dataset: object) -> TypeGuard[ImageDataset]:
    """Returns whether these are images of one size each before crop and mirror."""
    return isinstance(dataset, ImageDataset) and dataset.transform.crop in ("pad", "center")


def stored(dataset: object) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns an array that holds the images of ``dataset``, and its rows; None: they are files."""
    if not has_fixed_size(dataset):
        return None
    source = dataset.source
    rows = np.arange(len(source))
    while isinstance(source, Subset):
        rows = source.indices[rows]
        source = source.source
    return (source.images, rows) if isinstance(source, ArraySource) else None


def pixel_bytes(dataset: ImageDataset) -> int:
    """Returns the bytes of the array of ``InMemoryImages``.

    Before each row lie ``pad`` zeros, before each image as many rows of zeros, at the end both.
    The zeros behind a row or an image are those before the next.
    """
    pad = _padding(dataset)
    pitch = dataset.image_size + pad
    return 3 * ((len(dataset) * pitch + pad) * pitch + pad)


def _padding(dataset: ImageDataset) -> int:
    """Returns the width of the zeros around an image, which only a pad crop has."""
    transform = dataset.transform
    return transform.pad if transform.crop == "pad" else 0


class InMemoryImages:
    """The images of a data set in one array as they are before crop and mirror.

    A crop is a window into the array. The constructor reads all images.

    Args:
        dataset: gives the images; ``has_fixed_size`` is true of it.
        settings: of the ``threads`` backend that reads the images.
        device: holds the images if it is a GPU with twice the memory free; else the host does.

    Attributes:
        on_device: whether the images lie in the device's memory.
        replaced: samples that could not be read, with others in their places.

    Raises:
        BadSample: an image cannot be read.
        LoaderError: an image was not read within ``settings.timeout_s``.
        MemoryError: the host has too little memory.
    """

    def __init__(
        self, dataset: ImageDataset, settings: FeedSettings, device: torch.device | None = None
    ) -> None:
        self._dataset = dataset
        self._own = accelerator.of(device or "cpu")
        pad = _padding(dataset)
        # pixels from one row to the next, and rows from one image to the next
        self._pitch = pitch = dataset.image_size + pad
        # NumPy's zeros raise MemoryError, torch's do not
        memory = np.zeros(pixel_bytes(dataset), np.uint8)
        labels = np.array(dataset.source.labels, np.int64)
        self.replaced: dict[int, Failure] = {}
        whole = memory[: 3 * len(dataset) * pitch**2].reshape(-1, pitch, pitch, 3)
        inner = whole[:, pad:, pad:]
        # a pad crop resizes only what has another size
        resizes = dataset.transform.crop == "center" and dataset.transform.resize
        held = stored(dataset)
        if held and not resizes and held[0].shape[1:] == inner.shape[1:]:
            for place, row in enumerate(held[1]):
                inner[place] = held[0][row]
        else:
            self._read(settings, inner, labels)
        self._memory = torch.from_numpy(memory)
        self._labels = torch.from_numpy(labels)
        self.on_device = False
        if room := self._own.memory():
            # Half of it: the network wants some too. Memory that torch has reserved and not
            # allocated does not count: the network's next step takes it.
            if 2 * len(memory) <= room.free:
                # another process may be quicker
                with suppress(torch.OutOfMemoryError):
                    self._memory = self._own.copy(self._memory)
                    self._labels = self._own.copy(self._labels)
                    self.on_device = True
            if not self.on_device:
                log.info(
                    "arrays lie on the host: %.1f GB are more than half of the device's free "
                    "%.1f GB",
                    len(memory) / 1e9,
                    room.free / 1e9,
                )

    def _read(self, settings: FeedSettings, images: np.ndarray, labels: np.ndarray) -> None:
        """Writes all images and their labels."""
        # without the margin and the mirroring that the transform draws for each epoch
        plain = copy.copy(self._dataset)
        plain.transform = dataclasses.replace(plain.transform, pad=0, hflip=0.0)
        order = Order(len(plain), settings.batch_size, shuffle=False)
        with closing(ThreadFeed(plain, order, settings)) as feed:
            for batch in feed:
                places = batch.indices.numpy()
                images[places] = batch.images.permute(0, 2, 3, 1).numpy()
                labels[places] = batch.labels.numpy()
                self.replaced |= {failure.sample: failure for failure in batch.failures}

    def batch(self, epoch: int, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns the images and labels of an order's ``indices`` in ``epoch``.

        Images are uint8 ``[N, 3, S, S]`` in channels_last memory, labels int64 ``[N]``.
        """
        # the place where each crop begins, and whether it is mirrored, by the sample's own numbers
        rows = indices % len(self._labels)
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
        size = self._dataset.image_size
        places = len(self._memory) // 3 - (size - 1) * pitch - size + 1
        windows = self._memory.as_strided((places, size, 3 * size), (3, 3 * pitch, 1))
        shape = len(rows), size, size, 3
        if self.on_device:
            # a few launches for all samples together, for which the host does not wait
            where = torch.from_numpy(np.stack([begin, rows, mirrored]))
            first, own, turned = self._own.copy(self._own.pin(where))
            images = windows.index_select(0, first).view(shape)
            images = torch.where(turned.bool().view(-1, 1, 1, 1), images.flip(2), images)
            return images.permute(0, 3, 1, 2), self._labels.index_select(0, own)
        # By NumPy: torch's team of threads would wait for processors that the step has, for longer
        # than all the rest takes.
        cut = windows.numpy()[begin].reshape(shape)
        plain = cut[mirrored]
        turned_here = np.empty_like(plain)
        mirror_into(plain, turned_here)
        cut[mirrored] = turned_here
        images = torch.from_numpy(cut).permute(0, 3, 1, 2)
        return images, torch.from_numpy(self._labels.numpy()[rows])


class ArrayFeed(Backend):
    """Batches of ``dataset`` in the order of ``order``, bitwise as by ``processes``.

    With ``InMemoryImages`` on a GPU the batches are there too, and nothing is copied.

    Args:
        dataset: its images have one size before crop and mirror.
        order: which samples make which batch.
        settings: of a feed without workers.
        pixels: the data set's, to be shared with other feeds; None: this feed's own, on the host.

    Raises:
        As ``InMemoryImages``, where ``pixels`` is None.
    """

    name = ARRAYS
    shares_interpreter = True

    def __init__(
        self,
        dataset: ImageDataset,
        order: AnyOrder,
        settings: FeedSettings,
        pixels: InMemoryImages | None = None,
    ) -> None:
        super().__init__(order, settings)
        self.pixels = pixels or InMemoryImages(dataset, settings)
        self.made_on_device = self.pixels.on_device
        self._length = len(dataset)
        self.meter: StageMeter = StageMeter((_GATHER,), 1, shared=False)
        self._timer = StageTimer(self.meter, 0)

    def take(self, poll_s: float) -> HostBatch:
        """As in ``Backend``."""
        epoch, indices = next(self._coming)
        count = len(indices)
        # a batch is timed like a single sample: it has one stage
        timed = self._timer.begin(1)
        self._timer.fill()
        if timed:
            self._timer.lap(START)
        gather = self.pixels.batch
        if self.times_samples:
            gather = self.meter.timed(0, gather, count)
        images, labels = gather(epoch, indices)
        if self.settings.pin_memory and not self.made_on_device:
            images = images.pin_memory()
            labels = labels.pin_memory()
        if timed:
            self._timer.lap(_GATHER)
        failures: tuple[Failure, ...] = ()
        if replaced := self.pixels.replaced:
            places = (indices % self._length).tolist()
            failures = tuple(replaced[i] for i in places if i in replaced)
        stamps = self._timer.end(count)
        return HostBatch(images, labels, torch.from_numpy(indices), failures, epoch, stamps)


class SyntheticFeed(Backend):
    """The same uint8 noise ``[N, 3, S, S]`` and random labels for every batch, on ``device``.

    The last batch of an epoch is as short as ``order`` makes it.
    """

    name = "synthetic"
    shares_interpreter = True
    made_on_device = True

    def __init__(
        self,
        order: AnyOrder,
        settings: FeedSettings,
        image_size: int,
        classes: int,
        device: torch.device,
    ) -> None:
        super().__init__(order, settings)
        batch = noise(settings.batch_size, image_size, classes)
        self._images = batch.images.to(device)
        self._labels = batch.labels.to(device)

    def take(self, poll_s: float) -> HostBatch:
        """As in ``Backend``."""
        epoch, indices = next(self._coming)
        n = len(indices)
        return HostBatch(self._images[:n], self._labels[:n], torch.from_numpy(indices), epoch=epoch)


def noise(count: int, image_size: int, classes: int) -> HostBatch:
    """Returns ``count`` random images and labels, the same each time.

    The images are uint8 ``[count, 3, image_size, image_size]``.
    """
    generator = torch.Generator().manual_seed(0)
    size = (count, 3, image_size, image_size)
    images = torch.randint(256, size, dtype=torch.uint8, generator=generator)
    labels = torch.randint(classes, size[:1], generator=generator)
    return HostBatch(images, labels, torch.arange(count))
