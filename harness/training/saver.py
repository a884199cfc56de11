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
from functools import partial
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

_CHUNK_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20
# seconds for each second of a processor: steps beside it then take a fifth longer at most
_RESTS = 4.0


class Saver:
    """Saves the checkpoints of a run in a thread of its own, one at a time, and rests often until
    somebody waits for it.

    It first finishes what a killed save has left to do. An error of a save is raised once: by the
    next ``save``, ``wait`` or ``close``.

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
        # The next save would do it, and tell what keeps it from that.
        with suppress(OSError):
            if committed := records(folder):
                _retain(folder, committed[-1], keep_last)
            _clear(folder)

    def save(self, state: dict[str, Any], *, step: int, epoch: int, top1: float | None) -> None:
        """Copy ``state`` to host memory and begin to save it, once the save before is through.

        Here the host waits for the device. Afterwards the tensors of ``state`` may change.

        Raises:
            DiskError: the save before has failed; this one is not begun.
        """
        self.wait()
        self._awaited.clear()
        write = partial(
            save, self._folder, self._host.copy(state), step=step, epoch=epoch, top1=top1
        )
        self._last = self._thread.submit(write, keep_last=self._keep_last, rest=self._rest)

    def _rest(self, seconds: float) -> None:
        if not signals.received():
            self._awaited.wait(seconds)

    @property
    def failed(self) -> bool:
        """Whether the last save has failed by now; its error is raised by ``wait``."""
        return self._last is not None and self._last.done() and self._last.exception() is not None

    def wait(self) -> Record | None:
        """The last checkpoint, once it is committed; None: nothing was saved, or the error was
        raised before.
        """
        self._awaited.set()
        try:
            return self._last.result() if self._last is not None else None
        except BaseException:
            self._last = None
            raise

    def close(self) -> None:
        """Wait for the save under way and end the thread."""
        self._awaited.set()
        self._thread.shutdown()
        self.wait()


class _Host:
    """Copies states into host memory of its own, each over the one before.

    New memory for each copy would take longer to get than to fill. Taken from malloc's heap and
    given back, it also changes whether the training step's own memory stays there: without a byte
    written, steps took 1.7 times as long.
    """

    def __init__(self) -> None:
        self._chunks: list[torch.UntypedStorage] = []
        self._chunk = 0
        self._used = 0
        self._copied: dict[tuple[torch.device, int], torch.UntypedStorage] = {}

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """``state`` with its tensors in host memory, shared where they were shared; the copy before
        is no longer valid.
        """
        self._chunk = self._used = 0
        self._copied.clear()
        copied: dict[str, Any] = self._copy(state)
        return copied

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            key = storage.device, storage.data_ptr()
            if key not in self._copied:
                self._copied[key] = self._room(storage.nbytes()).copy_(storage)
            found = torch.empty(0, dtype=value.dtype)
            return found.set_(
                self._copied[key], value.storage_offset(), value.shape, value.stride()
            )
        if isinstance(value, dict):
            # Keeps the _metadata of a network's state, too.
            made = copy.copy(value)
            made.update((key, self._copy(item)) for key, item in value.items())
            return made
        if isinstance(value, list | tuple):
            return type(value)(self._copy(item) for item in value)
        return value

    def _room(self, nbytes: int) -> torch.UntypedStorage:
        if nbytes == 0:
            # A slice would have the address of the next one, and torch refuses one address under
            # two types.
            return torch.UntypedStorage(0)
        while (
            self._chunk < len(self._chunks)
            and self._used + nbytes > self._chunks[self._chunk].nbytes()
        ):
            self._chunk += 1
            self._used = 0
        if self._chunk == len(self._chunks):
            self._chunks.append(torch.UntypedStorage(max(nbytes, _CHUNK_BYTES)))
        start = self._used
        self._used += -(-nbytes // 64) * 64
        room: torch.UntypedStorage = self._chunks[self._chunk][start : start + nbytes]
        return room


def save(
    folder: Path,
    state: dict[str, Any],
    *,
    step: int,
    epoch: int,
    top1: float | None,
    keep_last: int,
    rest: Callable[[float], object] | None = None,
) -> Record:
    """Commit ``state`` under a free name in ``folder``, point ``last.pt`` and ``best.pt`` at their
    files, drop old ones.

    ``best.pt`` has the highest finite top-1; ties keep the earlier. ``rest`` is called with the
    seconds for which the thread should leave its processor to training.

    Raises:
        DiskError: a file could not be written; what was there before stays whole.
    """
    path = folder / f"step-{step}.pt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder)
        serial = 1 + max(
            (taken for of, taken in map(order, folder.glob("step-*")) if of == step), default=0
        )
        if serial > 1:
            path = folder / f"step-{step}.{serial}.pt"
        # The digest of the whole file makes torch's checksums needless, and they take longer.
        with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            digest = _write(path, lambda file: torch.save(state, file), rest)
        record = Record(path, step, epoch, top1, digest)
        facts = {"step": step, "epoch": epoch, "top1": top1, "sha256": digest}
        _write(path.with_suffix(".json"), lambda file: file.write(sealed(facts)))
        _retain(folder, record, keep_last)
    except OSError as error:
        raise DiskError(
            f"{error.filename or path}: cannot save the checkpoint: {error.strerror or error}; "
            "earlier ones are whole: "
            "make room or mend the disk, then go on with resume=auto"
        ) from error
    finally:
        # The next save would do it, and tell what keeps it from that.
        with suppress(OSError):
            _clear(folder)
    return record


def _retain(folder: Path, newest: Record, keep_last: int) -> None:
    """Point at the ``newest`` and at the best checkpoint, and delete the others but the last
    ``keep_last``.
    """
    committed = records(folder)
    # Those of later steps belong to a past that a resume has left.
    past = [old for old in committed if order(old.path) <= order(newest.path)]
    best = max(
        (old for old in past if old.top1 is not None), key=lambda old: old.top1 or 0.0, default=None
    )
    _point(folder / "last.pt", newest.path)
    if best is not None:
        _point(folder / "best.pt", best.path)
    sync_folder(folder)
    for old in committed:
        if old not in past[-keep_last:] and old != best:
            old.path.with_suffix(".json").unlink(missing_ok=True)


def _clear(folder: Path) -> None:
    """Delete what belongs to no checkpoint: temporary files, and files whose record was not written
    or is deleted.

    Only one run owns the folder, so no save of another can be under way.
    """
    for path in (*folder.glob(".*.tmp"), *folder.glob("step-*.pt")):
        vouched = path.suffix == ".pt" and (
            order(path) == UNNAMED or path.with_suffix(".json").exists()
        )
        if not vouched and not path.is_dir():
            path.unlink(missing_ok=True)


def _write(
    path: Path, fill: Callable[[_Hashing], object], rest: Callable[[float], object] | None = None
) -> str:
    """Write ``path`` whole or not at all, and to the disk before its name shows; the SHA-256 of its
    bytes.
    """
    with replacing(path) as temporary, _Hashing(FileIO(temporary, "xb"), rest) as file:
        try:
            fill(file)
        except RuntimeError as error:
            # torch hides the error of the file behind one without path or errno.
            raise error.__context__ or error from None
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)
    return file.digest.hexdigest()


class _Hashing(BufferedWriter):
    """Hashes what is written, and rests after each piece of it."""

    def __init__(self, raw: FileIO, rest: Callable[[float], object] | None) -> None:
        super().__init__(raw)
        self.digest = hashlib.sha256()
        self._rest = rest
        self._rested_s = time.thread_time()

    def write(self, data: Any) -> int:
        whole = memoryview(data)
        for start in range(0, len(whole), _PIECE_BYTES):
            piece = whole[start : start + _PIECE_BYTES]
            self.digest.update(piece)
            super().write(piece)
            worked_s = time.thread_time() - self._rested_s
            if self._rest is not None and worked_s > 1e-3:
                self._rest(_RESTS * worked_s)
                self._rested_s = time.thread_time()
        return len(whole)


def _point(link: Path, target: Path) -> None:
    """Let ``link`` lead to ``target``, swapped in one step so that it is never absent."""
    try:
        with replacing(link) as temporary:
            temporary.symlink_to(target.name)
    except OSError:
        # Not every file system has links: a text then holds the name.
        _write(link, lambda file: file.write(target.name.encode()))
