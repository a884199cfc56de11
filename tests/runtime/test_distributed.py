"""Ranks: which device each has, how they are started, and what they agree on."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jobs
import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port

from harness.cli import job
from harness.config import Config, ConfigError, DistBackend, DistConfig, DistName, TrainerConfig
from harness.runtime import accelerator, distributed, signals
from harness.runtime.distributed import World, choose_device, joined, launch, spawn_size
from harness.runtime.errors import Interrupted
from harness.runtime.gpus import Use

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_gpu_and_no_torchrun(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    see_gpus(monkeypatch, 0)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    yield
    torch.set_num_threads(threads)


def see_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(accelerator.Cuda, "lacks_kernels", False)


def config(name: DistName = DistName.single, nprocs: int | None = None, **more: object) -> Config:
    return Config(device="cpu", dist=DistConfig(name=name, nprocs=nprocs, **more))  # type: ignore


def test_one_rank_agrees_with_itself() -> None:
    """Without other ranks every collective is the value itself, and no process group is needed."""
    world = World(0, 1, 0, 1, CPU)
    values = torch.ones(2)
    assert world.total(values) is values
    assert (world.agreed("x"), world.largest(3, 1), world.smallest(0.5), world.is_main) == (
        "x",
        [3, 1],
        0.5,
        True,
    )
    assert world.gathered("x") == ["x"]


@pytest.mark.parametrize(
    ("name", "gpus", "local_rank", "expected"),
    [
        ("auto", 0, 1, "cpu"),
        ("auto", 2, 1, "cuda:1"),
        ("cuda", 2, 1, "cuda:1"),
        ("cpu", 2, 1, "cpu"),
    ],
)
def test_each_rank_has_a_device(
    monkeypatch: pytest.MonkeyPatch, name: str, gpus: int, local_rank: int, expected: str
) -> None:
    """The default is CUDA where there is some; each local rank has the GPU of its number."""
    see_gpus(monkeypatch, gpus)
    assert choose_device(name, local_rank, 2) == torch.device(expected)


def test_a_numbered_device_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda:1 is the second GPU for a single rank."""
    see_gpus(monkeypatch, 2)
    assert choose_device("cuda:1", 0, 1) == torch.device("cuda", 1)


@pytest.mark.parametrize("local_rank", [0, 1, 7])
def test_the_one_visible_gpu_is_the_rank_s_own(
    monkeypatch: pytest.MonkeyPatch, local_rank: int
) -> None:
    """A launcher that shows each of a node's ranks its own GPU alone calls that GPU 0 on every
    rank.
    """
    see_gpus(monkeypatch, 1)
    assert choose_device("auto", local_rank, 8) == torch.device("cuda", 0)


def test_more_ranks_than_visible_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several GPUs are visible, a rank beyond them has none."""
    see_gpus(monkeypatch, 2)
    with pytest.raises(ConfigError, match="^device=cuda: .* 2; torch sees 2"):
        choose_device("cuda", 2, 3)


@pytest.mark.parametrize(
    ("name", "gpus", "local_size", "text"),
    [
        ("gpu", 0, 1, "device=gpu .*use auto, cpu"),
        ("cuda", 0, 1, "device=cuda: torch sees no CUDA device; use device=cpu"),
        ("cuda:3", 2, 1, "device=cuda:3: .*no device 3; torch sees 2"),
        ("cuda:0", 2, 2, "device=cuda:0 is one device, not 2; use device=cuda"),
        ("meta", 0, 1, "device=meta .*use auto, cpu"),
        ("cuda:01", 0, 1, "device=cuda:01 is not valid; use auto, cpu"),
    ],
)
def test_a_device_that_cannot_be_had_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, gpus: int, local_size: int, text: str
) -> None:
    """The CPU is never taken silently where something else was asked for."""
    see_gpus(monkeypatch, gpus)
    with pytest.raises(ConfigError, match=f"^{text}"):
        choose_device(name, 0, local_size)


@pytest.mark.parametrize(
    ("tenants", "used_gib", "ranks", "expected"),
    [
        pytest.param([0, 0, 0], [0, 0, 0], 1, [0], id="idle"),
        pytest.param([1, 0, 0], [4, 0, 0], 1, [1], id="first is taken"),
        pytest.param([1, 1, 1], [40, 30, 20], 1, [2], id="emptiest"),
        # as a container sees others' processes
        pytest.param([0, 0, 0], [40, 0, 0], 2, [1, 2], id="memory only"),
        pytest.param([0, 1, 0], [0, 4, 0], 2, [0, 2], id="two ranks"),
        pytest.param([1, 1, 0], [4, 2, 0], 3, [0, 1, 2], id="all are needed"),
    ],
)
def test_idle_gpus_are_taken(
    monkeypatch: pytest.MonkeyPatch,
    tenants: list[int],
    used_gib: list[int],
    ranks: int,
    expected: list[int],
) -> None:
    """Ranks take GPUs that nobody uses, in their order, then those with most memory free."""
    see_gpus(monkeypatch, 3)
    found = [
        # the texts are in another order than the numbers
        Use(bool(tenants[i]), used_gib[i], f"{9 - i}.0 of 80.0 GB")
        for i in range(3)
    ]
    monkeypatch.setattr(accelerator, "use", lambda: found)
    monkeypatch.setattr(accelerator.Cuda, "name", "a card")
    assert distributed.gpus_for(ranks)[:ranks] == expected


def test_a_card_that_torch_has_no_kernels_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A V100 is no device for a torch whose kernels begin with Turing's."""
    see_gpus(monkeypatch, 1)
    monkeypatch.setattr(accelerator.Cuda, "lacks_kernels", True)
    monkeypatch.setattr(accelerator.Cuda, "name", "Tesla V100")
    with pytest.raises(ConfigError, match="^device=auto: .*V100"):
        choose_device("auto", 0, 1)


def test_mps_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """device=mps needs an Apple GPU."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="^device=mps: torch sees no Apple GPU"):
        choose_device("mps", 0, 1)


def test_several_ranks_on_mps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one such GPU, and no backend that works on it."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="^device=mps .* device=cpu"):
        choose_device("mps", 0, 2)


@pytest.mark.parametrize(
    ("device", "gpus", "nprocs", "expected"),
    [("auto", 4, None, 4), ("auto", 4, 2, 2), ("cpu", 4, 8, 8), ("cpu", 0, 3, 3)],
)
def test_spawn_starts_one_process_per_gpu_or_as_many_as_told(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, nprocs: int | None, expected: int
) -> None:
    """dist.nprocs=null counts the GPUs; on the CPU any number will do."""
    see_gpus(monkeypatch, gpus)
    chosen = config(DistName.spawn, nprocs)
    chosen.device = device
    assert spawn_size(chosen) == expected


@pytest.mark.parametrize(
    ("device", "gpus", "nprocs", "text"),
    [
        ("auto", 0, None, "dist.nprocs=null: "),
        ("cpu", 2, None, "dist.nprocs=null: "),
        ("cuda", 2, 3, "dist.nprocs=3: .* 2 GPUs; .*device=cpu"),
    ],
)
def test_an_impossible_number_of_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, nprocs: int | None, text: str
) -> None:
    """More processes than GPUs, or none to count, is a ConfigError that names dist.nprocs."""
    see_gpus(monkeypatch, gpus)
    chosen = config(DistName.spawn, nprocs)
    chosen.device = device
    with pytest.raises(ConfigError, match=f"^{text}"):
        spawn_size(chosen)


def test_torchrun_needs_torchrun() -> None:
    """dist=torchrun under plain python is refused with the command to use."""
    with pytest.raises(ConfigError, match="^dist=torchrun: RANK.*`torchrun --nproc-per-node"):
        job.check(config(DistName.torchrun))


def test_torchrun_tells_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun the places come from its environment; a world
    of one needs no process group.
    """
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with joined(0, config(DistName.torchrun)) as world:
        assert world == World(0, 1, 0, 1, CPU)
        assert not torch.distributed.is_initialized()


def test_nccl_needs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """dist.backend=nccl on the CPU is refused before anything is joined."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    with (
        pytest.raises(ConfigError, match="^dist.backend=nccl needs CUDA devices"),
        joined(0, config(DistName.spawn, 2, backend=DistBackend.nccl)),
    ):
        pass


@pytest.mark.parametrize(
    ("num_threads", "environment", "expected"),
    [(3, None, 3), (None, None, 1), (None, "2", None)],
    ids=["as set", "cores over ranks", "OMP_NUM_THREADS stands"],
)
def test_threads_are_fixed_for_the_run(
    monkeypatch: pytest.MonkeyPatch,
    num_threads: int | None,
    environment: str | None,
    expected: int | None,
) -> None:
    """The threads are trainer.num_threads, or the usable cores over the ranks unless
    OMP_NUM_THREADS says otherwise.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if environment is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    torch.set_num_threads(2)
    chosen = config()
    chosen.trainer = TrainerConfig(num_threads=num_threads)
    with joined(0, chosen):
        assert torch.get_num_threads() == (expected or 2)


def test_single_runs_here() -> None:
    """dist=single calls the worker in this process."""
    seen: list[tuple[int, str]] = []
    launch(lambda rank, job: seen.append((rank, job)), "job", config())
    assert seen == [(0, "job")]


def test_two_spawned_ranks_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two gloo ranks meet, sum and agree; a rank's own tensor stays its own."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # launch() sets them; this brings back what was before
    chosen = config(DistName.spawn, 2)
    chosen.trainer = TrainerConfig(num_threads=1)
    launch(jobs.join_and_agree, (chosen, tmp_path), chosen)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["world"] + first["device"] == [0, 2, 0, 2, "cpu", True]
    assert second["world"] + second["device"] == [1, 2, 1, 2, "cpu", False]
    assert (first["own"], second["own"]) == ([1.0, 10.0], [2.0, 20.0])
    for found in (first, second):
        assert found["total"] == [3.0, 30.0]
        assert found["copied"] == [0.0, 0.0]
        assert found["agreed"] == {"rank": 0}
        assert found["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert (found["largest"], found["smallest"], found["threads"]) == ([15, 0], 0.1, 1)


def test_one_rank_reads_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every type, shape and layout of tensors, attributes of containers, and the refusal."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    chosen = config(DistName.spawn, 2)
    chosen.trainer = TrainerConfig(num_threads=1)
    launch(jobs.share, (chosen, tmp_path), chosen)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    name, same, *rest = first
    assert name == "x.pt" and len(same) == 9 and all(same.values())
    assert rest == [True, True, {"": {"version": 2}}, "damaged"]


@pytest.mark.parametrize(
    ("received", "raised"),
    [([], RuntimeError), ([(15, 0.0)], Interrupted)],
    ids=["alone", "after a signal"],
)
def test_a_rank_that_left_by_a_signal_is_no_fault_of_the_others(
    received: list[tuple[int, float]], raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal is what is told, and not what the transport says of a rank that is gone."""

    def closed(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "all_reduce", closed)
    monkeypatch.setattr(signals, "_received", received)
    with pytest.raises(raised):
        World(0, 2, 0, 2, torch.device("cpu")).smallest(1.0)


ONE_OF_TWO = """
from harness.config import Config, DistConfig, DistName
from harness.runtime import distributed

distributed._PATIENCE_S = 1.0
dist = DistConfig(name=DistName.torchrun, timeout_s={timeout_s})
with distributed.joined(0, Config(device={device!r}, dist=dist)):
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "named"),
    [
        ({0: "cpu"}, "rank 1$"),
        ({1: "cpu"}, r"rank 0, .*127\.0\.0\.1:\d+$"),
        # which has no such device
        ({0: "cpu", 1: "cuda:7"}, f"rank 1 on {re.escape(socket.gethostname())}$"),
    ],
    ids=["second", "first", "failed"],
)
def test_a_rank_that_is_missing_is_named(devices: dict[int, str], named: str) -> None:
    """The rank that waits says for whom, with the host of one that came and left."""
    port = get_free_port()
    # both come, which takes a while on busy cores
    timeout_s = 10.0 if len(devices) == 2 else 5.0 if 0 in devices else 8.0
    ranks = {
        rank: subprocess.Popen(
            [
                sys.executable,
                "-c",
                ONE_OF_TWO.format(device=device, timeout_s=timeout_s),
            ],
            env=os.environ
            | {"RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, device in devices.items()
    }
    said = [rank.communicate(timeout=60)[1] for rank in ranks.values()]
    assert all(rank.returncode for rank in ranks.values())
    assert re.search(f"^wellfed: .*{named}", said[0], re.MULTILINE)
