"""Everything that a run is watched with, opened and closed together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.config import Config, ConfigError
from harness.runtime.distributed import World
from harness.watch import console
from harness.watch.board import Board
from harness.watch.clock import StepClock
from harness.watch.device import GpuSource, nvml_sees_gpu
from harness.watch.host import HostSource, Sampler, Source


@dataclass(slots=True)
class Watch:
    """What a run is watched with.

    Attributes:
        clock: where the time of this rank's steps goes.
        board: what is written down; None on every rank but the first, and in evaluation.
        sampler: GPU and machine; None on every rank but the first.
    """

    clock: StepClock
    board: Board | None = None
    sampler: Sampler | None = None


@contextmanager
def watched(config: Config, world: World, folder: Path, resumed_step: int | None) -> Iterator[Watch]:
    """The run's ``Watch``; its files and threads are closed at the end of the block, whatever ends it.

    Args:
        config: the run's settings.
        world: this rank; the first one writes.
        folder: the run's folder.
        resumed_step: the checkpoint's step where the run goes on from one.
    """
    with ExitStack() as stack:
        watch = Watch(StepClock(world.device))
        if world.is_main:
            board = Board(folder, tensorboard=config.watch.tensorboard, resumed_step=resumed_step)
            watch.board = stack.enter_context(board)
            sources: list[Source] = [HostSource()]
            if world.device.type == "cuda":
                uuid = str(torch.cuda.get_device_properties(world.device).uuid)
                sources.append(GpuSource(uuid))
            watch.sampler = stack.enter_context(Sampler(sources, config.watch.sample_s))
        yield watch


@contextmanager
def quiet_ranks(world: World) -> Iterator[None]:
    """Let the first rank alone speak inside the block."""
    console.set_quiet(not world.is_main)
    try:
        yield
    finally:
        console.set_quiet(False)


def refuse_hidden_gpu(config: Config, world: World) -> None:
    """Stop where the driver sees a GPU and torch does not, rather than train on the CPU in silence.

    Raises:
        ConfigError: names the driver, the GPU, torch's build and the way out.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")  # the user's own wish
    if config.device != "auto" or world.device.type != "cpu" or hidden:
        return
    seen = nvml_sees_gpu()
    if seen is not None:
        driver, names = seen
        raise ConfigError(
            f"device=auto: the driver ({driver}) has {', '.join(names)}, but torch {torch.__version__} (built for CUDA "
            f"{torch.version.cuda or 'no'}) cannot use it; install a torch build for this driver, or set device=cpu"
        )
