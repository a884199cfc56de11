"""Sets up the loaders of other projects, each as documented by its project.

All yield endless batches of 128 crops of 224 pixels, shuffled, from the same files. Optional
features that the others lack (timm's color jitter, normalizing on the device) are off.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

BATCH_SIZE = 128
_SIDE = 224
# every recipe's
_SCALE = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)
# samples
_ENDLESS = 10**9

# the number of images of each batch
Counts = Iterator[int]


@dataclass(frozen=True, slots=True)
class Peer:
    """A loader of another project.

    Attributes:
        about: short description, for the table.
        make: makes its batches from the tree of files and the number of workers or threads.
        package: its distribution.
        module: the module to import; empty if this project's environment includes it.
    """

    about: str
    make: Callable[[Path, int], Counts]
    package: str
    module: str = ""

    def missing(self) -> str | None:
        """Returns why it cannot be measured here, or None."""
        if not self.module or _found(self.module):
            return None
        return f"no module {self.module}: add --with {self.package}"

    def version(self) -> str:
        """Returns its distribution's version; notes if the module is from another one."""
        try:
            return f"{self.package} {metadata.version(self.package)}"
        except metadata.PackageNotFoundError:
            return f"{self.module} from a distribution other than {self.package}"


def _found(module: str) -> bool:
    try:
        return util.find_spec(module) is not None
    except ModuleNotFoundError:
        # its parent package is missing
        return False


def endless(
    dataset: Dataset[Any],
    workers: int,
    collate: Callable[[Any], Any] | None = None,
    size: int = BATCH_SIZE,
    **how: Any,
) -> DataLoader[Any]:
    """Returns torch's loader over ``dataset`` without restarts between passes."""
    sampler = RandomSampler(dataset, num_samples=_ENDLESS)  # type: ignore[arg-type]
    return DataLoader(
        dataset, size, sampler=sampler, num_workers=workers, collate_fn=collate, **how
    )


def counted(loader: DataLoader[Any]) -> Counts:
    """Yields the size of each batch, from its labels."""
    return (len(labels) for _, labels in loader)


def examples(root: Path, workers: int, side: int = _SIDE, **how: Any) -> DataLoader[Any]:
    """Returns pytorch/examples' loader: PIL, floats normalized one by one, torch's collate."""
    return endless(ImageFolder(str(root / "train"), transforms.Compose([
        transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip(),
        transforms.ToTensor(), transforms.Normalize(_MEAN, _STD),
    ])), workers, **how)  # fmt: skip


def apex(root: Path, workers: int) -> Counts:
    """Returns Apex' examples/imagenet: PIL, no tensors, pixels collated as uint8."""
    crop = transforms.Compose(
        [transforms.RandomResizedCrop(_SIDE), transforms.RandomHorizontalFlip()]
    )
    return counted(endless(ImageFolder(str(root / "train"), crop), workers, _fast_collate))


def _fast_collate(samples: Sequence[tuple[Image.Image, int]]) -> tuple[Tensor, Tensor]:
    """Adds each picture's pixels to its row of a batch of zeros, as Apex does."""
    width, height = samples[0][0].size
    images = torch.zeros((len(samples), 3, height, width), dtype=torch.uint8)
    for row, (picture, _) in zip(images, samples, strict=True):
        row += torch.from_numpy(np.rollaxis(np.array(picture), 2))
    return images, torch.tensor([label for _, label in samples])


def timm(root: Path, workers: int, interpolation: str = "bilinear", trains: bool = True) -> Counts:
    """Returns timm's ImageNet loader without color jitter, up to the uint8 batch.

    It ``trains``, or evaluates with a crop fraction of 224 / 256.
    """
    data = import_module("timm.data")
    loader = data.create_loader(
        data.create_dataset("", root=str(root), split="train", is_training=trains),
        (3, _SIDE, _SIDE), BATCH_SIZE,
        is_training=trains, scale=_SCALE, ratio=_RATIO, color_jitter=0.0, crop_pct=_SIDE / 256,
        interpolation=interpolation, num_workers=workers, device=torch.device("cpu"),
        use_multi_epochs_loader=True,
    )  # fmt: skip
    return itertools.chain.from_iterable(counted(loader.loader) for _ in itertools.count())


def torchvision(root: Path, workers: int) -> Counts:
    """Torchvision's own decoder, v2 transforms on uint8 tensors, torch's collate."""
    from torchvision.io import ImageReadMode, decode_jpeg, read_file

    return _v2(root, workers, lambda path: decode_jpeg(read_file(path), ImageReadMode.RGB))


def torchcodec(root: Path, workers: int) -> Counts:
    """The same with TorchCodec, torchvision's successor for decoding."""
    return _v2(root, workers, import_module("torchcodec.decoders").decode_image)


def _v2(root: Path, workers: int, decode: Callable[[str], Any]) -> Counts:
    crop = v2.Compose([v2.RandomResizedCrop(_SIDE, antialias=True), v2.RandomHorizontalFlip()])
    return counted(endless(ImageFolder(str(root / "train"), crop, loader=decode), workers))


def dali(root: Path, threads: int, size: int = BATCH_SIZE) -> Iterator[Any]:
    """Yields DALI's batches: a fused crop, a triangular filter, flips, on the CPU.

    These are tensors ``[N, H, W, C]`` whose memory DALI reuses for the next batch.
    """
    of_dali = import_module("nvidia.dali")
    fn = import_module("nvidia.dali.fn")

    def graph() -> Any:
        files, labels = fn.readers.file(file_root=str(root / "train"), random_shuffle=True)
        images = fn.decoders.image_random_crop(
            files,
            device="cpu",
            output_type=of_dali.types.RGB,
            random_area=_SCALE,
            random_aspect_ratio=_RATIO,
            num_attempts=10,
        )
        images = fn.resize(
            images, size=(_SIDE, _SIDE), interp_type=of_dali.types.INTERP_LINEAR, antialias=True
        )
        return fn.flip(images, horizontal=fn.random.coin_flip()), labels

    running = of_dali.pipeline_def(graph, batch_size=size, num_threads=threads, device_id=None)()
    running.build()
    while True:
        images, _ = running.run()
        yield images.as_tensor()


def spdl(root: Path, threads: int, size: int = BATCH_SIZE) -> Generator[Tensor]:
    """SPDL's threads, with simplejpeg and torchvision v2 as its stages; uint8 ``[N, H, W, C]``."""
    # only its own threads run in parallel
    torch.set_num_threads(1)
    files = [path for path, _ in ImageFolder(str(root / "train")).samples]
    crop = v2.Compose([v2.RandomResizedCrop(_SIDE, antialias=True), v2.RandomHorizontalFlip()])

    def shuffled() -> Iterator[str]:
        while True:
            yield from random.sample(files, len(files))

    def load(path: str) -> Tensor:
        pixels = simplejpeg.decode_jpeg(Path(path).read_bytes())
        image: Tensor = crop(torch.from_numpy(pixels).permute(2, 0, 1))
        # in memory order, so that stacking only copies
        return image.permute(1, 2, 0)

    builder = (
        import_module("spdl.pipeline")
        .PipelineBuilder()
        .add_source(shuffled())
        .pipe(load, concurrency=threads)
        .aggregate(size)
    )
    pipeline = builder.pipe(torch.stack).add_sink(2).build(num_threads=threads)
    with pipeline.auto_stop():
        yield from pipeline.get_iterator()


def ffcv(root: Path, threads: int) -> Counts:
    """Returns FFCV's JPEG mode: its own file, its fused decode and area crop."""
    fields = import_module("ffcv.fields")
    decoders = import_module("ffcv.fields.decoders")
    loaders = import_module("ffcv.loader")
    made = import_module("ffcv.transforms")
    file = root.with_suffix(".beton")
    if not file.exists():
        part = file.with_suffix(".part")
        columns = {
            "image": fields.RGBImageField(write_mode="jpg", jpeg_quality=94),
            "label": fields.IntField(),
        }
        writer = import_module("ffcv.writer").DatasetWriter(str(part), columns, num_workers=threads)
        writer.from_indexed_dataset(ImageFolder(str(root / "train")))
        part.rename(file)
    crop = decoders.RandomResizedCropRGBImageDecoder((_SIDE, _SIDE), _SCALE, _RATIO)
    loader = loaders.Loader(
        str(file), BATCH_SIZE, threads, os_cache=True, order=loaders.OrderOption.RANDOM,
        drop_last=True, pipelines={
            "image": [crop, made.RandomHorizontalFlip(), made.ToTensor()],
            "label": [decoders.IntDecoder(), made.ToTensor()],
        },
    )  # fmt: skip
    for _ in itertools.count():
        yield from (len(labels) for _, labels in loader)


def full_decode(root: Path, threads: int) -> Counts:
    """Not a loader: decodes the same files whole, from memory into a reused buffer.

    This is a lower bound for every feed.
    """
    files = [path.read_bytes() for path in sorted((root / "train").rglob("*.jpg"))]

    def batch(number: int) -> int:
        buffer = bytearray(3 << 20)
        for index in range(BATCH_SIZE * number, BATCH_SIZE * (number + 1)):
            simplejpeg.decode_jpeg(files[index % len(files)], buffer=buffer)
        return BATCH_SIZE

    with ThreadPoolExecutor(threads) as pool:
        numbers = itertools.count()
        running: deque[Future[int]] = deque(
            pool.submit(batch, next(numbers)) for _ in range(2 * threads)
        )
        try:
            while True:
                yield running.popleft().result()
                running.append(pool.submit(batch, next(numbers)))
        finally:
            pool.shutdown(cancel_futures=True)


DECODE = "full decode"
EXAMPLES = "pytorch/examples"
PEERS = {
    EXAMPLES: Peer(
        "PIL, float, default collate", lambda root, n: counted(examples(root, n)), "torchvision"
    ),
    "Apex": Peer("PIL, uint8 collate", apex, "torchvision"),
    "timm": Peer("PIL, uint8 collate, no jitter", timm, "timm", "timm"),
    "torchvision v2": Peer("decode_jpeg, v2 on uint8", torchvision, "torchvision"),
    "TorchCodec + v2": Peer("decode_image, v2 on uint8", torchcodec, "torchcodec", "torchcodec"),
    "DALI": Peer(
        "on the CPU, fused random crop",
        lambda root, n: (images.shape()[0] for images in dali(root, n)),
        "nvidia-dali-cuda120",
        "nvidia.dali",
    ),
    "SPDL": Peer(
        "simplejpeg, v2 on uint8, torch.stack",
        lambda root, n: map(len, spdl(root, n)),
        "spdl",
        "spdl.pipeline",
    ),
    "FFCV": Peer("JPEG mode, its own file", ffcv, "ffcv", "ffcv"),
}
