"""What a loader setting needs of this machine, reckoned before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.feed.interface import THREADS, FeedSettings
from harness.runtime.limits import Limits

# of what is free: the rest is for what the reckoning leaves out
_SHARE = 0.8
# for logs, checkpoints and libraries
_FILES_KEPT = 64

# what is added up: the product in words, and what it comes to
Terms = Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Needs:
    """The most that a feed takes at any time, term by term; ``shm`` is part of ``memory``."""

    shm: Terms = ()
    memory: Terms = ()
    open_files: Terms = ()

    @property
    def memory_bytes(self) -> int:
        """The memory in all."""
        return total(self.memory)


NONE = Needs()


def total(terms: Terms) -> int:
    """Returns what ``terms`` add up to."""
    return sum(amount for _, amount in terms)


def needs(
    settings: FeedSettings, batch_bytes: int | None, worker_bytes: int, held_bytes: int = 0
) -> Needs:
    """Returns what a feed takes before a consumer that stands still.

    All batches in flight are then page-locked.

    Args:
        settings: the feed's.
        batch_bytes: of a batch's images, int64 labels and indices; None where that is not known,
            and batches are left out.
        worker_bytes: private memory of one worker process, without its batches.
        held_bytes: what the feed holds besides its batches.
    """
    workers = settings.num_workers
    prefetch = settings.prefetch_factor or 0
    size = batch_bytes or 0
    ready = prefetch
    product = f"prefetch_factor={prefetch}"
    if settings.backend != THREADS:
        ready *= workers
        product = f"num_workers={workers} x {product}"

    def batches(more: int, each: int, kind: str = "") -> tuple[str, int]:
        count = f"({product} + {more})" if ready else f"{more} batches"
        return f"{count} x {shown(each)}{kind}", (ready + more) * each

    pinned_bytes = 0
    if size and settings.pin_memory:
        # torch gives images and labels a power of two each; indices stay as they are
        labels = 8 * settings.batch_size
        images = max(1, size - 2 * labels)
        pinned_bytes = sum(1 << (tensor - 1).bit_length() for tensor in (images, labels))
    # beside those in flight or ready: one on its way to the device, one in use or about to follow
    # it there, and one whose memory torch lends again when the copy after its own is done
    pinned = batches(3, pinned_bytes, " page-locked")
    if settings.backend == THREADS:
        # beside those that are ready: one in the making, one handed over, one in use
        return Needs(memory=[pinned if pinned_bytes else batches(3, size)])

    # beside those that the workers have in hand: one handed over, one in use
    in_flight = batches(2, size)
    memory = [
        (f"num_workers={workers} x {shown(worker_bytes)}", workers * worker_bytes),
        in_flight,
        pinned,
        (f"{shown(held_bytes)} of images", held_bytes),
    ]
    if not workers:
        return Needs(memory=memory)
    # a batch has two files for each of images, labels and indices, a worker its pipes and queues
    files = f"num_workers={workers} x (6 x prefetch_factor={prefetch} + 10)"
    return Needs([in_flight], memory, [(files, workers * (6 * prefetch + 10))])


def refusal(wanted: Needs, limits: Limits, beside: Needs = NONE) -> str | None:
    """Returns why a feed will not fit, as one line of arithmetic; None where it does.

    Args:
        wanted: what the feed takes.
        limits: what this rank may use.
        beside: what another feed of this rank takes at the same time; the line does not show it.
    """
    for terms, taken, free, what in (
        (wanted.shm, beside.shm, limits.shm_bytes, "shared memory"),
        (wanted.memory, beside.memory, limits.memory_bytes, "memory"),
    ):
        if free is not None and (sums := _over(terms, _SHARE * free - total(taken), shown)):
            return (
                f"{sums} of {what}, of which {shown(free)} are free (a fifth is kept back): "
                "not tried"
            )
    free = limits.open_files - limits.files_open
    if sums := _over(wanted.open_files, free - _FILES_KEPT - total(beside.open_files), str):
        return (
            f"{sums} open files, of which {free} are free ({_FILES_KEPT} are kept back; ulimit "
            "-n raises them): not tried"
        )
    return None


def shown(count: int) -> str:
    """Returns ``count`` bytes in MB, from a thousand of them on in GB."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.1f} MB"


def _over(terms: Terms, allowed: float, show: Callable[[int], str]) -> str | None:
    """Returns the sum of ``terms`` in words if it is more than ``allowed``, and not nothing."""
    whole = total(terms)
    if whole <= max(0, allowed):
        return None
    return f"{' + '.join(text for text, amount in terms if amount)} = {show(whole)}"
