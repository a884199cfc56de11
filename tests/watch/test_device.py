"""NVML's figures, with a stand-in for the library."""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from harness.watch.device import GpuSource, nvml_sees_gpu
from harness.watch.tags import Tag

UUID = "8f6c1c1e-0000-4000-8000-000000000001"


class NVMLError(Exception):
    """Base of the stand-in's errors, as in pynvml."""


class Nvml:
    """Two GPUs, of which the second is asked for; ``broken`` names the calls that fail."""

    NVMLError = NVMLError

    def __init__(self, broken: tuple[str, ...] = (), count: int = 2, prefix: str = "GPU") -> None:
        self.broken, self.count, self.prefix = set(broken), count, prefix
        self.open = 0

    def _call(self, name: str) -> None:
        if name in self.broken:
            raise NVMLError(f"{name} not supported")

    def nvmlInit(self) -> None:
        self._call("init")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        self._call("count")
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"handle {index}"

    def nvmlDeviceGetName(self, handle: str) -> str:
        return f"NVIDIA of {handle}"

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.1"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != f"{self.prefix}-{UUID}":
            raise NVMLError("Not Found")
        return "handle 1"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        self._call("utilization")
        return SimpleNamespace(gpu=37)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        self._call("memory")
        return SimpleNamespace(used=5 * 2**30)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._call("power")
        return 123_456


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Nvml | None], None]:
    return lambda nvml: monkeypatch.setitem(sys.modules, "pynvml", nvml)  # None makes the import fail


def test_a_gpu_is_found_by_its_uuid(install: Callable[[Nvml | None], None]) -> None:
    """Utilisation is a fraction, memory is in bytes and power in watts, of the GPU that torch uses."""
    install(Nvml())
    expected = {Tag.GPU_UTILIZATION: 0.37, Tag.GPU_MEMORY_USED_BYTES: 5.0 * 2**30, Tag.GPU_POWER_W: 123.456}
    assert GpuSource(UUID).sample() == expected


def test_a_mig_slice_gives_what_it_has(install: Callable[[Nvml | None], None], caplog: pytest.LogCaptureFixture) -> None:
    """On MIG there is neither utilisation nor power: both are absent, with one warning each, and memory stays."""
    install(Nvml(broken=("utilization", "power"), prefix="MIG"))
    source = GpuSource(UUID)
    assert [set(source.sample()) for _ in range(3)] == [{Tag.GPU_MEMORY_USED_BYTES}] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "no gpu/utilization from here on: utilization not supported",
        "no gpu/power_w from here on: power not supported",
    ]


def test_a_figure_that_fails_midway_is_absent_from_then_on(
    install: Callable[[Nvml | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A driver that falls over costs figures and one warning for each, nothing else."""
    nvml = Nvml()
    install(nvml)
    source = GpuSource(UUID)
    assert len(source.sample()) == 3
    nvml.broken = {"utilization", "memory", "power"}
    assert [source.sample(), source.sample()] == [{}, {}]
    assert len(caplog.records) == 3


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        pytest.param(None, "NVML is not there", id="no package"),
        pytest.param(Nvml(broken=("init",)), "NVML is not there", id="no driver"),
        pytest.param(Nvml(prefix="OTHER"), f"does not know GPU {UUID}: Not Found", id="unknown uuid"),
    ],
)
def test_without_nvml_there_are_no_gpu_figures(
    install: Callable[[Nvml | None], None], caplog: pytest.LogCaptureFixture, nvml: Nvml | None, reason: str
) -> None:
    """One warning says why, and the figures are absent."""
    install(nvml)
    assert GpuSource(UUID).sample() == {}
    assert [reason in record.getMessage() for record in caplog.records] == [True]


def test_nvml_names_driver_and_gpus(install: Callable[[Nvml | None], None]) -> None:
    """What the driver sees, and NVML is given back afterwards."""
    nvml = Nvml()
    install(nvml)
    assert nvml_sees_gpu() == ("570.1", ["NVIDIA of handle 0", "NVIDIA of handle 1"])
    assert nvml.open == 0


@pytest.mark.parametrize(
    "nvml",
    [None, Nvml(broken=("init",)), Nvml(broken=("count",)), Nvml(count=0)],
    ids=["no package", "no driver", "driver fails", "no GPU"],
)
def test_nvml_without_gpus_sees_none(install: Callable[[Nvml | None], None], nvml: Nvml | None) -> None:
    """Without a GPU the answer is None, whatever the reason."""
    install(nvml)
    assert nvml_sees_gpu() is None
    assert nvml is None or nvml.open == 0
