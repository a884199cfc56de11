"""What a loader setting needs of this machine, reckoned before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from harness.feed.interface import THREADS, FeedSettings
from harness.runtime.limits import Limits

# of what is free: the rest is for what the reckoning leaves out
_SHARE = 0.8
# for logs, checkpoints and libraries
_FILES_KEPT = 64


@dataclass(frozen=True, slots=True)
class Needs:
    """The most that a feed takes at any time.

    Attributes:
        shm: bytes of shared memory, which are part of ``memory``.
        memory: bytes in all.
        open_files: how many.
    """

    shm: int = 0
    memory: int = 0
    open_files: int = 0


NONE = Needs()


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
    pinned_bytes = 0
    if size and settings.pin_memory:
        # torch gives images and labels a power of two each; indices stay as they are
        labels = 8 * settings.batch_size
        images = max(1, size - 2 * labels)
        pinned_bytes = sum(1 << (tensor - 1).bit_length() for tensor in (images, labels))
    if settings.backend == THREADS:
        # beside those that are ready: one in the making, one handed over, one in use
        return Needs(memory=(prefetch + 3) * (pinned_bytes or size))

    ready = workers * prefetch
    # beside those that the workers have in hand: one handed over, one in use
    in_flight = (ready + 2) * size
    # beside those in hand: one on its way to the device, one in use or about to follow it there,
    # and one whose memory torch lends again when the copy after its own is done
    pinned = (ready + 3) * pinned_bytes
    memory = workers * worker_bytes + in_flight + pinned + held_bytes
    if not workers:
        return Needs(memory=memory)
    # a batch has two files for each of images, labels and indices, a worker its pipes and queues
    return Needs(in_flight, memory, workers * (6 * prefetch + 10))


def refusal(wanted: Needs, limits: Limits, beside: Needs = NONE) -> str | None:
    """Returns why a feed will not fit, in a line; None where it does.

    Args:
        wanted: what the feed takes.
        limits: what this rank may use.
        beside: what another feed of this rank takes at the same time; the line does not show it.
    """
    for asked, taken, free, what in (
        (wanted.shm, beside.shm, limits.shm_bytes, "shared memory"),
        (wanted.memory, beside.memory, limits.memory_bytes, "memory"),
    ):
        if free is not None and asked > max(0, _SHARE * free - taken):
            return (
                f"the feed would take {shown(asked)} of {what}, of which {shown(free)} are free "
                "(a fifth is kept back): not tried"
            )
    files = limits.open_files - limits.files_open
    if wanted.open_files > max(0, files - _FILES_KEPT - beside.open_files):
        return (
            f"the feed would take {wanted.open_files} open files, of which {files} are free "
            f"({_FILES_KEPT} are kept back; ulimit -n raises them): not tried"
        )
    return None


def shown(count: int) -> str:
    """Returns ``count`` bytes in MB, from a thousand of them on in GB."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.1f} MB"
