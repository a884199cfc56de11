"""ResNet-50 fed by the loaders of other projects: one run, in a process that has the cores that it is to have.

    uv run scripts/gpu_peers.py pytorch/examples FOLDER WORKERS --steps 60

prints its images/s as JSON. A loader is set up as its own project shows it. Its batches go to the device through this project's
prefetcher, so that what is compared is how they are made, and uint8 ones are normalised there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from importlib import import_module, util
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from harness.config import Config, ModelConfig, Precision, TrainerConfig
from harness.feed.prefetcher import DataPrefetcher
from harness.runtime import seeding
from harness.runtime.device import synchronize
from harness.runtime.distributed import World
from harness.training.state import make_state
from harness.training.step import DTYPES, Step
from scripts.loader_peers import EXAMPLES, PEERS, dali, endless, examples, spdl

BATCH_SIZE = 256
NVJPEG = "nvJPEG"
_WARM, _READ_STEPS = 10, 10  # steps that do not count; steps between two readings of the loss, as in training

Batch = tuple[Tensor, Tensor]
Make = Callable[[Path, int, int, torch.device], Iterator[Batch]]  # tree of files, workers, batch size, device


def _examples(root: Path, workers: int, size: int, device: torch.device) -> Iterator[Batch]:
    return iter(examples(root, workers, size=size, pin_memory=device.type == "cuda"))


def _dali(root: Path, workers: int, size: int, device: torch.device) -> Iterator[Batch]:
    return (_labelled(torch.from_numpy(np.array(images))) for images in dali(root, workers, size))


def _spdl(root: Path, workers: int, size: int, device: torch.device) -> Iterator[Batch]:
    return map(_labelled, spdl(root, workers, size))


def _labelled(images: Tensor) -> Batch:
    """Channels first, and labels in place of those that cost no loader anything."""
    return images.permute(0, 3, 1, 2), torch.zeros(len(images), dtype=torch.int64)


def _nvjpeg(root: Path, workers: int, size: int, device: torch.device) -> Iterator[Batch]:
    """Files are read by workers; a batch is decoded at once on the device, then cropped, resized and flipped there."""
    decode, crop = decoder()[1], v2.RandomResizedCrop(224, antialias=True)
    files = ImageFolder(str(root / "train"), loader=_read)  # arrays: a worker would hand over each tensor in a file of its own
    for samples in endless(files, workers, list, size):
        images = torch.stack([crop(image) for image in decode([torch.from_numpy(data) for data, _ in samples], device)])
        flipped = (torch.rand(len(images), 1, 1, 1) < 0.5).to(device)
        yield torch.where(flipped, functional.horizontal_flip(images), images), torch.tensor([label for _, label in samples])


def _read(path: str) -> Any:
    return np.fromfile(path, np.uint8)


def decoder() -> tuple[str, Callable[[list[Tensor], torch.device], list[Tensor]]]:
    """What decodes lists of JPEGs on a device: TorchCodec, or torchvision where that is missing; its name before it."""
    if util.find_spec("torchcodec"):
        torchcodec: Any = import_module("torchcodec.decoders")
        if hasattr(torchcodec, "decode_jpeg"):  # releases before images were taken over from torchvision have none
            return "TorchCodec", lambda files, device: torchcodec.decode_jpeg(files, mode="RGB", device=device)
    from torchvision.io import ImageReadMode, decode_jpeg

    return "torchvision", lambda files, device: decode_jpeg(files, ImageReadMode.RGB, device=device)


LOADERS: dict[str, Make] = {EXAMPLES: _examples, NVJPEG: _nvjpeg, "DALI": _dali, "SPDL": _spdl}


def available() -> list[str]:
    """The loaders that can be imported here."""
    return [name for name in LOADERS if name not in PEERS or PEERS[name].missing() is None]


def images_per_s(
    batches: Iterable[Batch],
    config: Config,
    device: torch.device,
    steps: int,
    now: Callable[[], float] = time.perf_counter,
) -> float:
    """Of ``steps`` steps of the network of ``config`` on ``batches``, once it and the loader run."""
    world = World(0, 1, 0, 1, device)
    step, images, begin = Step(make_state(config, 1000, world, 1000), config, world), 0, 0.0
    step.model.train()
    for done, (pixels, labels) in enumerate(islice(batches, _WARM + steps), 1):
        step(pixels, labels)
        if done % _READ_STEPS == 0:
            step.read()
        if done > _WARM:
            images += len(labels)
        if done == _WARM:
            synchronize(device)
            begin = now()
    synchronize(device)
    return images / (now() - begin)


def on_device(name: str, root: Path, workers: int, device: torch.device, config: Config, size: int) -> DataPrefetcher:
    """What the loader ``name`` makes of the files under ``root``, normalised, as ``config`` wants it."""
    data, normalised = config.data, name == EXAMPLES
    return DataPrefetcher(
        LOADERS[name](root, workers, size, device),
        device,
        mean=None if normalised else data.mean,
        std=None if normalised else data.std,
        dtype=DTYPES[config.trainer.precision],
        channels_last=config.trainer.channels_last,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train ResNet-50 on a GPU, fed by another project's loader.")
    parser.add_argument("loader", choices=LOADERS)
    parser.add_argument("root", type=Path, help="folder whose train/CLASS/*.jpg are the images")
    parser.add_argument("workers", type=int, help="worker processes or threads of the loader")
    parser.add_argument("--steps", type=int, default=60, help="steps that count")
    a = parser.parse_args(argv)
    trainer = TrainerConfig(precision=Precision.bf16, channels_last=True)
    config, device = Config(model=ModelConfig(name="resnet50"), trainer=trainer), torch.device("cuda", 0)
    seeding.seed_everything(config.seed)  # as train.py does it: cuDNN tries its kernels
    with closing(on_device(a.loader, a.root, a.workers, device, config, BATCH_SIZE)) as batches:
        rate = images_per_s(batches, config, device, a.steps)
    print(json.dumps({"images_per_s": rate, "decoder": decoder()[0] if a.loader == NVJPEG else None}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
