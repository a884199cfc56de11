"""One batch at a time from the host to the device, made ready there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from harness.feed.normalise import Normalise
from harness.runtime.accelerator import Accelerator
from harness.watch.clock import StepClock
from harness.watch.spans import named
from harness.watch.stages import Stamps

Augment = Callable[[Tensor, Any], Tensor]
Mix = Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]
_END: Any = object()


class Ready(NamedTuple):
    """A batch on its way.

    ``done`` is recorded behind the last write to the tensors; ``copy`` is the event before and that
    after the copy, and it; ``there_s`` is when the batch was there.
    """

    images: Tensor
    labels: Tensor
    copy: tuple[Any, Any, Any] | None
    done: Any
    stamps: Stamps | None
    there_s: float


class Mover:
    """Moves batches to the device and makes them ready there, on ``stream`` if there is one.

    It holds what the loader gave until its copy is done: the loader may use memory again that
    nobody holds.

    Args:
        own: the device.
        stream: the side stream; None: all goes to the current one.
        clock: reads the events; None: nobody does.
        made_there: the loader makes its batches on the device.
        augment, normalise, mix: what is done to each batch.
    """

    def __init__(
        self,
        own: Accelerator,
        stream: Any,
        clock: StepClock | None,
        made_there: bool,
        augment: Augment | None,
        normalise: Normalise,
        mix: Mix | None,
    ) -> None:
        self.own = own
        self.stream = stream
        self._made_there = made_there
        self._timed = clock is not None and own.has_streams
        self._now = own.now if clock is None else clock.now
        self._augment = augment
        self._normalise = normalise
        self._mix = mix
        # the stream that the consumer's work goes to
        self.outer: Any = None
        # the event behind each copy, and the batch that is copied
        self._copying: deque[tuple[Any, Any]] = deque()

    def pulled(self, batches: Iterator[Any], plain: bool) -> Ready | None:
        """The next of ``batches`` on the device, issued on the side stream if there is one; None at
        the end.

        A ``plain`` loop has its batch as soon as the loader has given it; one with a thread when
        all of this is issued.
        """
        there_s: float | None
        if not self.own.has_streams:
            batch = next(batches, _END)
            there_s = self._now() if plain else None
            if batch is _END:
                return None
            with named("copy"):
                images, labels = map(self.own.copy, _pair(batch))
                return self._prepared(batch, images, labels, None, there_s)
        with self.own.on(self.stream):
            start = self._mark() if self._made_there else None
            batch = next(batches, _END)
            if batch is _END:
                return None
            there_s = self._now() if plain else None
            ready = self._moved(batch, start, there_s)
        # a plain loop must not wait here for the step before
        self.let_go(most=None if self.stream is None else 1)
        return ready

    def _moved(self, batch: Any, start: Any, there_s: float | None) -> Ready:
        images, labels = _pair(batch)
        own = self.own
        is_there = self._made_there or own.holds(images)
        if self.stream is not None and is_there:
            own.keep_for(self.stream, images)
            if not self._made_there:
                # the loader's own GPU work may still write to it
                self.stream.wait_stream(self.outer)
        with named("copy"):
            start = end = start or self._mark()
            if not is_there:
                images = own.copy(images)
            if not self._made_there and not own.holds(labels):
                labels = own.copy(labels)
            if not is_there:
                end = own.event(timed=self._timed)
                end.record(own.stream())
                self._copying.append((end, batch))
            return self._prepared(batch, images, labels, (start, end), there_s)

    def _prepared(
        self,
        batch: Any,
        images: Tensor,
        labels: Tensor,
        copy: tuple[Any, Any] | None,
        there_s: float | None,
    ) -> Ready:
        """``images`` and ``labels`` of ``batch`` as the network takes them."""
        if self._augment is not None:
            images = self._augment(images, batch)
        images = self._normalise(images)
        if self._mix is not None:
            images, labels = self._mix(images, labels, batch)
        done = None
        if copy is not None and (self._timed or self.stream is not None):
            done = self.own.event(timed=self._timed)
            done.record(self.own.stream())
        stamps = getattr(batch, "stamps", None)
        return Ready(
            images,
            labels,
            (*copy, done) if copy is not None and self._timed else None,
            done,
            stamps if isinstance(stamps, Stamps) else None,
            self._now() if there_s is None else there_s,
        )

    def _mark(self) -> Any:
        """A timing event at this point of the stream, if a clock reads them."""
        if not self._timed:
            return None
        event = self.own.event(timed=True)
        event.record(self.own.stream())
        return event

    def let_go(self, most: int | None) -> None:
        """Drop the batches that are copied, and wait until at most ``most`` copies are under way;
        None: for none of them.
        """
        while self._copying and (
            self._copying[0][0].query() or (most is not None and len(self._copying) > most)
        ):
            # the host waits for the device, which without a side stream works in between
            self._copying[0][0].synchronize()
            self._copying.popleft()


def _pair(batch: Any) -> Sequence[Tensor]:
    """The images and the labels of ``batch``, which has no other part, but for a feed's."""
    if hasattr(batch, "stamps"):
        return batch.images, batch.labels
    parts = list(batch) if isinstance(batch, tuple | list) else [batch]
    if len(parts) != 2 or not all(hasattr(part, "to") for part in parts):
        raise TypeError(
            "DataPrefetcher: batches must be (images, labels), two tensors; this loader gives "
            f"{', '.join(type(part).__name__ for part in parts)}: let its collate_fn return these "
            "two"
        )
    return parts
