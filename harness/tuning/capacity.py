"""What a loader setting needs of this machine, reckoned before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from harness.feed.interface import THREADS, FeedSettings
from harness.runtime.limits import Limits

_SHARE = 0.8  # of what is free: the rest is for what the reckoning leaves out
_WAITING = 2  # batches beside those that the workers have in hand: one handed over, one in use
_LENT = 3  # batches of threads beside those that are ready: one in the making, one handed over, one in use
_PINNED = 3  # page-locked copies: those two, and one that waits for them
_FILES_PER_BATCH = 2 * 3  # two for each of images, labels and indices
_FILES_PER_WORKER = 10  # pipes and queues
_FILES_KEPT = 64  # for logs, checkpoints and libraries

_Terms = list[tuple[str, int]]  # what is added up: the product in words, and what it comes to


@dataclass(frozen=True, slots=True)
class Needs:
    """The most that a feed takes at any time; ``shm_bytes`` are part of ``memory_bytes``."""

    shm_bytes: int = 0
    memory_bytes: int = 0
    open_files: int = 0

    def __add__(self, other: Needs) -> Needs:
        shm_bytes, memory_bytes = self.shm_bytes + other.shm_bytes, self.memory_bytes + other.memory_bytes
        return Needs(shm_bytes, memory_bytes, self.open_files + other.open_files)


NONE = Needs()


def needs(settings: FeedSettings, batch_bytes: int | None, worker_bytes: int, held_bytes: int = 0) -> Needs:
    """What a feed of ``settings`` takes.

    Args:
        settings: the feed's.
        batch_bytes: of one batch's tensors; None where that is not known, and batches are left out.
        worker_bytes: private memory of one worker process, without its batches.
        held_bytes: what the feed holds besides its batches.
    """
    return Needs(*(sum(amount for _, amount in terms) for terms in _terms(settings, batch_bytes, worker_bytes, held_bytes)))


def refusal(
    settings: FeedSettings,
    batch_bytes: int | None,
    worker_bytes: int,
    limits: Limits,
    beside: Needs = NONE,
    held_bytes: int = 0,
) -> str | None:
    """Why a feed of ``settings`` will not fit, as one line of arithmetic; None where it does.

    Args:
        settings: the feed's.
        batch_bytes: of one batch's tensors; None where that is not known, and batches are left out.
        worker_bytes: private memory of one worker, without its batches.
        limits: what this rank may use.
        beside: what another feed of this rank takes at the same time.
        held_bytes: what the feed holds besides its batches.
    """
    shm, memory, files = _terms(settings, batch_bytes, worker_bytes, held_bytes)
    fifth = "a fifth is kept back"
    if limits.shm_bytes is not None and (sums := _over(shm, beside.shm_bytes, _SHARE * limits.shm_bytes)):
        return f"{sums} of shared memory, of which {shown(limits.shm_bytes)} are free ({fifth}): not tried"
    if sums := _over(memory, beside.memory_bytes, _SHARE * limits.memory_bytes):
        return f"{sums} of memory, of which {shown(limits.memory_bytes)} are free ({fifth}): not tried"
    free = limits.open_files - limits.files_open
    if sums := _over(files, beside.open_files, free - _FILES_KEPT, str):
        return f"{sums} open files, of which {free} are free ({_FILES_KEPT} are kept back; ulimit -n raises them): not tried"
    return None


def beside(
    train: FeedSettings,
    val: FeedSettings,
    train_bytes: int | None,
    val_bytes: int | None,
    worker_bytes: int,
    limits: Limits,
) -> FeedSettings:
    """``val`` with fewer batches in flight, then fewer workers, down to none, until it fits beside ``train``.

    Args:
        train: the training feed's settings; its workers stay while the other feed runs.
        val: the validation feed's.
        train_bytes: of one training batch's tensors; None where that is not known.
        val_bytes: of one validation batch's.
        worker_bytes: private memory of one worker, without its batches.
        limits: what this rank may use.
    """
    taken = needs(train, train_bytes, worker_bytes)
    while val.num_workers and refusal(val, val_bytes, worker_bytes, limits, taken):
        if val.prefetch_factor is not None and val.prefetch_factor > 1:
            val = replace(val, prefetch_factor=val.prefetch_factor - 1)
        elif val.num_workers > 1:
            val = replace(val, num_workers=val.num_workers - 1)
        else:
            val = replace(val, num_workers=0, prefetch_factor=None, persistent_workers=False)
    return val


def shown(count: int) -> str:
    """``count`` bytes in MB, from a thousand of these on in GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _terms(
    settings: FeedSettings, batch_bytes: int | None, worker_bytes: int, held_bytes: int
) -> tuple[_Terms, _Terms, _Terms]:
    """What adds up to the shared memory, the memory and the open files of a feed."""
    workers, prefetch, size = settings.num_workers, settings.prefetch_factor or 0, batch_bytes or 0
    block = 1 << (size - 1).bit_length() if size and settings.pin_memory else 0  # torch rounds it up to a power of two
    if settings.backend == THREADS:
        text, count = f"(prefetch_factor={prefetch} + {_LENT})" if prefetch else f"{_LENT} batches", prefetch + _LENT
        return [], [(f"{text} x {shown(block or size)}", count * (block or size))], []
    batches = f"(num_workers={workers} x prefetch_factor={prefetch} + {_WAITING})" if workers else f"{_WAITING} batches"
    in_flight = f"{batches} x {shown(size)}", (workers * prefetch + _WAITING) * size
    each = _FILES_PER_BATCH * prefetch + _FILES_PER_WORKER
    return (
        [in_flight] if workers else [],
        [
            (f"num_workers={workers} x {shown(worker_bytes)}", workers * worker_bytes),
            in_flight,
            (f"{_PINNED} pinned x {shown(block)}", _PINNED * block),
            (f"{shown(held_bytes)} of images", held_bytes),
        ],
        [(f"num_workers={workers} x ({_FILES_PER_BATCH} x prefetch_factor={prefetch} + {_FILES_PER_WORKER})", workers * each)],
    )


def _over(terms: _Terms, taken: int, allowed: float, show: Callable[[int], str] = shown) -> str | None:
    """The sum of ``terms`` in words where, with what is ``taken``, it is more than ``allowed``; of nothing, nothing is."""
    own = sum(amount for _, amount in terms)
    if own == 0 or own + taken <= allowed:
        return None
    parts = [text for text, amount in terms if amount] + ([f"{show(taken)} of the other feed"] if taken else [])
    return f"{' + '.join(parts)} = {show(own + taken)}"
