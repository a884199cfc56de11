"""Opens and closes all of a run's monitoring together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..clock.clock import StepClock
from ..clock.figures import Window
from ..config import Config, ConfigError, Wandb
from ..runtime import accelerator, limits
from ..runtime.accelerator import Accelerator
from ..runtime.distributed import World
from ..runtime.gpus import are_hidden, nvml_sees_gpu
from .device import GpuSensor, Sensor
from .goodput import GoodputTimer
from .host import HostSensor, Sampler
from .wandb_writer import WandbWriter
from .writer import RunWriter


@dataclass(slots=True)
class Monitor:
    """The monitoring of a run; only the first rank has a writer and a sampler.

    ``timer`` divides the wall time; the functions in ``on_window`` are called with the clock and
    the window at the end of each window.
    """

    clock: StepClock
    timer: GoodputTimer
    writer: RunWriter | None = None
    sampler: Sampler | None = None
    on_window: list[Callable[[StepClock, Window], None]] = field(default_factory=list)


@contextmanager
def watched(
    config: Config, world: World, folder: Path, began_s: float, resumed_step: int | None = None
) -> Iterator[Monitor]:
    """Yields the ``Monitor`` of a run in ``folder``; closes its files and threads after the block.

    The command started at ``began_s`` on ``time.perf_counter``; ``resumed_step`` is the
    checkpoint's step if the run resumes.
    """
    monitor = Monitor(StepClock(world.device), GoodputTimer(began_s))
    monitor.timer.mark("start")
    with ExitStack() as stack:
        if world.is_main:
            wandb = config.watch.wandb is not Wandb.disabled
            monitor.writer = stack.enter_context(
                RunWriter(
                    folder,
                    tensorboard=config.watch.tensorboard,
                    resumed_step=resumed_step,
                    wandb=WandbWriter(folder, config, resumed_step is not None) if wandb else None,
                )
            )
            looks = sampling(accelerator.get(world.device), world.local_size, config.watch.sample_s)
            monitor.sampler = stack.enter_context(looks)
        yield monitor


def sampling(own: Accelerator, ranks: int, interval_s: float) -> Sampler:
    """Returns a sampler for the machine, shared by ``ranks``, and for this rank's GPU."""
    # other ranks on this machine would be counted as other programs
    sensors: list[Sensor] = [HostSensor(cores=limits.measure().cores if ranks == 1 else None)]
    if uuid := own.uuid:
        sensors.append(GpuSensor(uuid))
    return Sampler(sensors, interval_s)


def refuse_hidden_gpu(config: Config) -> None:
    """Raises an error if the driver sees a GPU that torch does not.

    Raises:
        ConfigError: it does; the message gives the driver, the GPU, the torch build and a fix.
    """
    if config.device != "auto" or accelerator.count() or are_hidden():
        return
    if seen := nvml_sees_gpu():
        driver, names = seen
        raise ConfigError(
            f"device=auto: the driver ({driver}) has {', '.join(names)}, but torch "
            f"{torch.__version__} (built for CUDA {torch.version.cuda or 'no'}) cannot use it; "
            "install a torch build for this driver, or set device=cpu"
        )
