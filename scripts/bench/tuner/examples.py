"""Runs training like pytorch/examples' imagenet/main.py, for ``run.py``.

It has the same transforms, two loaders and order. The step sleeps, or is ResNet-18's. With
``--loadtune``, that package's ``tune()`` first chooses loader settings in the same process.

    uv run python -m scripts.bench.tuner.examples FOLDER --side 64 --epochs 3 --workers 2
"""

from __future__ import annotations

import argparse
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18

from scripts.bench.tuner.slept import READ, STEP, sleep

_BATCH = 64
_NORMALIZE = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def read(path: str) -> Image.Image:
    """Returns the image after a simulated wait for its file."""
    sleep(READ)
    with open(path, "rb") as file:
        return Image.open(file).convert("RGB")


def folder(root: Path, split: str, side: int) -> ImageFolder:
    """Returns the images of one split."""
    how: list[Any] = [transforms.Resize(side * 256 // 224), transforms.CenterCrop(side)]
    if split == "train":
        crop = transforms.RandomResizedCrop(side, scale=(0.5, 1.0))
        how = [crop, transforms.RandomHorizontalFlip()]
    return ImageFolder(
        str(root / split),
        transforms.Compose([*how, transforms.ToTensor(), _NORMALIZE]),
        loader=read,
    )


def model() -> nn.Module:
    """Returns the step's network: ResNet-18, or one weight if the step sleeps."""
    return nn.Linear(1, 1) if STEP in os.environ else resnet18(num_classes=10)


def optimizer(network: nn.Module) -> torch.optim.Optimizer:
    """Returns the example's optimizer."""
    return torch.optim.SGD(network.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)


def step(
    network: nn.Module, optim: torch.optim.Optimizer, batch: list[Tensor], _device: Any = None
) -> Tensor:
    """Runs one training step."""
    images, labels = batch
    if STEP in os.environ:
        sleep(STEP)
        return torch.ones((), requires_grad=True)
    loss = nn.functional.cross_entropy(network(images), labels)
    optim.zero_grad()
    loss.backward()
    optim.step()
    return loss


def chosen(root: Path, side: int) -> dict[str, Any]:
    """Returns the settings chosen by loadtune."""
    loadtune = import_module("loadtune")
    workload = loadtune.Workload(
        name="run",
        make_dataset=lambda: folder(root, "train", side),
        make_model=model,
        make_optimizer=optimizer,
        train_step=step,
        default_batch_size=_BATCH,
    )
    result = loadtune.tune(workload, fast=True)
    knobs = result.best.knobs if result.best else loadtune.Knobs()
    if knobs.num_threads:
        torch.set_num_threads(knobs.num_threads)
    found = {"num_workers": knobs.num_workers, "pin_memory": knobs.pin_memory}
    if knobs.num_workers:
        found |= {
            "prefetch_factor": knobs.prefetch_factor,
            "persistent_workers": knobs.persistent_workers,
        }
    return found


def main() -> None:
    """Trains, evaluates and prints the loader settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", type=Path)
    parser.add_argument("--side", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--loadtune", action="store_true")
    args = parser.parse_args()
    how: dict[str, Any] = {"num_workers": args.workers, "pin_memory": True}
    if args.loadtune:
        how = chosen(args.root, args.side)
    train = DataLoader(folder(args.root, "train", args.side), _BATCH, shuffle=True, **how)
    val = DataLoader(folder(args.root, "val", args.side), _BATCH, shuffle=False, **how)
    network = model()
    optim = optimizer(network)
    for _ in range(args.epochs):
        network.train()
        for batch in train:
            step(network, optim, batch)
        network.eval()
        for images, _ in val:
            if STEP not in os.environ:
                with torch.no_grad():
                    network(images)
    print(json.dumps(how))


if __name__ == "__main__":
    main()
