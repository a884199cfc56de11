"""What a loader setting needs of this machine, reckoned before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from harness.feed.interface import THREADS, FeedSettings
from harness.runtime.limits import Limits

_SHARE = 0.8  # of what is free: the rest is for what the reckoning leaves out
_WAITING = 2  # batches beside those that the workers have in hand: one handed over, one in use
# batches of threads beside those that are ready: one in the making, one handed over, one in use
_LENT = 3
# page-locked batches beside those in flight or ready: one on its way to the device, one in use or
# about to follow it there, and one whose memory torch lends again when the copy after its own is
# done
_PINNED = 3
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
        shm_bytes = self.shm_bytes + other.shm_bytes
        memory_bytes = self.memory_bytes + other.memory_bytes
        return Needs(shm_bytes, memory_bytes, self.open_files + other.open_files)


NONE = Needs()


def needs(
    settings: FeedSettings, batch_bytes: int | None, worker_bytes: int, held_bytes: int = 0
) -> Needs:
    """What a feed of ``settings`` takes before a consumer that stands still: all batches in flight
    are page-locked.

    Args:
        settings: the feed's.
        batch_bytes: of a batch's images, int64 labels and indices; None where that is not known,
            and batches are left out.
        worker_bytes: private memory of one worker process, without its batches.
        held_bytes: what the feed holds besides its batches.
    """
    return Needs(
        *(
            sum(amount for _, amount in terms)
            for terms in _terms(settings, batch_bytes, worker_bytes, held_bytes)
        )
    )


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
    if limits.shm_bytes is not None and (
        sums := _over(shm, beside.shm_bytes, _SHARE * limits.shm_bytes)
    ):
        return (
            f"{sums} of shared memory, of which {shown(limits.shm_bytes)} are free ({fifth}): "
            "not tried"
        )
    if sums := _over(memory, beside.memory_bytes, _SHARE * limits.memory_bytes):
        return (
            f"{sums} of memory, of which {shown(limits.memory_bytes)} are free ({fifth}): not tried"
        )
    free = limits.open_files - limits.files_open
    if sums := _over(files, beside.open_files, free - _FILES_KEPT, str):
        return (
            f"{sums} open files, of which {free} are free ({_FILES_KEPT} are kept back; ulimit "
            "-n raises them): not tried"
        )
    return None


def beside(
    train: FeedSettings,
    val: FeedSettings,
    train_bytes: int | None,
    val_bytes: int | None,
    worker_bytes: int,
    limits: Limits,
) -> FeedSettings:
    """``val`` with fewer batches in flight, then fewer workers, down to none, until it fits beside
    ``train``.

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
    workers = settings.num_workers
    prefetch = settings.prefetch_factor or 0
    size = batch_bytes or 0
    threads = settings.backend == THREADS
    ready = prefetch if threads else workers * prefetch
    words = (
        f"prefetch_factor={prefetch}"
        if threads
        else f"num_workers={workers} x prefetch_factor={prefetch}"
    )

    def batches(more: int, each: int, kind: str = "") -> tuple[str, int]:
        return f"{f'({words} + {more})' if ready else f'{more} batches'} x {shown(each)}{kind}", (
            ready + more
        ) * each

    pinned = batches(_PINNED, _pinned_bytes(settings, size), " page-locked")
    if threads:
        return [], [pinned if pinned[1] else batches(_LENT, size)], []
    in_flight = batches(_WAITING, size)
    each = _FILES_PER_BATCH * prefetch + _FILES_PER_WORKER
    return (
        [in_flight] if workers else [],
        [
            (f"num_workers={workers} x {shown(worker_bytes)}", workers * worker_bytes),
            in_flight,
            pinned,
            (f"{shown(held_bytes)} of images", held_bytes),
        ],
        [
            (
                (
                    f"num_workers={workers} x ({_FILES_PER_BATCH} x prefetch_factor={prefetch} + "
                    f"{_FILES_PER_WORKER})"
                ),
                workers * each,
            )
        ],
    )


def _pinned_bytes(settings: FeedSettings, size: int) -> int:
    """Page-locked bytes of one batch: torch gives images and labels a power of two each."""
    if not (size and settings.pin_memory):
        return 0
    labels = 8 * settings.batch_size
    images = max(1, size - 2 * labels)  # indices stay as they are
    return sum(1 << (tensor - 1).bit_length() for tensor in (images, labels))


def _over(
    terms: _Terms, taken: int, allowed: float, show: Callable[[int], str] = shown
) -> str | None:
    """The sum of ``terms`` in words where, with what is ``taken``, it is more than ``allowed``; of
    nothing, nothing is.
    """
    own = sum(amount for _, amount in terms)
    if own == 0 or own + taken <= allowed:
        return None
    parts = [text for text, amount in terms if amount] + (
        [f"{show(taken)} of the other feed"] if taken else []
    )
    return f"{' + '.join(parts)} = {show(own + taken)}"
