"""Recognizes the steps, evaluations and copies in a watched loop.

Grouping is only possible in hindsight. A pass over a loader counts as training if an optimizer
steps during it, and otherwise as evaluation. A step lasts from a request for a batch to the first
request after an optimizer's step, so it may involve several batches, loaders or optimizers.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from operator import length_hint
from pathlib import Path
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from ..clock.clock import StepClock, images_in
from ..feed.base import FeedSettings
from ..runtime import accelerator
from .workers import Meter, is_composed

# minimum time between synchronizations when evaluations may start
_SETTLE_S = 1.0


@dataclass(eq=False)
class WatchedLoader:
    """A loader created by the script.

    Attributes:
        where: the file and line that created it.
        settings: its settings, under torch's names.
        dataset: identity and length of its dataset, which identify a loader that is remade for each
            epoch.
        images: its dataset, if that has a ``Compose``.
        streams: whether its dataset is iterable; each worker then iterates over all of it.
        meter: times its workers; None before the first pass, or if they cannot be timed.
        trains: whether an optimizer has stepped during a pass over it.
        passes: number of passes completed or abandoned.
        batches: number of batches delivered.
        waited_s: the script's time in ``next()``.
        starts: number of passes, except the first, that started their own workers.
        started_s: time from the beginning of these passes to their first batch.
        remade: whether it was remade for later passes.
        elsewhere: whether a thread other than the training thread iterates over it.
    """

    where: str
    settings: FeedSettings
    dataset: tuple[int, int] = (0, 0)
    images: Any = None
    streams: bool = False
    meter: Meter | None = None
    trains: bool = False
    passes: int = 0
    batches: int = 0
    waited_s: float = 0.0
    starts: int = 0
    started_s: float = 0.0
    remade: bool = False
    elsewhere: bool = False


@dataclass(eq=False)
class _Pass:
    """One pass over a loader.

    Attributes:
        told: whether the clock records its waits.
        wait: the recorded wait for a batch, while it lasts.
        asked_s: when a batch was requested.
        updates: optimizer steps since it began.
        graded: whether it delivered a batch with gradients enabled, and so may train.
        last_s: when it delivered its last batch.
        wraps: whether its batches come from another followed loader, which counts them.
    """

    loader: WatchedLoader
    began_s: float
    told: bool = False
    wait: ExitStack = field(default_factory=ExitStack)
    asked_s: float = 0.0
    updates: int = 0
    graded: bool = False
    last_s: float = 0.0
    wraps: bool = False


class LoopTracker:
    """The loops of the thread that created this object.

    Attributes:
        clock: the training clock; None before the first update.
        followed: the loaders, in order of first use.
        updates: number of steps, however many optimizers step in one.
        forward_s: host seconds from a batch to ``backward``, summed over ``forwards``.
        evaluated_s: duration of passes without an update.
        own: the device of the network's weights.
        rank, world_size: this process's, from torch.distributed.
        fault: the internal error that ended watching, or empty.
        thread: the watched thread; other threads call only ``open``.
    """

    window_s = 1.0
    clock: StepClock | None = None
    updates = 0
    forward_s = 0.0
    forwards = 0
    evaluated_s = 0.0
    rank = 0
    world_size = 1
    fault = ""
    # the pass whose batches begin steps
    _main: _Pass | None = None
    # since the last update
    _samples = 0
    # when the batch whose gradients are pending was delivered
    _handed_s: float | None = None
    _closed_s = _settled_s = 0.0

    def __init__(self) -> None:
        self.thread = get_ident()
        self.followed: list[WatchedLoader] = []
        self.own = accelerator.get("cpu")
        self._now: Callable[[], float] = time.perf_counter
        self._known = WeakKeyDictionary[Any, WatchedLoader]()
        self._passes = WeakKeyDictionary[Any, _Pass]()
        # passes that delivered a batch since the last recorded one did; possible evaluations
        self._undecided: list[_Pass] = []
        # the pass that is being opened or asked for a batch
        self._pending: _Pass | None = None
        # the optimizers that stepped since the last recorded request for a batch
        self._stepped = set[int]()
        # the current ``computing`` block
        self._block = ExitStack()

    def on_start(self) -> None:
        """Called at the first update."""

    def on_window(self, clock: StepClock) -> None:
        """Called after every ``window_s`` seconds of steps."""

    def on_pass(self, clock: StepClock) -> None:
        """Called at the end of each training pass."""

    def open(self, loader: Any) -> _Pass | None:
        """Returns a new pass over ``loader``, which is about to create an iterator.

        Returns None in other threads.
        """
        own = _Pass(self._loader(loader), self._now())
        if get_ident() != self.thread:
            # wellfed.tune starts its own loaders in a thread
            ours, theirs = (name.split(".")[0] for name in (__name__, type(loader).__module__))
            own.loader.elsewhere = ours != theirs
            return None
        self._begin_request(own)
        self._end_step()
        clock = self.clock
        own.told = own.loader.trains and torch.is_grad_enabled()
        if clock and own.told:
            self._left(graded=False)
            if self._main and self._main.loader is own.loader:
                # the script left it by break
                self._ended(self._main)
            if self._main is None:
                clock.start_epoch()
            own.wait.enter_context(clock.waiting())
        elif clock and self._main and own.began_s - self._settled_s > _SETTLE_S:
            # otherwise, the device's pending work would be missing from the steps
            clock.settle()
            self._settled_s = self._now()
        return own

    def opened(self, own: _Pass, iterator: Any) -> None:
        """Records the iterator of a pass."""
        own.wait.close()
        if self._end_request(own):
            return
        self._passes[iterator] = own
        if own.told and self._main is None:
            self._main = own

    def ask(self, iterator: Any) -> _Pass | None:
        """Records a request for a batch; returns its pass, if followed."""
        own = self._passes.get(iterator)
        if own is None or own.wraps:
            return None
        self._begin_request(own)
        own.asked_s = self._now()
        if self.clock and own.told:
            self._end_step()
            if own is self._main:
                self._left(graded=True)
                self._undecided.clear()
            self._block.close()
            own.wait.enter_context(self.clock.waiting())
        return own

    def take(self, own: _Pass, iterator: Any, batch: Any) -> None:
        """Records the requested batch."""
        if self._end_request(own):
            return
        clock = self.clock
        loader = own.loader
        if clock and own.told and loader.meter:
            clock.arrived(loader.meter.stamps(getattr(iterator, "_rcvd_idx", 1) - 1))
        own.wait.close()
        now_s = self._now()
        loader.waited_s += now_s - own.asked_s
        loader.batches += 1
        if loader.settings.persistent_workers is False and loader.passes and not own.last_s:
            loader.starts += 1
            loader.started_s += now_s - own.began_s
        samples = images_in(batch)
        if not loader.settings.batch_size:
            # the dataset makes its own batches
            loader.settings = replace(loader.settings, batch_size=samples)
        if clock is None or own.told:
            self._samples += samples
        if clock is None or not own.told:
            if torch.is_grad_enabled():
                own.graded = True
                self._left(graded=False)
            if own not in self._undecided:
                self._undecided.append(own)
        else:
            self._block.enter_context(clock.computing())
        self._handed_s = own.last_s = self._now()

    def lack(self, own: _Pass, *, is_end: bool) -> None:
        """Records that there is no batch: the pass has ended or failed."""
        if self._end_request(own):
            return
        own.wait.close()
        own.loader.waited_s += self._now() - own.asked_s
        if is_end:
            self._ended(own)

    def _begin_request(self, own: _Pass) -> None:
        """Records a request to the loader of ``own``; a pending one to another loader wraps it."""
        outer, self._pending = self._pending, own
        if outer is not None and outer is not own:
            outer.wraps = True
            outer.wait.close()
            if not outer.loader.batches:
                self.followed = [each for each in self.followed if each is not outer.loader]

    def _end_request(self, own: _Pass) -> bool:
        """Ends a request; returns whether an inner loader counts its batch."""
        self._pending = None
        return own.wraps

    def _left(self, *, graded: bool) -> None:
        """Ends evaluations that were abandoned or continued without updates.

        If ``graded``, includes passes with gradients enabled, which did not train.
        """
        for own in [*self._undecided]:
            if not own.updates and (graded or not own.graded):
                self._ended(own, own.last_s)
                self._passes = WeakKeyDictionary(
                    {key: each for key, each in self._passes.items() if each is not own}
                )

    def _ended(self, own: _Pass, ended_s: float | None = None) -> None:
        """Records the end of a pass."""
        clock = self.clock
        own.loader.passes += 1
        if own in self._undecided:
            self._undecided.remove(own)
        if clock and own is self._main:
            clock.end_epoch()
            self._main = None
            self._samples = 0
            self.on_pass(clock)
        elif not own.updates:
            self.evaluated_s += (ended_s or self._now()) - own.began_s
            if clock and self._main:
                clock.left_out("evaluate", own.began_s)

    def updated(self, optimizer: Any) -> None:
        """Records an optimizer step that was just taken.

        All steps for a batch are counted as one update, whether they come from several optimizers,
        from several parameters within ``backward``, or from one optimizer wrapped around another.
        """
        # without a loader, a step ends when an optimizer steps again
        if self._main is None and id(optimizer) in self._stepped:
            self._stepped.clear()
        self.updates += not self._stepped
        self._stepped.add(id(optimizer))
        clock = self.clock or self._start(optimizer)
        for own in [each for each in self._undecided if each.graded]:
            own.told = own.loader.trains = True
            if self._main is None:
                self._main = own
                clock.start_epoch()
            self._undecided.remove(own)
        for own in self._passes.values():
            own.updates += 1
        clock.computed()

    def _start(self, optimizer: Any) -> StepClock:
        """Creates and returns the clock, once the weights are known."""
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        device = next(weights).device
        clock = self.clock = StepClock(device)
        self._now = clock.now
        self.own = accelerator.get(device)
        dist = torch.distributed
        if dist.is_available() and dist.is_initialized():
            self.rank = dist.get_rank()
            self.world_size = dist.get_world_size()
        self.on_start()
        self._closed_s = self._now()
        return clock

    def backward(self) -> None:
        """Records that gradients are about to be computed."""
        # the first one takes longer
        if self.clock and self._handed_s is not None:
            self.forward_s += self._now() - self._handed_s
            self.forwards += 1
            self._handed_s = None

    @property
    def forward_ms(self) -> float | None:
        """Mean host ms from a batch to ``backward``; None if unknown or not on a CPU."""
        if not self.forwards or not self.own.is_host:
            return None
        return 1e3 * self.forward_s / self.forwards

    def copying(self, tensor: Tensor) -> Any:
        """Returns the start event for ``copied``, if a tensor may be copied to the device."""
        own = self.own
        if self.clock is None or not own.has_streams or own.holds(tensor):
            return None
        start = self.clock.event(own)
        start.record(own.stream())
        return start

    def copied(self, made: Tensor, start: Any) -> None:
        """Records a copy, unless the tensor stayed in place."""
        own = self.own
        if self.clock and own.holds(made):
            end = self.clock.event(own)
            end.record(own.stream())
            self.clock.copied(start, end)

    def end(self, *, completed: bool) -> None:
        """Ends the current step; if ``completed``, also unfinished passes."""
        self._end_step()
        self._block.close()
        if completed:
            self._left(graded=False)
        if self.clock and self._main:
            # break left it if its iterator is gone
            self._main.loader.passes += completed and self._main not in self._passes.values()
            self.clock.end_epoch()
            self._main = None

    def training(self) -> list[WatchedLoader]:
        """Returns the loaders that fed updates, the one with the most batches first."""
        fed = [each for each in self.followed if each.trains]
        return sorted(fed, key=lambda each: -each.batches)

    @property
    def main(self) -> WatchedLoader | None:
        """The loader that fed the most updates."""
        return next(iter(self.training()), None)

    def _end_step(self) -> None:
        """Ends the running step, if an optimizer has stepped in it."""
        updated, self._stepped = self._stepped, set()
        clock = self.clock
        # a loop that prefetches takes its last step after the end of the pass
        if not updated or clock is None or self._main is None:
            return
        self._block.close()
        clock.step(self._samples)
        self._samples = 0
        now_s = self._now()
        if now_s - self._closed_s >= self.window_s:
            self._closed_s = now_s
            with clock.noted("watching"):
                self.on_window(clock)

    def made(self, loader: Any) -> WatchedLoader:
        """Returns the record of a new loader."""
        dataset = getattr(loader, "dataset", None)
        known = id(dataset), length_hint(dataset)
        # other datasets would stay in memory for nothing
        kept = any(map(is_composed, getattr(dataset, "__dict__", {}).values()))
        is_stream = isinstance(dataset, IterableDataset)
        own = self._known[loader] = WatchedLoader(
            caller(), _settings(loader), known, dataset if kept else None, is_stream
        )
        return own

    def _loader(self, loader: Any) -> WatchedLoader:
        """Returns the record of a loader in use."""
        own = self._known.get(loader) or self.made(loader)
        alive = [id(each) for each in self._known.values()]
        for other in self.followed:
            if (other.where, other.settings) == (own.where, own.settings) and (
                other.dataset[0] == own.dataset[0]
                # the dataset may be remade too
                or (other.dataset[1] == own.dataset[1] and id(other) not in alive)
            ):
                self._known[loader] = other
                other.remade |= other is not own
                return other
        self.followed.append(own)
        return own


def _settings(loader: Any) -> FeedSettings:
    """Returns a loader's settings, with defaults for those that a foreign loader lacks."""

    def told(name: str, other: Any) -> Any:
        value = getattr(loader, name, None)
        return other if value is None else value

    return FeedSettings(
        told("batch_size", getattr(told("batch_sampler", None), "batch_size", 0)),
        told("num_workers", 0),
        told("pin_memory", False),
        told("prefetch_factor", None),
        told("persistent_workers", False),
        told("timeout", 0.0),
        "",
    )


def caller() -> str:
    """Returns the file and line of the script's current frame, such as ``train.py:42``."""
    inside = (os.path.dirname(torch.__file__), str(Path(__file__).parents[1]), sys.prefix)
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*inside, "<frozen")):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
