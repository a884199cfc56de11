"""Puts the hooks into torch, and takes them out again.

Each stands around torch's own function, which it calls once with the same arguments: nothing is
drawn from a random generator, no ``iter()`` is added. A process that is forked has none of them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader
from torch.utils.data._utils import worker as _torch_worker

from harness.config import ConfigError
from harness.hooks import workers
from harness.hooks.loops import Followed, Loops
from harness.runtime.errors import RunError

_worker: Any = _torch_worker
# those of this process
_loops: Loops | None = None


@contextmanager
def installed(loops: Loops) -> Iterator[None]:
    """Tells ``loops`` of all that torch does in the block."""
    global _loops
    with ExitStack() as stack:
        for owner, name, around in (
            (dataloader.DataLoader, "__init__", _making),
            (dataloader.DataLoader, "__iter__", iterating),
            (dataloader._BaseDataLoaderIter, "__next__", fetching),
            (torch.Tensor, "to", _copying),
            (torch.Tensor, "cuda", _copying),
            (torch.autograd, "backward", _backward),
        ):
            original = getattr(owner, name)
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, functools.wraps(original)(around(original)))
        hook = register_optimizer_step_post_hook(_updated)
        stack.callback(hook.remove)
        _loops = loops
        stack.callback(_forget)
        yield


def _forget() -> None:
    global _loops
    _loops = None


os.register_at_fork(after_in_child=_forget)


def _tell(method: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Returns what a ``method`` of ``Loops`` returns; None: nothing is watched.

    After a fault of ours nothing is watched any more.
    """
    global _loops
    loops = _loops
    if loops is None:
        return None
    try:
        return method(loops, *args, **named)
    except Exception as error:
        known = isinstance(error, RunError | ConfigError)
        loops.fault = str(error) if known else f"a fault of ours, {type(error).__name__}: {error}"
        _loops = None
        return None


def _making(make: Callable[..., None]) -> Callable[..., None]:
    def wrapper(loader: Any, *args: Any, **named: Any) -> None:
        make(loader, *args, **named)
        _tell(Loops.made, loader)

    return wrapper


def iterating(iterate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a loader's ``__iter__`` that tells of its passes."""

    def wrapper(loader: Any) -> Any:
        own = _tell(Loops.open, loader)
        if own is None:
            return iterate(loader)
        iterator = _timed(loader, own.loader, iterate)
        _tell(Loops.opened, own, iterator)
        return iterator

    return wrapper


def _timed(loader: Any, followed: Followed, iterate: Callable[[Any], Any]) -> Any:
    """Returns the iterator of a new pass, whose workers are timed."""
    workers.hook_libraries()
    if followed.meter is None:
        # where there is no shared memory, or nothing of torch's, the loop goes on untimed
        with suppress(RuntimeError, OSError, ValueError, AttributeError):
            followed.meter = workers.Meter(loader.dataset, loader.num_workers)
    if followed.meter is None:
        return iterate(loader)
    _worker._worker_loop = workers.Worker(followed.meter)
    try:
        with workers.timed(followed.meter, 0):
            return iterate(loader)
    finally:
        _worker._worker_loop = workers.torchs_loop


def fetching(fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns an iterator's ``__next__`` that tells of its batches."""

    def wrapper(iterator: Any) -> Any:
        own = _tell(Loops.ask, iterator)
        if own is None:
            return fetch(iterator)
        try:
            batch = fetch(iterator)
        except BaseException as error:
            _tell(Loops.lack, own, is_end=isinstance(error, StopIteration))
            raise
        _tell(Loops.take, own, iterator, batch)
        return batch

    return wrapper


def _copying(copy: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
        given = (*args, *named.values())
        start = None
        # most calls change only the type
        if not (given and all(isinstance(each, torch.dtype) for each in given)):
            start = _tell(Loops.copying, tensor)
        made = copy(tensor, *args, **named)
        if start is not None:
            _tell(Loops.copied, made, start)
        return made

    return wrapper


def _backward(backward: Callable[..., None]) -> Callable[..., None]:
    def wrapper(*args: Any, **named: Any) -> None:
        _tell(Loops.backward)
        backward(*args, **named)

    return wrapper


def _updated(optimizer: Any, args: Any, kwargs: Any) -> None:
    _tell(Loops.updated, optimizer)
