"""Measures only loaders: the cost of a batch, and whether its pixels are right."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from PIL import Image, ImageOps
from torch.utils.data import Dataset
from torchvision import transforms
from torchvision.transforms import v2

from harness import config as schema
from harness.cli.compose import register
from harness.config import Config
from harness.data import datasets
from harness.data.datasets import ImageDataset, Splits
from harness.data.storage import Source
from harness.data.transforms import CropTransform
from harness.feed.base import Backend, FeedSettings
from harness.feed.feeds import Feeds
from harness.monitor.tree import Tree
from harness.runtime import distributed, limits
from harness.runtime.seeding import SampleRng
from harness.training.step import device_batches
from scripts.bench.loader.data import cifar_like
from scripts.bench.loader.peers import (
    BATCH_SIZE,
    DECODE,
    PEERS,
    Counts,
    counted,
    endless,
    examples,
    full_decode,
    timm,
)

_CIFAR = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
# batches of small arrays after which their pages are mapped
_WARM = 100
# images whose pixels are compared with PIL's
_COMPARED = 256

Found = dict[str, Any]


def window(
    batches: Counts, seconds: float, workers: int = 0, *, skip: int | None = None, cycle: int = 1
) -> Found:
    """Returns the cost of batches once the loader runs.

    These are images, CPU seconds of all processes, and wall seconds.

    Args:
        batches: yields the number of images of each batch, endlessly.
        seconds: least length of the window.
        workers: of the loader. They hand over in turn, so the window is a multiple of as many
            batches, and unfinished batches are equally far at its begin and end.
        skip: batches before the window, in which workers start and buffers fill.
        cycle: the window is a multiple of this many batches, if more than the workers.
    """
    if skip is None:
        skip = 2 * workers + 2
    cycle = max(cycle, workers)
    tree = Tree()
    for _ in islice(batches, skip):
        pass
    cpu_s = _processor_s(tree)
    begin = time.perf_counter()
    images = 0
    for taken, size in enumerate(batches, 1):
        images += size
        wall_s = time.perf_counter() - begin
        if wall_s >= seconds and taken % cycle == 0:
            return {"images": images, "cpu_s": _processor_s(tree) - cpu_s, "wall_s": wall_s}
    raise AssertionError("the batches ended; an endless loader is needed")


def _processor_s(tree: Tree) -> float:
    used = tree.processor()
    assert used is not None, "processes end faster than they can be read"
    return used[0]


def composed(*overrides: str) -> Config:
    """Returns the settings of ``train.py`` with these command-line arguments."""
    register()
    for name in ("wellfed.run_dir", "wellfed.sweep_dir"):
        OmegaConf.register_new_resolver(name, lambda *_: "", replace=True)
    # Hydra has one per process
    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().hydra = None
    try:
        with initialize_config_dir(str(schema.CONF), version_base="1.3"):
            return schema.load(
                compose(
                    "config",
                    overrides=["device=cpu", f"loader.batch_size={BATCH_SIZE}", *overrides],
                )
            )
    finally:
        # the block above leaves another instance behind
        GlobalHydra.instance().hydra = before


@contextmanager
def feeds(*overrides: str, splits: Splits | None = None) -> Iterator[tuple[Feeds, FeedSettings]]:
    """Yields feeds as ``train.py`` builds them, and the training feed's settings."""
    config = composed(*overrides)
    with distributed.joined(0, config) as world:
        made = Feeds(
            splits or datasets.load(config.data, config.augment, config.seed), config, world
        )
        yield made, made.settings(limits.measure())


@contextmanager
def probed(
    made_by: AbstractContextManager[tuple[Feeds, FeedSettings]],
) -> Iterator[tuple[Feeds, Backend]]:
    """Yields feeds, and an endless one of these with their own settings."""
    with made_by as (made, settings), closing(made.probe(settings)) as feed:
        yield made, feed


def of_files(root: str, side: int = 224) -> list[str]:
    """Returns the settings for the generated files."""
    return ["data=imagefolder", f"data.root={root}", f"data.image_size={side}"]


def of_form(form: str, workers: int) -> list[str]:
    """Returns the settings for a backend and its workers."""
    found = [f"loader.backend={form}", f"loader.num_workers={workers}"]
    return found[:1] if form == "arrays" else found


def counts(feed: Backend) -> Counts:
    """Yields the number of images of each batch of one pass."""
    return (len(batch.labels) for batch in feed)


def peer(row: str, root: str, workers: int, seconds: float) -> Found:
    """Returns the window of another project's loader, or of only decoding."""
    batches = (
        full_decode(Path(root), workers) if row == DECODE else PEERS[row].make(Path(root), workers)
    )
    return window(batches, seconds, workers)


def recipe(root: str, workers: int, seconds: float, side: int) -> Found:
    """Returns the window of pytorch/examples' loader with crops of ``side`` pixels."""
    return window(counted(examples(Path(root), workers, side)), seconds, workers)


def form(form: str, root: str, workers: int, seconds: float, side: int = 224) -> Found:
    """Returns the window of a wellfed backend on the JPEG files."""
    with probed(feeds(*of_files(root, side), *of_form(form, workers))) as (_, feed):
        return window(counts(feed), seconds, workers)


def filtered(
    root: str, workers: int, seconds: float, interpolation: str, trains: bool, own: bool
) -> Found:
    """Returns the window of wellfed's threads or timm's loader with one filter."""
    if not own:
        return window(timm(Path(root), workers, interpolation, trains), seconds, workers)
    wanted = [*of_files(root), *of_form("threads", workers), f"data.interpolation={interpolation}"]
    # evaluation transforms, on the same images
    wanted += [] if trains else ["augment=center"]
    with probed(feeds(*wanted)) as (_, feed):
        return window(counts(feed), seconds, workers)


def passes(form: str, root: str, workers: int, seconds: float, cache: str) -> Found:
    """Returns the windows of the second pass and of later ones, and a digest of the pixels.

    The first pass fills the cache.
    """
    wanted = [
        *of_files(root),
        *of_form(form, workers),
        f"data.cache={cache}",
        "loader.drop_last=false",
    ]
    with feeds(*wanted) as (made, settings), closing(made.train(settings)) as feed:
        with closing(_passes(feed)) as batches:
            second = window(batches, 0.0, skip=len(feed), cycle=len(feed))
            later = window(batches, seconds, skip=0, cycle=len(feed))
        # all pixels of the second pass, and their order
        digest = hashlib.blake2b()
        feed.set_epoch(1)
        for batch in feed:
            digest.update(batch.images.numpy().tobytes() + batch.indices.numpy().tobytes())
        return second | {"later": later, "digest": digest.hexdigest()}


def _passes(feed: Backend) -> Generator[int]:
    """Yields the number of images of each batch, pass after pass."""
    for epoch in count():
        feed.set_epoch(epoch)
        yield from counts(feed)


def pixels(root: str) -> Found:
    """Returns the mean absolute difference from PIL's crops and resizes, in gray levels."""
    with feeds(*of_files(root), *of_form("processes", 0)) as (made, _):
        dataset = made.splits.train
        assert isinstance(dataset, ImageDataset)
        transform = dataset.transform
        assert isinstance(transform, CropTransform)
        out = np.empty((3, 224, 224), np.uint8)
        errors = []
        for index in range(0, len(dataset), max(1, len(dataset) // _COMPARED)):
            dataset.fill(0, index, out)
            rng = SampleRng(dataset.seed, 0, index)
            picture = Image.open(dataset.source.where(index)).convert("RGB")
            left, top, width, height = transform.part(rng, *picture.size)
            picture = picture.crop((left, top, left + width, top + height)).resize(
                (224, 224), Image.Resampling.BILINEAR
            )
            if rng.random() < transform.hflip:
                picture = ImageOps.mirror(picture)
            errors.append(np.abs(np.asarray(picture, np.int16).transpose(2, 0, 1) - out).mean())
    return {
        "error": float(np.mean(errors)),
        "largest": float(np.max(errors)),
        "images": len(errors),
    }


class _Items(Dataset[tuple[Any, int]]):
    """Arrays one by one: PIL images as in torchvision's CIFAR10, or uint8 tensors for v2."""

    def __init__(self, source: Source, transform: Callable[[Any], Any], pictures: bool) -> None:
        self.source = source
        self.transform = transform
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        values, label = self.source.read(index)
        image = np.asarray(values)
        return self.transform(
            Image.fromarray(image) if self.pictures else v2.functional.to_image(image)
        ), label


def per_item(folder: str, workers: int, seconds: float, pictures: bool) -> Found:
    """Returns the window of the usual recipe for small arrays, image by image."""
    if pictures:
        crop = [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
        ]
    else:
        crop = [
            v2.RandomCrop(32, padding=4),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    whole = transforms.Compose([*crop, transforms.Normalize(*_CIFAR)])
    loader = endless(_Items(cifar_like(Path(folder)).source, whole, pictures), workers)
    return window(counted(loader), seconds, workers)


@contextmanager
def array_feeds(folder: str, form: str, workers: int = 0) -> Iterator[tuple[Feeds, FeedSettings]]:
    """Feeds over the small arrays with CIFAR-10's settings."""
    dataset = cifar_like(Path(folder))
    splits = Splits(dataset, dataset, dataset.source.classes, "cifar-like", "")
    with feeds("data=cifar10", *of_form(form, workers), splits=splits) as made:
        yield made


def arrays(folder: str, form: str, workers: int, seconds: float, normalized: bool = False) -> Found:
    """Returns the window of a wellfed backend on the small arrays.

    ``normalized``: up to the floats that are a step's input.
    """
    with probed(array_feeds(folder, form, workers)) as (made, feed):
        batches = counts(feed)
        if normalized:
            batches = (
                len(labels) for _, labels in device_batches(feed, made.config, made.world.device)
            )
        return window(batches, seconds, workers, skip=_WARM)


def equal(folder: str, form: str) -> Found:
    """Returns the number of images of an epoch that equal PIL's, bit for bit."""
    same = seen = 0
    with array_feeds(folder, form) as (made, settings), closing(made.train(settings)) as feed:
        dataset = made.splits.train
        assert isinstance(dataset, ImageDataset)
        feed.set_epoch(1)
        for batch in feed:
            for index, image in zip(batch.indices.tolist(), batch.images.numpy(), strict=True):
                seen += 1
                same += np.array_equal(_by_pil(dataset, 1, index), image.transpose(1, 2, 0))
    return {"images": seen, "same": same}


def _by_pil(dataset: ImageDataset, epoch: int, index: int) -> np.ndarray:
    """Returns sample ``index`` padded by 4 pixels, cropped and mirrored at random by PIL."""
    rng = SampleRng(dataset.seed, epoch, index)
    values = np.asarray(dataset.source.read(index)[0])
    top = rng.randrange(9)
    left = rng.randrange(9)
    mirrored = rng.random() < 0.5
    picture = ImageOps.expand(Image.fromarray(values), 4).crop((left, top, left + 32, top + 32))
    return np.asarray(ImageOps.mirror(picture) if mirrored else picture)
