"""How a checkpoint gets to disk: whole or not at all, while training goes on.

``step-N.pt`` is written to a temporary file in the same folder, synced and renamed; its record
``step-N.json`` follows in the same way. What was committed before is deleted only then. Both were
synced, so the disk has them; reading them back would show the page cache, not the disk.
"""

from __future__ import annotations

import copy
import hashlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

import torch
from torch.utils.serialization import config

from harness.runtime import signals
from harness.runtime.errors import DiskError
from harness.runtime.files import replacing, sync_folder
from harness.runtime.workers import give_way
from harness.training.checkpoint import UNNAMED, Record, order, records, sealed

# seconds for each second of a processor: steps beside it then take a fifth longer at most
_RESTS = 4.0

Pause = Callable[[float], object]


class Saver:
    """Saves a run's checkpoints in a thread, which rests until somebody waits.

    It saves one at a time, and first finishes what a killed save has left to do. An error of a save
    is raised once: by the next ``save``, ``wait`` or ``close``.

    Args:
        folder: where the checkpoints go; made if need be.
        keep_last: how many of the newest stay, besides the best.
    """

    def __init__(self, folder: Path, keep_last: int) -> None:
        self._folder = folder
        self._keep_last = keep_last
        self._thread = ThreadPoolExecutor(1, "checkpoint", give_way)
        self._last: Future[Record] | None = None
        self._awaited = threading.Event()
        self._host = _Host()
        # an error here would come again with the next save, which tells of it
        with suppress(OSError):
            if committed := records(folder):
                _retain(folder, committed[-1], keep_last)
            _clear(folder)

    def save(self, state: dict[str, Any], *, step: int, epoch: int, top1: float | None) -> None:
        """Copies ``state`` and begins to save it, once the save before is through.

        The copy is in host memory; here the host waits for the device. Afterwards the tensors of
        ``state`` may change.

        Raises:
            DiskError: the save before has failed; this one is not begun.
        """
        self.wait()
        self._awaited.clear()
        self._last = self._thread.submit(
            save,
            self._folder,
            self._host.copy(state),
            step=step,
            epoch=epoch,
            top1=top1,
            keep_last=self._keep_last,
            rest=lambda seconds: signals.received() or self._awaited.wait(seconds),
        )

    @property
    def failed(self) -> bool:
        """Whether the last save has failed by now; its error is raised by ``wait``."""
        return self._last is not None and self._last.done() and self._last.exception() is not None

    def wait(self) -> Record | None:
        """Returns the last checkpoint, once it is committed.

        None: nothing was saved, or the error was raised before.
        """
        self._awaited.set()
        last = self._last
        if last is None:
            return None
        try:
            return last.result()
        except BaseException:
            self._last = None
            raise

    def close(self) -> None:
        """Ends the thread, once the save under way is through."""
        self._awaited.set()
        self._thread.shutdown()
        self.wait()


class _Host:
    """Copies states into host memory, each over the one before.

    New memory for each copy would take longer to get than to fill. Taken from malloc's heap and
    given back, it also changes whether the training step's own memory stays there: without a byte
    written, steps took 1.7 times as long.
    """

    def __init__(self) -> None:
        # by place in the state and size, which are the same each time
        self._rooms: dict[tuple[int, int], torch.UntypedStorage] = {}
        self._copied: dict[tuple[torch.device, int], torch.UntypedStorage] = {}

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns ``state`` in host memory, shared where it was; the copy before is overwritten."""
        self._copied.clear()
        copied: dict[str, Any] = self._copy(state)
        return copied

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            key = storage.device, storage.data_ptr()
            if key not in self._copied:
                room = len(self._copied), storage.nbytes()
                if room not in self._rooms:
                    self._rooms[room] = torch.UntypedStorage(storage.nbytes())
                self._copied[key] = self._rooms[room].copy_(storage)
            place = value.storage_offset(), value.shape, value.stride()
            return torch.empty(0, dtype=value.dtype).set_(self._copied[key], *place)
        if isinstance(value, dict):
            # keeps the _metadata of a network's state, too
            made = copy.copy(value)
            made.update((key, self._copy(item)) for key, item in value.items())
            return made
        if isinstance(value, list | tuple):
            return type(value)(self._copy(item) for item in value)
        return value


def save(
    folder: Path,
    state: dict[str, Any],
    *,
    step: int,
    epoch: int,
    top1: float | None,
    keep_last: int,
    rest: Pause | None = None,
) -> Record:
    """Commits ``state`` under a free name in ``folder``, moves the pointers and drops old ones.

    Of equal top-1 ``best.pt`` has the earlier. ``rest`` gets the seconds to leave to training.

    Raises:
        DiskError: a file could not be written; what was there before stays whole.
    """
    path = folder / f"step-{step}.pt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder)
        if taken := [number for of, number in map(order, folder.glob("step-*")) if of == step]:
            path = folder / f"step-{step}.{1 + max(taken)}.pt"
        # the digest of the whole file makes torch's checksums needless, and they take longer
        with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            digest = _write(path, lambda file: torch.save(state, file), rest)
        record = Record(path, step, epoch, top1, digest)
        facts = {"step": step, "epoch": epoch, "top1": top1, "sha256": digest}
        _write(path.with_suffix(".json"), lambda file: file.write(sealed(facts)))
        _retain(folder, record, keep_last)
    except OSError as error:
        raise DiskError(
            f"{error.filename or path}: cannot save the checkpoint: {error.strerror or error}; "
            "earlier ones are whole: make room or mend the disk, then go on with resume=auto"
        ) from error
    finally:
        # an error here would come again with the next save, which tells of it
        with suppress(OSError):
            _clear(folder)
    return record


def _retain(folder: Path, newest: Record, keep_last: int) -> None:
    """Points at the ``newest`` and the best, and deletes all others but the last ``keep_last``."""
    committed = records(folder)
    # those of later steps belong to a past that a resume has left
    past = [old for old in committed if order(old.path) <= order(newest.path)]
    _point(folder / "last.pt", newest.path)
    kept = past[-keep_last:]
    rated = [old for old in past if old.top1 is not None]
    if rated:
        best = max(rated, key=lambda old: old.top1 or 0.0)
        _point(folder / "best.pt", best.path)
        kept.append(best)
    sync_folder(folder)
    for old in committed:
        if old not in kept:
            old.path.with_suffix(".json").unlink(missing_ok=True)


def _clear(folder: Path) -> None:
    """Deletes what belongs to no checkpoint: temporary files, and files without a record.

    Only one run owns the folder, so no save of another can be under way.
    """
    orphans = list(folder.glob(".*.tmp"))
    for path in folder.glob("step-*.pt"):
        if order(path) != UNNAMED and not path.with_suffix(".json").exists():
            orphans.append(path)
    for path in orphans:
        if not path.is_dir():
            path.unlink(missing_ok=True)


def _write(path: Path, fill: Callable[[_Hashing], object], rest: Pause | None = None) -> str:
    """Writes ``path``, whole or not at all; returns the SHA-256 of its bytes."""
    with replacing(path) as temporary, _Hashing(FileIO(temporary, "xb"), rest) as file:
        try:
            fill(file)
        except RuntimeError as error:
            # torch hides the error of the file behind one without path or errno
            raise error.__context__ or error from None
        # on the disk before its name shows
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)
    return file.digest.hexdigest()


class _Hashing(BufferedWriter):
    """Hashes what is written, and rests after each piece of it."""

    def __init__(self, raw: FileIO, rest: Pause | None) -> None:
        super().__init__(raw)
        self.digest = hashlib.sha256()
        self._rest = rest
        self._rested_s = time.thread_time()

    def write(self, data: Any) -> int:
        whole = memoryview(data)
        # a piece takes a millisecond or two
        for start in range(0, len(whole), 1 << 20):
            piece = whole[start : start + (1 << 20)]
            self.digest.update(piece)
            super().write(piece)
            worked_s = time.thread_time() - self._rested_s
            if self._rest is not None and worked_s > 1e-3:
                self._rest(_RESTS * worked_s)
                self._rested_s = time.thread_time()
        return len(whole)


def _point(link: Path, target: Path) -> None:
    """Lets ``link`` lead to ``target``, swapped in one step so that it is never absent."""
    try:
        with replacing(link) as temporary:
            temporary.symlink_to(target.name)
    except OSError:
        # not every file system has links: a text then holds the name
        _write(link, lambda file: file.write(target.name.encode()))
