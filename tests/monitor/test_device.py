"""NVML's figures, with a stand-in for the library, and a real one where there is a GPU."""

import ctypes
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import pynvml
import pytest
import torch

from harness.clock.figures import Tag
from harness.monitor.device import GpuSensor
from harness.runtime import gpus
from harness.runtime.folder import LOGGER

UUID = "8f6c1c1e-0000-4000-8000-000000000001"


class NVMLError(Exception):
    """Base of the stand-in's errors, as in pynvml."""


class Nvml:
    """Two GPUs, of which the second is asked for; ``broken`` names the calls that fail.

    ``sm_percent`` is what the performance counters say, in the library's own structures; None where
    there are none, an error's number where reading them fails.
    """

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = "Not Supported"
    NVML_GPM_METRIC_SM_UTIL = pynvml.NVML_GPM_METRIC_SM_UTIL
    NVML_GPM_METRICS_GET_VERSION = pynvml.NVML_GPM_METRICS_GET_VERSION
    c_nvmlGpmMetricsGet_t = pynvml.c_nvmlGpmMetricsGet_t  # noqa: N815 - the name is the library's

    def __init__(
        self,
        broken: tuple[str, ...] = (),
        count: int = 2,
        prefix: str = "GPU",
        sm_percent: float | ctypes.c_uint | None = None,
    ) -> None:
        self.broken = set(broken)
        self.count = count
        self.prefix = prefix
        self.sm_percent = sm_percent
        self.taken = 0
        self.seen_us: list[int] = []
        self.used = {"handle 0": 0, "handle 1": 5 * 2**30}
        self.users: dict[int, int] | None = (
            # utilization by process; None where the driver does not say
            None
        )

    def _call(self, name: str) -> None:
        if name in self.broken:
            raise NVMLError("Not Supported")

    def nvmlInit(self) -> None:
        self._call("init")

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
        return SimpleNamespace(used=self.used[handle], total=80 * 10**9)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._call("power")
        return 123_456

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        if self.users is None:
            raise NVMLError("Not Supported")
        return [SimpleNamespace(pid=pid) for pid in self.users]

    def nvmlDeviceGetProcessUtilization(self, handle: str, seen_us: int) -> list[SimpleNamespace]:
        assert self.users is not None
        self.seen_us.append(seen_us)
        if not any(self.users.values()):
            raise NVMLError("Not Found")
        now_us = 10**6 * len(self.seen_us)
        return [
            SimpleNamespace(pid=pid, smUtil=percent, timeStamp=now_us)
            for pid, percent in self.users.items()
            if percent
        ]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        assert handle == "handle 1" and self.prefix == "MIG"
        return "whole GPU"

    def nvmlDeviceGetGpuInstanceId(self, handle: str) -> int:
        assert handle == "handle 1" and self.prefix == "MIG"
        return 4

    def nvmlGpmQueryDeviceSupport(self, device: str) -> SimpleNamespace:
        self._call("gpm")
        assert device == ("whole GPU" if self.prefix == "MIG" else "handle 1")
        return SimpleNamespace(isSupportedDevice=int(self.sm_percent is not None))

    def nvmlGpmSampleAlloc(self) -> object:
        return ctypes.cast(ctypes.pointer(ctypes.c_int(0)), pynvml.c_nvmlGpmSample_t)

    def nvmlGpmSampleGet(self, device: str, sample: object) -> None:
        assert self.prefix == "GPU"
        self._take(sample)

    def nvmlGpmMigSampleGet(self, device: str, instance: int, sample: object) -> None:
        assert (device, instance, self.prefix) == ("whole GPU", 4, "MIG")
        self._take(sample)

    def _take(self, sample: object) -> None:
        self._call("gpm sample")
        self.taken += 1
        _number(sample).value = self.taken

    def nvmlGpmMetricsGet(
        self, asked: pynvml.c_nvmlGpmMetricsGet_t
    ) -> pynvml.c_nvmlGpmMetricsGet_t:
        assert (asked.version, asked.numMetrics, asked.metrics[0].metricId) == (1, 1, 2)
        assert (_number(asked.sample1).value, _number(asked.sample2).value) == (
            self.taken - 1,
            self.taken,
        )
        if isinstance(self.sm_percent, ctypes.c_uint):
            asked.metrics[0].nvmlReturn = self.sm_percent.value
        else:
            asked.metrics[0].value = self.sm_percent
        return asked


def _number(sample: object) -> ctypes.c_int:
    """What the stand-in keeps in a sample: how many were taken before it, with it."""
    return ctypes.cast(sample, ctypes.POINTER(ctypes.c_int)).contents  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _warnings_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, LOGGER)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Nvml | None], None]:
    return lambda nvml: monkeypatch.setitem(
        sys.modules,
        "pynvml",
        nvml,
        # None makes the import fail
    )


def test_a_gpu_is_found_by_its_uuid(install: Callable[[Nvml | None], None]) -> None:
    """Utilization is a fraction, memory is in bytes and power in watts."""
    install(Nvml())
    expected = {
        Tag.GPU_UTILIZATION: 0.37,
        Tag.GPU_MEMORY_USED_BYTES: 5.0 * 2**30,
        Tag.GPU_POWER_W: 123.456,
    }
    assert GpuSensor(UUID).sample() == expected


def test_a_mig_instance_gives_what_it_has(
    install: Callable[[Nvml | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Utilization and power are absent, with a warning for each, and memory stays."""
    install(Nvml(broken=("utilization", "power"), prefix="MIG"))
    sensor = GpuSensor(UUID)
    assert [set(sensor.sample()) for _ in range(3)] == [{Tag.GPU_MEMORY_USED_BYTES}] * 3
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        Tag.GPU_UTILIZATION, Tag.GPU_POWER_W
    ]  # fmt: skip


@pytest.mark.parametrize("prefix", ["GPU", "MIG"])
def test_multiprocessors_are_counted_where_the_gpu_does(
    install: Callable[[Nvml | None], None], prefix: str
) -> None:
    """From the second sample on there is the mean share at work since the one before."""
    nvml = Nvml(prefix=prefix, sm_percent=25.0)
    install(nvml)
    sensor = GpuSensor(UUID)
    assert [sensor.sample().get(Tag.GPU_SM_UTILIZATION) for _ in range(3)] == [None, 0.25, 0.25]
    nvml.sm_percent = math.nan
    assert Tag.GPU_SM_UTILIZATION not in sensor.sample()


@pytest.mark.parametrize(
    ("users", "others"),
    [
        pytest.param({os.getpid(): 50, 1: 30, 2: 10}, 0.4, id="two others"),
        pytest.param({os.getpid(): 50, 1: 80, 2: 90}, 1.0, id="never more than all"),
        pytest.param({os.getpid(): 50}, 0.0, id="alone"),
        pytest.param({os.getpid(): 0, 1: 30}, 0.3, id="idle beside another"),
        pytest.param({os.getpid(): 0}, None, id="nothing ran"),
        pytest.param({1: 50, 2: 30}, None, id="another container's numbers"),
        pytest.param(None, None, id="not supported"),
    ],
)
def test_others_on_the_gpu_are_those_that_are_not_ours(
    install: Callable[[Nvml | None], None],
    caplog: pytest.LogCaptureFixture,
    users: dict[int, int] | None,
    others: float | None,
) -> None:
    """Where NVML does not know this process, nobody can be told apart: no figure."""
    nvml = Nvml()
    nvml.users = users
    install(nvml)
    sensor = GpuSensor(UUID)
    assert [sensor.sample().get(Tag.GPU_OTHERS_UTILIZATION) for _ in range(2)] == [others] * 2
    assert others is None or nvml.seen_us == [0, 10**6]
    assert caplog.records == []


@pytest.mark.parametrize(
    "nvml",
    [Nvml(), Nvml(broken=("gpm",), sm_percent=25.0)],
    ids=["older GPU", "older driver"],
)
def test_without_counters_no_warning_is_due(
    install: Callable[[Nvml | None], None], caplog: pytest.LogCaptureFixture, nvml: Nvml
) -> None:
    """Most GPUs have no counters: the figure is absent, and the other three are there."""
    install(nvml)
    sensor = GpuSensor(UUID)
    assert [set(sensor.sample()) for _ in range(2)] == [
        {Tag.GPU_UTILIZATION, Tag.GPU_MEMORY_USED_BYTES, Tag.GPU_POWER_W}
    ] * 2
    assert caplog.records == []


@pytest.mark.parametrize("how", ["sample", "metric"])
def test_counters_that_fail_are_given_up(
    install: Callable[[Nvml | None], None], caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """An error when the sample is taken, or beside the figure, ends this figure alone."""
    nvml = Nvml(broken=("gpm sample",) if how == "sample" else (), sm_percent=ctypes.c_uint(999))
    install(nvml)
    sensor = GpuSensor(UUID)
    assert [len(sensor.sample()) for _ in range(3)] == [3, 3, 3]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "gpu/sm_utilization disabled"
    ]


def test_a_figure_that_fails_midway_is_absent_from_then_on(
    install: Callable[[Nvml | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A driver that falls over costs figures and a warning for each, nothing else."""
    nvml = Nvml()
    install(nvml)
    sensor = GpuSensor(UUID)
    assert len(sensor.sample()) == 3
    nvml.broken = {"utilization", "memory", "power"}
    assert [sensor.sample(), sensor.sample()] == [{}, {}]
    assert len(caplog.records) == 3


def test_a_gpu_is_idle_that_nobody_computes_on(install: Callable[[Nvml | None], None]) -> None:
    """This process is no other, and a full memory has an owner even if no process is seen."""
    nvml = Nvml()
    install(nvml)
    nvml.users = {}
    assert gpus.idle_names() == ["NVIDIA of handle 0"]
    nvml.used["handle 1"] = 0
    nvml.users = {os.getpid(): 1}
    assert gpus.idle_names() == ["NVIDIA of handle 0", "NVIDIA of handle 1"]
    nvml.users = {os.getpid(): 1, 1: 1}
    assert gpus.idle_names() == []


@pytest.mark.parametrize(
    "nvml",
    [None, Nvml(broken=("init",)), Nvml(prefix="OTHER")],
    ids=["no package", "no driver", "unknown uuid"],
)
def test_without_nvml_there_are_no_gpu_figures(
    install: Callable[[Nvml | None], None],
    caplog: pytest.LogCaptureFixture,
    nvml: Nvml | None,
) -> None:
    """One warning says why, and the figures are absent."""
    install(nvml)
    assert GpuSensor(UUID).sample() == {}
    assert [UUID in record.getMessage() for record in caplog.records] == [True]


def test_nvml_names_driver_and_gpus(install: Callable[[Nvml | None], None]) -> None:
    """What the driver sees."""
    nvml = Nvml()
    install(nvml)
    assert gpus.nvml_sees_gpu() == ("570.1", ["NVIDIA of handle 0", "NVIDIA of handle 1"])


@pytest.mark.parametrize(
    "nvml",
    [None, Nvml(broken=("init",)), Nvml(broken=("count",)), Nvml(count=0)],
    ids=["no package", "no driver", "driver fails", "no GPU"],
)
def test_nvml_without_gpus_sees_none(
    install: Callable[[Nvml | None], None], nvml: Nvml | None
) -> None:
    """Without a GPU the answer is None, whatever the reason."""
    install(nvml)
    assert gpus.nvml_sees_gpu() is None


@pytest.mark.cuda_values
def test_a_real_gpu_can_be_sampled() -> None:
    """While kernels run, every figure is in its range."""
    properties = torch.cuda.get_device_properties(0)
    sensor = GpuSensor(str(properties.uuid))
    sensor.sample()
    matrix = torch.rand(4096, 4096, device="cuda")
    began = time.monotonic()
    while time.monotonic() - began < 1.5:
        (matrix @ matrix).sum().item()
    found = sensor.sample()
    assert 0 < found[Tag.GPU_MEMORY_USED_BYTES] <= properties.total_memory * 1.1
    assert all(
        0 < found[tag] <= 1 for tag in (Tag.GPU_UTILIZATION, Tag.GPU_SM_UTILIZATION) if tag in found
    )
    if properties.major >= 9:
        assert Tag.GPU_SM_UTILIZATION in found
