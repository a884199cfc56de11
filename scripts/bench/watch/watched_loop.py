"""A usual PyTorch training script with a planted bottleneck.

It does not use this project. ``watched.py`` runs it under ``wellfed watch``, and under TraceML with
``--traceml``, which adds the two lines from TraceML's documentation.

    python scripts/bench/watch/watched_loop.py --data FOLDER --plant slow_disk --size 25
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder

CLASSES = 2
CROP = 32
# batches before timing: workers prefetch some at the start
WARM = 20
# options set by each plant, then the option that takes its size
PLANTS: Mapping[str, tuple[dict[str, Any], str]] = {
    "slow_disk": ({}, "read_ms"),
    "decode": ({}, "side"),
    "slow_transform": ({}, "warp_ms"),
    "slow_collate": ({}, "collate_ms"),
    "few_workers": ({"workers": 1}, "side"),
    "no_workers": ({"workers": 0}, "side"),
    "slow_step": ({}, "forward_ms"),
    "compute": ({"forward_ms": 0.0}, "layers"),
    "launches": ({"forward_ms": 0.0, "device": "cuda", "pin_memory": True}, "launches"),
    "collections": ({}, "objects"),
    "slow_logging": ({}, "log_ms"),
    "neighbors": ({"forward_ms": 0.0, "layers": 4, "side": 250}, ""),
    "slow_rank_data": ({"workers": 1, "slow_rank": 1}, "read_ms"),
    "slow_rank_forward": ({"workers": 1, "slow_rank": 1}, "forward_ms"),
    "quota": ({"side": 500}, ""),
    "tiny_memory": ({"files": 96, "padding_mb": 2, "forward_ms": 2.0}, ""),
    "nothing": ({"workers": 0, "forward_ms": 100.0}, ""),
}


class Warp:
    """A transform with ``ms`` of work."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def __call__(self, image: Image.Image) -> Image.Image:
        """Returns the image."""
        work(self.ms)
        return image


class Loader:
    """Reads and decodes a file; sleeps ``read_ms`` for each, and longer for late ones."""

    def __init__(self, read_ms: float, late: int) -> None:
        self.read_ms = read_ms
        self.late = late

    def __call__(self, path: str) -> Image.Image:
        """Returns the pixels of a file."""
        is_late = self.late and np.random.randint(self.late) == 0
        time.sleep(self.read_ms / 1e3 * (20 if is_late else 1))
        data = Path(path).read_bytes()
        return Image.open(io.BytesIO(data)).convert("RGB")


class Collate:
    """Collates a batch, with ``ms`` of work."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def __call__(self, samples: list[Any]) -> Any:
        """Returns the batch of ``samples``."""
        work(self.ms)
        return default_collate(samples)


class Network(nn.Module):
    """A small network, whose forward pass also waits, computes or launches kernels."""

    def __init__(self, forward_ms: float, layers: int, launches: int) -> None:
        super().__init__()
        self.forward_ms = forward_ms
        self.launches = launches
        self.first = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.more = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in range(layers))
        self.last = nn.Linear(32, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits ``[N, CLASSES]``."""
        time.sleep(self.forward_ms / 1e3)
        for _ in range(self.launches):
            # launch overhead in Python, then a kernel of a twentieth of that
            time.sleep(2e-3)
            torch.cuda._sleep(100_000)
        found = F.relu(self.first(images))
        for layer in self.more:
            found = F.relu(layer(found))
        logits: Tensor = self.last(found.mean((2, 3)))
        return logits


def work(ms: float) -> None:
    """Uses ``ms`` of CPU time."""
    until_s = time.thread_time() + ms / 1e3
    noise = np.random.default_rng(0).random(1000)
    while time.thread_time() < until_s:
        np.sort(noise)


def make_files(root: Path, count: int, side: int, padding_mb: int) -> Path:
    """Returns a folder of JPEG files, generated once."""
    folder = root / f"{count}-{side}-{padding_mb}"
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    for number in range(count):
        path = folder / f"class{number % CLASSES}" / f"{number}.jpg"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise).save(path, quality=90)
            with path.open("ab") as file:
                file.write(os.urandom(padding_mb << 20))
                os.fsync(file.fileno())
    return folder


def make_loader(options: argparse.Namespace) -> DataLoader[Any]:
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(CROP),
            *([Warp(options.warp_ms)] if options.warp_ms else []),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
        ]
    )
    folder = make_files(options.data, options.files, options.side, options.padding_mb)
    dataset = ImageFolder(str(folder), transform, loader=Loader(options.read_ms, options.late))
    count = options.steps * options.batch_size
    return DataLoader(
        dataset,
        options.batch_size,
        sampler=RandomSampler(dataset, replacement=True, num_samples=count),
        num_workers=options.workers,
        collate_fn=Collate(options.collate_ms) if options.collate_ms else None,
        persistent_workers=options.persistent_workers,
        prefetch_factor=options.prefetch_factor,
        pin_memory=options.pin_memory,
    )


def train(
    options: argparse.Namespace,
    loader: DataLoader[Any],
    network: nn.Module,
    traced: Callable[[nn.Module], AbstractContextManager[Any]],
) -> float:
    """Trains, and returns the samples/s after the first batches."""
    alive: list[list[int]] = [[] for _ in range(1000 * options.objects)]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    step = 0
    warm = min(WARM, options.epochs * len(loader) - 1)
    for _ in range(options.epochs):
        for images, labels in loader:
            if step == warm:
                began_s = time.perf_counter()
            with traced(network):
                images = images.to(options.device, non_blocking=True)
                labels = labels.to(options.device, non_blocking=True)
                optimizer.zero_grad(set_to_none=True)
                loss = F.cross_entropy(network(images), labels)
                loss.backward()
                optimizer.step()
            step += 1
            if alive:
                gc.collect()
            if options.log_ms or step % 5 == 0:
                # a remote file
                time.sleep(options.log_ms / 1e3)
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return float((step - warm) * options.batch_size / (time.perf_counter() - began_s))


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(description="Trains on generated JPEG files.")
    made.add_argument("--data", type=Path, required=True, help="folder for the files")
    made.add_argument("--plant", choices=PLANTS, default="nothing", help="the bottleneck")
    made.add_argument("--size", type=float, help="size of the bottleneck")
    made.add_argument("--traceml", action="store_true", help="run under TraceML")
    made.add_argument("--device", default="cpu")
    made.add_argument("--epochs", type=int, default=2)
    made.add_argument("--steps", type=int, default=40, help="steps per epoch")
    made.add_argument("--batch-size", type=int, default=8)
    made.add_argument("--workers", type=int, default=2)
    made.add_argument("--prefetch-factor", type=int)
    made.add_argument("--persistent-workers", action="store_true")
    made.add_argument("--pin-memory", action="store_true")
    made.add_argument("--files", type=int, default=24)
    made.add_argument("--side", type=int, default=64, help="JPEG side, in pixels")
    made.add_argument("--padding-mb", type=int, default=0, help="padding per file")
    made.add_argument("--read-ms", type=float, default=0.0, help="waiting per file")
    made.add_argument("--late", type=int, default=0, help="one of N files waits 20x longer")
    made.add_argument("--warp-ms", type=float, default=0.0, help="work per sample")
    made.add_argument("--collate-ms", type=float, default=0.0, help="work per batch")
    made.add_argument("--forward-ms", type=float, default=10.0, help="waiting per step")
    made.add_argument("--layers", type=int, default=0, help="additional layers")
    made.add_argument("--launches", type=int, default=0, help="kernel launches per step")
    made.add_argument("--objects", type=int, default=0, help="thousands, collected after each step")
    made.add_argument("--log-ms", type=float, default=0.0, help="waiting per step, to log a line")
    made.add_argument("--slow-rank", type=int, help="only this rank is slow")
    first = made.parse_known_args(argv)[0]
    settings, sized = PLANTS[first.plant]
    made.set_defaults(**settings)
    if sized and first.size:
        made.set_defaults(**{sized: type(getattr(first, sized))(first.size)})
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = parsed(argv)
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(rank)
    if options.slow_rank not in (None, rank):
        options.read_ms = 0.0
        options.forward_ms = 10.0
    traced: Callable[[nn.Module], AbstractContextManager[Any]] = lambda network: nullcontext()
    if options.traceml:
        import traceml_ai as traceml  # type: ignore[import-not-found]

        traceml.init(mode="auto")
        traced = traceml.trace_step
    network: nn.Module = Network(options.forward_ms, options.layers, options.launches)
    network = network.to(options.device)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
        network = nn.parallel.DistributedDataParallel(network)
    speed = train(options, make_loader(options), network, traced)
    if rank == 0:
        print(f"trained at {speed:.2f} samples/s", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
