"""Shares of an asynchronous device's time against what the emulated GPU did; the verdict."""

import pytest
from emulated_run import Loop

LAUNCH = {"copy_s": 0.1e-3, "prepare_s": 0.05e-3}
ARRAYS = {
    "device_s": 12e-3,
    "launch_s": 6e-3,
    "loader_s": 0.1e-3,
    "prepare_s": 4e-3,
    "prepare_launch_s": 2.5e-3,
}


def _bursts(k: int) -> float:
    """One worker, of whose batches every eighth takes 0.8 s."""
    return 0.8 if k % 8 == 0 else 1e-3


@pytest.mark.parametrize(
    ("loop", "idle_for", "bottleneck"),
    [
        pytest.param(
            Loop(loader_s=66e-3),
            None,
            "compute",
            id="the host waits for data and the device does not",
        ),
        pytest.param(
            Loop(loader_s=140e-3),
            "starved",
            "workers",
            id="batches come half as fast as the device takes them",
        ),
        pytest.param(
            Loop(copy_s=6e-3, pinned=False, ahead=False),
            "exposed_copy",
            "balanced",
            id="pageable copies",
        ),
        pytest.param(
            Loop(device_s=9e-3, launch_s=25e-3, loader_s=5e-3, **LAUNCH),
            "launch",
            "launch",
            id="launching 25 ms for 9 ms",
        ),
        pytest.param(
            Loop(device_s=2e-3, launch_s=5e-3, kernels=120, loader_s=1e-3, **LAUNCH),
            "launch",
            "launch",
            id="5 ms for 2 ms",
        ),
        pytest.param(
            Loop(**ARRAYS, made_there=True, ahead=False),
            None,
            "compute",
            id="augmented between two steps",
        ),
        pytest.param(Loop(epoch=10, loader_s=1e-3), None, "compute", id="epochs of ten steps"),
        pytest.param(Loop(**ARRAYS, made_there=True), None, "compute", id="augmented ahead"),
        pytest.param(Loop(copy_s=6e-3, pinned=False), None, "compute", id="pageable copies ahead"),
        pytest.param(Loop(loader_s=_bursts), "starved", "workers", id="batches in bursts"),
        pytest.param(Loop(log_s=0.3), "host", "host", id="slow logging"),
        pytest.param(
            Loop(parts=4, device_s=10e-3, launch_s=4e-3, loader_s=16e-3),
            "starved",
            "workers",
            id="four batches an update",
        ),
        pytest.param(
            Loop(device_s=10e-3, launch_s=4e-3, loader_s=1e-3, python_s=12e-3),
            "host",
            "host",
            id="Python between the steps",
        ),
        pytest.param(
            Loop(launch_s=5e-3, loader_s=72e-3),
            "starved",
            "balanced",
            id="compiled and fed at 97 %",
        ),
    ],
)
def test_shares_are_the_devices(loop: Loop, idle_for: str | None, bottleneck: str) -> None:
    """Busy and idle time are within 2 points of the device's own, images/s within 1 %."""
    result = loop.run()
    shares = dict(result.window.shares)
    busy = shares.pop("compute") + shares.pop("prepare", 0.0)
    assert busy == pytest.approx(result.busy, abs=0.02)
    python = 0.0 if idle_for == "host" else shares.pop("host")
    assert python < 0.03  # some Python there always is
    for name, share in shares.items():
        assert share == pytest.approx(
            1 - result.busy - python if name == idle_for else 0.0, abs=0.02
        )
    assert result.window.images_per_s == pytest.approx(result.images_per_s, rel=0.01)
    assert result.verdict.kind == bottleneck


@pytest.mark.parametrize("kernels", [1100, 3000])
@pytest.mark.parametrize(
    ("device_us", "bottleneck"), [(8, "launch"), (25, "compute")], ids=["slow host", "slow device"]
)
def test_more_launches_than_a_queue_holds(kernels: int, device_us: int, bottleneck: str) -> None:
    """Kernels that take 20 us to launch are launch-bound if the device runs them in 8, not in 25.

    The host waits for a full queue in both cases. No more is called launching than is.
    """
    loop = Loop(
        device_s=1e-6 * device_us * kernels, launch_s=20e-6 * kernels, kernels=kernels,
        loader_s=1e-3, steps=50, window=5, **LAUNCH,
    )  # fmt: skip
    result = loop.run()
    assert result.verdict.kind == bottleneck
    assert result.window.shares.get("launch", 0.0) < 1 - result.busy + 0.02


def test_augmenting_between_two_steps_has_a_name() -> None:
    """4 ms of augmentation before 12 ms of network are a quarter of the device's time."""
    result = Loop(**ARRAYS, made_there=True, ahead=False).run()
    assert result.window.shares["prepare"] == pytest.approx(0.25, abs=0.01)
    assert result.verdict.shares.prepare == pytest.approx(0.25, abs=0.005)


@pytest.mark.parametrize(
    ("loader_s", "full"), [(1e-3, 0.61), (140e-3, 0.26)], ids=["a fast loader", "a slow loader"]
)
def test_the_host_sleeps_while_the_device_is_full(loader_s: float, full: float) -> None:
    """The wait for a device with a step in store has a name of its own."""
    result = Loop(loader_s=loader_s).run()
    assert result.window.device_full_fraction == pytest.approx(full, abs=0.03)
    assert result.device.spun_s == 0
    waited = 0.54 if loader_s > 0.07 else 0.0
    assert result.window.data_wait_fraction == pytest.approx(waited, abs=0.02)


def test_a_wait_for_a_full_device_is_none_for_data_where_events_tell_no_time() -> None:
    """The host is at most two steps ahead, as of Apple's GPUs, and what it sleeps is no stall."""
    window = Loop(loader_s=1e-3, streams=False).run().window
    assert window.device_full_fraction == pytest.approx(0.78, abs=0.03)
    assert window.stall_basis == "host"
    assert window.stall_fraction == pytest.approx(0, abs=0.02)


def test_no_wait_while_the_device_is_not_full() -> None:
    """A host that cannot keep ahead of the device never waits for it in a step."""
    result = Loop(device_s=9e-3, launch_s=25e-3, loader_s=5e-3, **LAUNCH).run()
    assert result.window.device_full_fraction is None


def test_the_device_is_held_back_three_times() -> None:
    """Where launching may be the limit, three steps are held back, and no more."""
    slow = {"device_s": 9e-3, "launch_s": 25e-3, "loader_s": 1e-3, **LAUNCH}
    walls = [Loop(**slow, steps=steps).run().wall_s for steps in (200, 400)]
    assert walls[1] - walls[0] == pytest.approx(200 * 25.15e-3, rel=0.01)
