"""The tuner on an asynchronous device: what it measures and chooses against what the emulated GPU
and its feed can do.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
from emulated_run import SIZE
from emulated_tuning import LIMITS, Launching, Machine, own, trials
from emulator import EmulatedDevice, VirtualClock, emulated
from torch import Tensor
from torch.optim import SGD

from harness.config import TunerConfig
from harness.monitor import console
from harness.runtime.distributed import World
from harness.tuning import library
from harness.tuning.measures import Rate, TuningReport
from harness.tuning.steps import StepRun
from harness.tuning.tuner import tune

STEP_S = 70e-3
TAKES = SIZE / STEP_S
HOSTS = {"eager": (15e-3, 170), "compiled": (5e-3, 60)}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with console.speaking(False):
        yield


@contextlib.contextmanager
def gpu() -> Iterator[EmulatedDevice]:
    clock = VirtualClock(wake_s=0.05e-3)
    pinned_per_s = SIZE * (12 + 8) / 0.7e-3
    device = EmulatedDevice(
        clock,
        launch_s=20e-6,
        record_s=4e-6,
        wake_s=0.05e-3,
        pinned_per_s=pinned_per_s,
        pageable_per_s=pinned_per_s / 4,
    )
    with emulated(device):
        yield device


def tuned(
    device: EmulatedDevice,
    worker: float,
    cap: float,
    host: str,
    *,
    plain: bool = False,
    first_s: float = 0.0,
    workers: int = 8,
) -> tuple[TuningReport, Machine]:
    """The tuner's report; ``worker`` and ``cap`` are shares of what the step takes; ``plain``: of a
    loop of one's own.
    """
    machine = Machine(device, 1 / (worker * TAKES), cap * TAKES)
    network = Launching(device, STEP_S, *HOSTS[host], first_s)
    if plain:
        step = own_step(device, network)
        trainee: Any = library._LoopBenchmark(
            machine, step, [network, SGD(network.parameters(), 0.1)], device.device
        )  # type: ignore[arg-type]
    else:
        _, trainee = trials(device, network)
    return tune(
        machine, trainee, own(workers), TunerConfig(), LIMITS, World(0, 1, 0, 1, device.device)
    ), machine


def own_step(device: EmulatedDevice, network: Launching) -> Any:
    """A step that copies its batch itself, as loops without a prefetcher do."""

    def step(batch: Any) -> None:
        network((device.copy(batch.images).float() - 127) / 64).sum().backward()
        device.copy(batch.labels)

    return step


@pytest.mark.parametrize("plain", [False, True], ids=["the harness' step", "a loop of one's own"])
@pytest.mark.parametrize("host", ["eager", "compiled"])
@pytest.mark.parametrize(
    ("worker", "cap"),
    [
        (0.1, math.inf),
        (0.15, math.inf),
        (0.3, math.inf),
        (0.45, math.inf),
        (0.7, math.inf),
        (1.3, math.inf),
        (2.0, math.inf),
        (3.0, math.inf),
        (0.12, 0.9),
        (0.3, 0.6),
        (0.5, 0.4),
        (2.0, 0.8),
    ],
)
def test_the_fewest_workers_that_leave_no_gap(
    worker: float, cap: float, host: str, plain: bool
) -> None:
    """Demand is within 3 %, bound and ceiling are the machine's; no more workers than leave no gap
    with 5 % to spare.
    """
    with gpu() as device:
        report, machine = tuned(device, worker, cap, host, plain=plain)
    assert report.complete
    takes = SIZE / (STEP_S + 0.7e-3) if plain else TAKES  # whose copy is part of the step
    goal = min(1.0, cap) * takes
    workers = report.settings.num_workers
    alone = 1 / (1 / machine.rate(1) + (HOSTS[host][0] / SIZE if plain else 0.0))
    assert (machine.rate(workers) if workers else alone) >= 0.98 * goal
    assert workers <= next(
        n for n in range(1, 100) if machine.rate(n) >= min(1.05 * takes, machine.cap)
    )
    before = min(takes, machine.rate(8))
    assert report.ceiling == pytest.approx(takes / before, rel=0.03)
    assert report.demand is not None and report.demand.images_per_s == pytest.approx(
        takes, rel=0.03
    )
    assert report.after.wait_fraction == pytest.approx(max(0.0, 1 - cap), abs=0.03)


class Coarse(Launching):
    """A step of which one kernel, the first, is a third, and a tenth of what launching takes the
    host.
    """

    def __init__(self, device: EmulatedDevice, device_s: float, launch_s: float) -> None:
        super().__init__(device, 2 / 3 * device_s, 0.9 * launch_s, 169)
        self._first = device_s / 3, 0.1 * launch_s

    def forward(self, images: Tensor) -> Tensor:
        self._device.launch(*self._first)
        return super().forward(images)


def demanded(
    step_s: float, *, plain: bool, limit_s: float = 1.0, parts: int = 1, ahead: bool = True
) -> tuple[StepRun, float]:
    """What the demand's steps took, and how long they were measured; launching a step takes a fifth
    of ``step_s``.
    """
    with gpu() as device:
        machine = Machine(device, 1e-5)
        network = Coarse(device, step_s, step_s / 5)
        batch = next(iter(machine.probe(own())))
        if plain:
            step = own_step(device, network)
            state = [network, SGD(network.parameters(), 0.1)]
            trainee: Any = library._LoopBenchmark(machine, step, state, device.device)  # type: ignore
        else:
            _, trainee = trials(device, network, parts=parts, ahead=ahead)
        with trainee.preserved_state():
            begin = device.now()
            return trainee.demand(batch, limit_s), device.now() - begin


@pytest.mark.parametrize("plain", [False, True], ids=["the harness' step", "a loop of one's own"])
@pytest.mark.parametrize("step_s", [30e-3, 60e-3, 200e-3])
def test_demand_is_not_low_where_the_first_kernel_is_coarse(step_s: float, plain: bool) -> None:
    """The device idles until a group's first kernel is launched: over three steps that is less than
    1 %.
    """
    run, _ = demanded(step_s, plain=plain)
    takes = SIZE / (step_s + 0.7e-3) if plain else SIZE / step_s
    assert Rate.typical(run.images, run.seconds).images_per_s == pytest.approx(takes, rel=0.01)


@pytest.mark.parametrize("plain", [False, True], ids=["the harness' step", "a loop of one's own"])
@pytest.mark.parametrize(
    ("step_s", "limit_s", "steps"),
    [
        pytest.param(0.3, 1.0, 3, id="three fit into the limit"),
        pytest.param(0.4, 1.0, 1, id="three do not"),
        pytest.param(4.0, 1.0, 1, id="seconds"),
        pytest.param(30e-3, 0.0, 1, id="no time at all"),
    ],
)
def test_long_steps_are_timed_one_by_one(
    step_s: float, limit_s: float, steps: int, plain: bool
) -> None:
    """Where three would take longer than the limit; demand then
    takes the warm-up and two groups.
    """
    run, took_s = demanded(step_s, plain=plain, limit_s=limit_s)
    assert set(run.images) == {SIZE * steps}
    warm_up_s = 5.2 * step_s
    assert took_s <= warm_up_s + max(limit_s, 2.1 * steps * step_s)


def test_groups_of_three_grow_to_whole_updates() -> None:
    """With two batches an update, a group has two updates."""
    assert set(demanded(60e-3, plain=False, parts=2)[0].images) == {4 * SIZE}


@pytest.mark.parametrize("plain", [False, True], ids=["the harness' step", "a loop of one's own"])
@pytest.mark.parametrize("step_s", [8e-3, 60e-3])
def test_launching_is_the_hosts_own_time(step_s: float, plain: bool) -> None:
    """The host's part of a step is what launching takes it, without what it waits for a device that
    is two steps behind.
    """
    run, _ = demanded(step_s, plain=plain, ahead=False)
    assert run.launch_s * SIZE == pytest.approx(step_s / 5, abs=0.1e-3)


@pytest.mark.parametrize("plain", [False, True], ids=["the harness' step", "a loop of one's own"])
def test_a_first_step_of_a_minute_is_not_the_tuners(plain: bool) -> None:
    """Compiling comes on top of the budget: everything is tried, and the answer is complete, so
    that it is remembered.
    """
    with gpu() as device:
        report, _ = tuned(device, 0.3, math.inf, "compiled", plain=plain, first_s=60.0)
        quick, _ = tuned(device, 0.3, math.inf, "compiled", plain=plain)
    assert report.complete and report.after.images_per_s is not None
    assert report.settings == quick.settings
    assert len(report.trials) == len(quick.trials)
    assert report.seconds > 60


def test_ten_trials_leave_no_more_memory_than_one() -> None:
    """Every trial's batches come from one stream's memory, and what tuning took is given back."""
    with gpu() as device:
        tuned(device, 0.3, math.inf, "eager")
        _, trainee = trials(device, Launching(device, STEP_S, *HOSTS["eager"]))
        machine = Machine(device, 1 / (0.3 * TAKES))
        reserved = []
        with trainee.preserved_state():
            for _ in range(10):
                trainee.deliver(machine.probe(own(4)), 4, 0.5)
                reserved.append(device.memory_pool.reserved)
        assert reserved == [reserved[0]] * 10
        device.release()
        assert device.memory_pool.reserved == device.memory_pool.allocated
