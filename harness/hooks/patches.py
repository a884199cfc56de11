"""Installs the hooks in torch, and removes them.

Each wraps a torch function and calls it once with the same arguments: no random numbers are drawn,
and no ``iter()`` is added. Forked processes have no hooks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import get_ident
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader
from torch.utils.data._utils import worker as _torch_worker

from ..config import ConfigError
from ..runtime.errors import RunError
from . import workers
from .loops import LoopTracker, WatchedLoader, caller

_worker: Any = _torch_worker
# this process's tracker
_loops: LoopTracker | None = None
# changes a loader's arguments in a trial
change: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]] | None = None
# restores torch's functions
_hooks = ExitStack()


@contextmanager
def installed(loops: LoopTracker) -> Iterator[None]:
    """Reports calls to torch in the block to ``loops``."""
    global _loops, _hooks
    with ExitStack() as stack:
        _hooks = stack
        for owner, name, hook in (
            (dataloader.DataLoader, "__init__", _make),
            (dataloader.DataLoader, "__iter__", iterate),
            (dataloader._BaseDataLoaderIter, "__next__", fetch),
            (torch.Tensor, "to", _copy),
            (torch.Tensor, "cuda", _copy),
            (torch.autograd, "backward", _backward),
        ):
            original = getattr(owner, name)
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, _around(original, hook))
        updated = register_optimizer_step_post_hook(
            lambda *args: _tell(LoopTracker.updated, args[0])
        )
        stack.callback(updated.remove)
        _loops = loops
        stack.callback(_forget)
        yield


def _around(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **named: Any) -> Any:
        return hook(original, *args, **named)

    return wrapper


def _forget() -> None:
    global _loops
    _loops = None


os.register_at_fork(after_in_child=lambda: _hooks.close())


def _tell(method: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Calls a ``method`` of ``LoopTracker``; returns None if nothing is watched here.

    An internal error ends watching.
    """
    loops = _loops
    if loops is None or (get_ident() != loops.thread and method is not LoopTracker.open):
        return None
    try:
        return method(loops, *args, **named)
    except Exception as error:
        known = isinstance(error, RunError | ConfigError)
        text = f"internal error in wellfed, {type(error).__name__}: {error}"
        loops.fault = str(error) if known else text
        _forget()
        return None


def _make(make: Callable[..., None], loader: Any, *args: Any, **named: Any) -> None:
    if change is not None:
        args, named = change(make, caller(), *args, **named)
    make(loader, *args, **named)
    _tell(LoopTracker.made, loader)


def iterate(make: Callable[[Any], Any], loader: Any) -> Any:
    """Returns the iterator that ``make`` creates from a loader; ``fetch`` records its batches."""
    own = _tell(LoopTracker.open, loader)
    if own is None:
        return make(loader)
    iterator = _timed(loader, own.loader, make)
    _tell(LoopTracker.opened, own, iterator)
    return iterator


def _timed(loader: Any, followed: WatchedLoader, make: Callable[[Any], Any]) -> Any:
    """Returns the iterator of a new pass, whose workers are timed."""
    workers.hook_libraries()
    if followed.meter is None:
        # without shared memory, or torch's internals, the loop continues untimed
        with suppress(RuntimeError, OSError, ValueError, AttributeError):
            followed.meter = workers.Meter(loader.dataset, loader.num_workers)
    if followed.meter is None:
        return make(loader)
    _worker._worker_loop = followed.meter
    try:
        with followed.meter.timed(0):
            return make(loader)
    finally:
        _worker._worker_loop = workers.torchs_loop


def fetch(take: Callable[[Any], Any], iterator: Any) -> Any:
    """Returns the batch that ``take`` takes from an iterator, and records it."""
    own = _tell(LoopTracker.ask, iterator)
    if own is None:
        return take(iterator)
    try:
        batch = take(iterator)
    except BaseException as error:
        _tell(LoopTracker.lack, own, is_end=isinstance(error, StopIteration))
        raise
    _tell(LoopTracker.take, own, iterator, batch)
    return batch


def _copy(copy: Callable[..., Any], tensor: torch.Tensor, /, *args: Any, **named: Any) -> Any:
    given = (*args, *named.values())
    start = None
    # most calls change only the type
    if not (given and all(isinstance(each, torch.dtype) for each in given)):
        start = _tell(LoopTracker.copying, tensor)
    made = copy(tensor, *args, **named)
    if start is not None:
        _tell(LoopTracker.copied, made, start)
    return made


def _backward(backward: Callable[..., None], *args: Any, **named: Any) -> None:
    _tell(LoopTracker.backward)
    backward(*args, **named)
