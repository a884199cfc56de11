"""Starts and coordinates a run's ranks, and selects their devices."""

from __future__ import annotations

import copy
import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.utils._pytree import tree_leaves

from ..config import Config, ConfigError, DistBackend, DistName
from ..suggestions import shell_word
from . import accelerator, limits, signals
from .errors import CheckpointError, listed, say
from .launch import command, run_processes, setting

# delay before missing ranks are reported
_PATIENCE_S = 30.0


@contextmanager
def _together() -> Iterator[None]:
    """A block in which ranks communicate.

    Raises:
        Interrupted: the block failed after a signal, because another rank has already exited.
    """
    try:
        yield
    except RuntimeError:
        signals.check()
        raise


@dataclass(frozen=True, slots=True)
class World:
    """A rank and its position among all ranks.

    Attributes:
        rank: 0 to size - 1 across all nodes; rank 0 prints, logs and saves.
        size: number of ranks.
        local_rank: 0 to local_size - 1 on this node.
        local_size: number of ranks on this node.
        device: the device for this rank's network.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that prints, logs and saves."""
        return self.rank == 0

    @_together()
    def total(self, values: Tensor) -> Tensor:
        """Returns the sum of ``values`` over all ranks; a new tensor if there are several."""
        if self.size == 1:
            return values
        summed = values.clone()
        dist.all_reduce(summed)
        return summed

    def agreed(self, value: Any) -> Any:
        """Returns rank 0's ``value`` (any picklable object) on every rank."""
        return self.gathered(value)[0]

    @_together()
    def gathered(self, value: Any) -> list[Any]:
        """Returns every rank's ``value`` (any picklable object), in rank order."""
        if self.size == 1:
            return [value]
        box = [None] * self.size
        dist.all_gather_object(box, value)
        return box

    @_together()
    def largest(self, *values: float) -> list[float]:
        """Returns the elementwise maximum of ``values`` over all ranks."""
        if self.size == 1:
            return list(values)
        box = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        return list(box.tolist())

    def smallest(self, value: float) -> float:
        """Returns the minimum of ``value`` over all ranks."""
        return -self.largest(-value)[0]

    @_together()
    def copy_from(self, source: int, tensors: Iterable[Tensor]) -> None:
        """Gives every rank the ``tensors`` from the rank ``source``, in place."""
        for tensor in tensors if self.size > 1 else ():
            # in index order, and on a device from which the backend can send it
            sent = tensor.to(self.device).contiguous()
            # gloo and NCCL do not know every type
            dist.broadcast(sent.view(-1).view(torch.uint8), src=source)
            tensor.copy_(sent)

    def shared(self, source: int, read: Callable[[], Any]) -> Any:
        """Returns on every rank what ``read`` returns on the rank ``source``.

        The result consists of containers of CPU tensors, which are sent one at a time so that no
        rank holds two copies.

        Raises:
            CheckpointError: ``read`` raised it; it is then raised on every rank.
        """
        if self.size == 1:
            return read()
        found: Any = None
        if self.rank == source:
            try:
                found = read()
            except CheckpointError as error:
                found = error
        blank = self.gathered(_blank(found, "meta"))[source]
        if isinstance(blank, CheckpointError):
            raise blank
        if self.rank != source:
            found = _blank(blank, "cpu")
        self.copy_from(source, filter(torch.is_tensor, tree_leaves(found)))
        return found


def _blank(tree: Any, device: str) -> Any:
    """Returns a copy of ``tree`` with uninitialized tensors on ``device``."""
    tensors = filter(torch.is_tensor, tree_leaves(tree))
    # tree_map would lose attributes, such as the _metadata of a module's state
    return copy.deepcopy(
        tree, {id(each): torch.empty_like(each, device=device) for each in tensors}
    )


def launch(worker: Callable[[int, Any], Any], job: Any, config: Config) -> None:
    """Runs ``worker(local_rank, job)`` in every process that ``dist=`` starts on this node."""
    if config.dist.name is DistName.spawn:
        # the peers of a lost rank would print C++ stack traces
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["MASTER_PORT"] = str(get_free_port())
        run_processes(worker, job, spawn_size(config), config.checkpoint.grace_s)
    else:
        worker(int(os.environ.get("LOCAL_RANK", "0")), job)


def resume_command(
    config: Config, world: World, overridden: Iterable[str], more: Sequence[str], *without: str
) -> str:
    """Returns the command that restarts a run, with ``more`` replacing its own settings.

    Args:
        config: the run's settings.
        world: one of its ranks.
        overridden: its command-line settings, including flags such as ``--config-name=x``.
        more: settings for the new command.
        without: names of settings to omit.
    """
    ranks = None
    if config.dist.name is DistName.torchrun:
        # multi-node runs have their own launcher
        one_node = world.size == world.local_size
        ranks = f"--nproc-per-node={world.local_size}" if one_node else "..."
    replaced = {*without, *map(setting, more)}
    kept = [word for word in overridden if setting(word) not in replaced]
    return " ".join(map(shell_word, [*command(ranks), *kept, *more]))


def spawn_size(config: Config) -> int:
    """Returns how many processes ``dist=spawn`` starts on this node."""
    gpus = accelerator.count() if config.device in ("auto", "cuda") else 0
    nprocs = config.dist.nprocs or gpus
    if not nprocs:
        raise ConfigError(
            "dist.nprocs=null: there are no GPUs to count; set the number of processes, such as "
            "dist.nprocs=2"
        )
    if gpus and nprocs > gpus:
        raise ConfigError(
            f"dist.nprocs={nprocs}: there are only {gpus} GPUs; lower it or set device=cpu"
        )
    return nprocs


def _store(prefix: str, hosts: bool, timeout_s: float) -> Any:
    """Returns the store for all ranks, on the rank that ``hosts`` it or in torchrun's agent."""
    environ = os.environ
    store = TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=hosts and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
    return PrefixStore(prefix, store)


def _name_absent(prefix: str, rank: int, size: int) -> None:
    """Prints which ranks are missing; ranks other than 0 report only rank 0."""
    absent = []
    try:
        store = _store(prefix, hosts=False, timeout_s=5.0)
        for i in range(size if rank == 0 else 0):
            if store.check([f"ready/{i}"]):
                continue
            known = store.check([f"host/{i}"])
            absent.append(f"rank {i}" + (f" on {store.get(f'host/{i}').decode()}" if known else ""))
    except RuntimeError:
        address = "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
        absent = [f"rank 0, which should be listening on {address}"]
    if absent:
        say(f"waiting for {listed(absent)}")


@contextmanager
def _rendezvous(config: Config, place: Path, rank: int, size: int) -> Iterator[Any]:
    """A block in which this rank prepares to meet the others; yields the shared store."""
    # restarts and sweep jobs under torchrun share its store; nodes may start in different folders
    inside = str(place).removeprefix(os.getcwd())
    prefix = f"{inside}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    late = Timer(_PATIENCE_S, _name_absent, (prefix, rank, size))
    late.daemon = True
    late.start()
    try:
        store = _store(prefix, rank == 0, config.dist.timeout_s)
        store.set(f"host/{rank}", socket.gethostname())
        yield store
    finally:
        late.cancel()
        # a thread waiting in torch's store would abort a process that exits
        late.join()


def gpus_for(local_size: int) -> list[int]:
    """Returns the visible GPUs, idle ones first, then by free memory.

    Logs which GPUs for this node's ``local_size`` ranks are used by other processes.
    """
    order = [*range(accelerator.count())]
    # a launcher may have bound each rank to its GPU's cores
    if len(order) > local_size:
        order.sort(
            key=lambda i: (
                accelerator.get(f"cuda:{i}").lacks_kernels,
                (accelerator.use()[i] or (False, 0))[:2],
            )
        )
    for i in order[:local_size]:
        if (found := accelerator.use()[i]) and not found.is_idle:
            say(f"GPU {i} is already in use: {found.text} of memory allocated")
    return order


def _agreed_gpus(store: Any, rank: int, local_rank: int, local_size: int) -> Sequence[int]:
    """Returns this node's GPUs as seen by its first rank; empty for torch's order."""
    found = gpus_for(local_size) if local_rank == 0 else []
    if accelerator.count() <= local_size:
        return found
    # a rank would mistake earlier ranks for other users' processes
    key = f"gpus/{rank - local_rank}"
    if local_rank == 0:
        store.set(key, json.dumps(found))
    return list(json.loads(store.get(key)))


def _prepared(
    config: Config, local_rank: int, local_size: int, gpus: Sequence[int]
) -> torch.device:
    """Selects and returns this rank's device, one of ``gpus``; fixes the number of threads."""
    device = choose_device(config.device, local_rank, local_size, gpus)
    own = accelerator.get(device)
    own.make_current()
    if accelerator.count() >= local_size > 1 and own.pci:
        near = gpus or range(local_size)
        limits.bind([accelerator.get(f"cuda:{near[i]}").pci for i in range(local_size)], local_rank)
    # results are bitwise equal only for a fixed number of threads
    threads = config.trainer.num_threads
    if not threads and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, int(limits.measure(local_size).cores))
    if threads:
        torch.set_num_threads(threads)
    return device


@contextmanager
def joined(local_rank: int, config: Config, place: Path = Path()) -> Iterator[World]:
    """A block in which this rank has a ``World`` and its process group.

    The run folder ``place`` identifies the rendezvous.

    Raises:
        ConfigError: the device or the backend is unavailable.
    """
    kind = config.dist.name
    rank = local_rank
    size = local_size = spawn_size(config) if kind is DistName.spawn else 1
    if kind is DistName.torchrun:
        rank, size, local_size = (
            int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        )
    chooses = config.device in ("auto", "cuda")
    if size == 1:
        device = _prepared(config, local_rank, 1, gpus_for(1) if chooses else [])
        yield World(rank, 1, local_rank, 1, device)
        return
    asked = config.dist.backend
    try:
        with _rendezvous(config, place, rank, size) as store:
            gpus = _agreed_gpus(store, rank, local_rank, local_size) if chooses else []
            device = _prepared(config, local_rank, local_size, gpus)
            own = accelerator.get(device)
            if asked is DistBackend.nccl and own.collective != "nccl":
                raise ConfigError(
                    f"dist.backend=nccl needs CUDA devices, but this run uses {own.kind}; use "
                    "auto or gloo"
                )
            store.set(f"ready/{rank}", "")
            dist.init_process_group(
                own.collective if asked is DistBackend.auto else asked.name,
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=config.dist.timeout_s),
                device_id=own.place,
            )
        yield World(rank, size, local_rank, local_size, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def choose_device(
    name: str, local_rank: int, local_size: int, gpus: Sequence[int] = ()
) -> torch.device:
    """Returns this rank's device for ``device=name``; never falls back to the CPU.

    Args:
        name: auto, cpu, cuda, cuda:N or mps.
        local_rank: 0 to ``local_size`` - 1.
        local_size: number of ranks on this node.
        gpus: GPUs for this node's ranks, by local rank; empty for torch's order.

    Raises:
        ConfigError: the name is unknown, or the device is missing or unusable.
    """
    if not re.fullmatch(r"auto|cpu|mps|cuda(:(0|[1-9][0-9]?))?", name):
        raise ConfigError(f"device={name} is not valid; use auto, cpu, cuda, cuda:N or mps")
    if name == "auto" and not accelerator.count():
        return torch.device("cpu")
    device = torch.device("cuda" if name == "auto" else name)
    if device.type == "cuda":
        count = accelerator.count()
        if count == 0:
            raise ConfigError(
                f"device={name}: torch sees no CUDA device; use device=cpu or device=auto"
            )
        if device.index is not None and local_size > 1:
            raise ConfigError(f"device={name} is one device, not {local_size}; use device=cuda")
        # a launcher may show each rank only its own GPU, as Slurm's --gpus-per-task=1 does
        place = local_rank if count > 1 else 0
        index = gpus[place] if place < len(gpus) else place
        if device.index is not None:
            index = device.index
        if index >= count:
            raise ConfigError(f"device={name}: there is no device {index}; torch sees {count}")
        own = accelerator.get(torch.device("cuda", index))
        if own.lacks_kernels:
            raise ConfigError(
                f"device={name}: torch {torch.__version__} has no kernels for GPU {index} "
                f"({own.name}); install a torch build that has them, such as one for CUDA 12.6, or "
                "set device=cpu"
            )
        return own.device
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device=mps: torch sees no Apple GPU; use device=cpu or device=auto")
    if device.type == "mps" and local_size > 1:
        raise ConfigError(f"device=mps is one device, not {local_size}; use device=cpu")
    return device
