"""The training loops of ``beside_traceml.py``: small, watched in several ways.

This is a separate script because TraceML launches one. Under TraceML, the loop follows its
documentation: ``init`` once, and ``trace_step`` around everything from ``zero_grad`` to
``optimizer.step``.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

BATCH = 16
SIDE = 32
CLASSES = 10
# starts a loop's turn; anything else ends the loop
GO = "go\n"
# steps per log line, as in conf/watch
WINDOW = 10
SIDES = ("bare", "traceml", "traceml_log_inside", "clock", "watch", "harness")


@dataclass(frozen=True, slots=True)
class Plant:
    """Delays in seconds: a sample's read, the forward pass, a log line."""

    read_s: float = 0.0
    forward_s: float = 0.0
    log_s: float = 0.0


PLANTS = {
    "slow_read": Plant(read_s=0.004, forward_s=0.010),
    "slow_step": Plant(forward_s=0.080),
    "slow_logging": Plant(forward_s=0.020, log_s=0.030),
    "nothing": Plant(),
}


class Images:
    """Noise in memory whose reads take ``read_s`` seconds.

    They support ``[]`` for torch's loader and ``fill`` for a wellfed feed.
    """

    image_size = SIDE
    stages = ("read", "write")

    def __init__(self, count: int, read_s: float) -> None:
        self.count = count
        self.read_s = read_s
        self.pixels = np.random.default_rng(0).integers(
            256, size=(64, 3, SIDE, SIDE), dtype=np.uint8
        )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        out = torch.empty(3, SIDE, SIDE, dtype=torch.uint8)
        return out, self.fill(0, index, out.numpy())

    def fill(
        self, epoch: int, index: int, out: np.ndarray, lap: Callable[[str], None] | None = None
    ) -> int:
        """Writes sample ``index`` into ``out`` and returns its label."""
        if self.read_s:
            time.sleep(self.read_s)
        if lap is not None:
            lap("read")
        out[:] = self.pixels[index % len(self.pixels)]
        if lap is not None:
            lap("write")
        return index % CLASSES


class Ready(IterableDataset[Any]):
    """One repeated batch, with almost no loading time."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        images = torch.zeros(BATCH, 3, SIDE, SIDE, dtype=torch.uint8)
        labels = torch.zeros(BATCH, dtype=torch.int64)
        while True:
            yield images, labels


class Network(nn.Module):
    """Two layers whose forward pass in training takes ``forward_s`` seconds longer.

    It sleeps, or works if it ``spins``.
    """

    def __init__(self, forward_s: float, spins: bool = False) -> None:
        super().__init__()
        self.forward_s = forward_s
        self.spins = spins
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(3 * SIDE**2, 64), nn.ReLU(), nn.Linear(64, CLASSES)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits ``[N, CLASSES]``."""
        if self.spins:
            until_s = time.perf_counter() + self.forward_s
            while time.perf_counter() < until_s:
                pass
        elif self.forward_s and self.training:
            time.sleep(self.forward_s)
        logits: Tensor = self.layers(images)
        return logits


class Turns:
    """Lets a loop run ``block`` steps per message on the socket, and replies with the seconds."""

    def __init__(self, path: str, block: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._line = self._socket.makefile("rw", encoding="ascii")
        self._block = block
        self._tell(0.0)

    def __call__(self, number: int) -> bool:
        """Called after every step; returns whether the loop should end."""
        return number % self._block == 0 and self._tell(time.perf_counter() - self._began_s)

    def _tell(self, took_s: float) -> bool:
        self._line.write(f"{took_s}\n")
        self._line.flush()
        ended = self._line.readline() != GO
        self._began_s = time.perf_counter()
        return ended


def loop(
    batches: Iterable[tuple[Tensor, Tensor]],
    network: nn.Module,
    traced: Callable[[nn.Module], AbstractContextManager[Any]],
    log: Callable[[bool], None],
    after: Callable[[int], bool],
) -> None:
    """Trains; calls ``log`` inside and after each step, then ``after``."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for number, (images, labels) in enumerate(batches, 1):
        with traced(network):
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(network(images.float()), labels)
            loss.backward()
            optimizer.step()
            log(True)
        log(False)
        if after(number):
            return


def run_loop(
    side: str, plant: Plant, folder: Path, steps: int, turns: Turns | None, spin_s: float
) -> None:
    """Runs the hand-written loop, watched by ``side``; in ``turns`` each step spins ``spin_s``."""
    network = Network(spin_s if turns else plant.forward_s, spins=turns is not None)
    traced = lambda network: nullcontext()
    if side.startswith("traceml"):
        import traceml_ai as traceml  # type: ignore[import-not-found]

        traceml.init(mode="auto")
        traced = traceml.trace_step
    with (folder / f"{side}.log").open("w", encoding="utf-8") as file, ExitStack() as stack:

        def log(inside: bool) -> None:
            if plant.log_s and inside == (side == "traceml_log_inside"):
                write_line(file, plant.log_s)

        images: Any = Images(steps * BATCH, plant.read_s)
        loader: DataLoader[Any] = DataLoader(images, BATCH, num_workers=1)
        if turns:
            loader = DataLoader(Ready(), batch_size=None)
        batches: Iterable[tuple[Tensor, Tensor]] = loader
        after: Callable[[int], bool] = turns or (lambda number: False)
        if side == "clock":
            batches, after = _clocked(loader, folder, after, stack)
        loop(batches, network, traced, log, after)


def write_line(file: Any, log_s: float) -> None:
    """Writes a line, which takes ``log_s`` seconds."""
    time.sleep(log_s)
    file.write("a line\n")
    file.flush()


def _clocked(
    loader: DataLoader[Any], folder: Path, after: Callable[[int], bool], stack: ExitStack
) -> tuple[Iterable[Any], Callable[[int], bool]]:
    """Returns ``loader`` and ``after`` with all the monitoring of a wellfed run."""
    from harness.clock.figures import by_tag
    from harness.config import Config
    from harness.monitor import monitor
    from harness.runtime.distributed import World

    world = World(0, 1, 0, 1, torch.device("cpu"))
    watch = stack.enter_context(monitor.watched(Config(), world, folder, time.perf_counter()))

    def logged(number: int) -> bool:
        if number % WINDOW == 0 and (window := watch.clock.close_window()) is not None:
            assert watch.writer is not None
            with watch.clock.noted("logging"):
                watch.writer.scalars(number, by_tag(window), epoch=1)
        return after(number)

    return watch.clock.watch(loader), logged


def run_harness(plant: Plant, folder: Path, steps: int) -> None:
    """Runs ``train.py`` itself on the same data and network."""
    from harness.cli import job
    from harness.config import (
        BackendName,
        Config,
        DataConfig,
        LoaderConfig,
        TrainerConfig,
        WatchConfig,
    )
    from harness.data.datasets import Splits
    from harness.monitor.writer import RunWriter

    config = Config(
        device="cpu",
        data=DataConfig(image_size=SIDE),
        loader=LoaderConfig(backend=BackendName.processes, batch_size=BATCH, num_workers=1),
        trainer=TrainerConfig(epochs=1),
        watch=WatchConfig(window_steps=1 if plant.log_s else WINDOW),
    )
    config.checkpoint.enabled = False
    images: Any = Images(steps * BATCH, plant.read_s)
    val_images: Any = Images(BATCH, 0.0)
    splits = Splits(images, val_images, tuple(map(str, range(CLASSES))), "planted", "")
    scalars = RunWriter.scalars
    # patch in the data, the network and a slow TensorBoard writer
    with (folder / "own.log").open("w", encoding="utf-8") as file:

        def slow_scalars(writer: RunWriter, *args: Any, **named: Any) -> None:
            if plant.log_s:
                write_line(file, plant.log_s)
            scalars(writer, *args, **named)

        with (
            patch("harness.data.datasets.load", lambda *_: splits),
            patch("harness.training.models.build", lambda *_, **__: Network(plant.forward_s)),
            patch.object(RunWriter, "scalars", slow_scalars),
        ):
            job.main_worker(0, job.Job(config, folder, ()))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="One run for beside_traceml.py.")
    parser.add_argument("--side", choices=SIDES, required=True, help="monitoring tool")
    parser.add_argument("--plant", choices=PLANTS, default="nothing", help="planted bottleneck")
    parser.add_argument("--steps", type=int, default=300, help="steps of the run")
    parser.add_argument("--folder", type=Path, required=True, help="where the run's files go")
    parser.add_argument("--turns", help="Unix socket of the coordinating process")
    parser.add_argument("--block", type=int, default=500, help="steps in a turn")
    parser.add_argument("--spin-s", type=float, default=0.0, help="seconds of work per step")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    turns = Turns(options.turns, options.block) if options.turns else None
    began_s = time.perf_counter()
    if options.side == "harness":
        run_harness(PLANTS[options.plant], options.folder, options.steps)
    else:
        plant = PLANTS[options.plant]
        run_loop(options.side, plant, options.folder, options.steps, turns, options.spin_s)
    (options.folder / "loop.json").write_text(json.dumps({"loop_s": time.perf_counter() - began_s}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
