"""How a checkpoint gets to disk: whole or not at all.

``step-N.pt`` is written to a temporary file in the same folder, synced and renamed; its record
``step-N.json`` follows in the same way. What was committed before is deleted only then. Both were
synced, so the disk has them; reading them back would show the page cache, not the disk.
"""

from __future__ import annotations

import copy
import hashlib
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.utils.serialization import config

from harness.runtime.errors import DiskError
from harness.runtime.files import replacing, sync_folder, write_whole
from harness.training.checkpoint import UNNAMED, Record, order, records, sealed


def packed(state: dict[str, Any], memory: BytesIO) -> bytes:
    """Returns the content of a file with ``state``, whose tensors may change afterwards.

    The host waits here for the device. ``memory`` holds the content, in the place of the one
    before: to get new memory would take longer than to fill it.
    """
    memory.seek(0)
    # the digest of the whole file makes torch's checksums needless, and they take longer
    with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
        torch.save(_on_host(state), memory)
    memory.truncate()
    return memory.getvalue()


def _on_host(value: Any) -> Any:
    """Returns a state as it is on a CPU: a file must not ask for the device that it came from."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        # keeps the _metadata of a network's state, too
        made = copy.copy(value)
        made.update((key, _on_host(item)) for key, item in value.items())
        return made
    return value


def save(
    folder: Path, content: bytes, *, step: int, epoch: int, top1: float | None, keep_last: int
) -> Record:
    """Commits ``content`` under a free name in ``folder``, moves the pointers and drops old ones.

    Of equal top-1 ``best.pt`` has the earlier.

    Raises:
        DiskError: a file could not be written; what was there before stays whole.
    """
    path = folder / f"step-{step}.pt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder)
        if taken := [number for of, number in map(order, folder.glob("step-*")) if of == step]:
            path = folder / f"step-{step}.{1 + max(taken)}.pt"
        record = Record(path, step, epoch, top1, hashlib.sha256(content).hexdigest())
        _write(path, content)
        _write(path.with_suffix(".json"), sealed(record))
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


def finish(folder: Path, keep_last: int) -> None:
    """Does what a killed save has left to do in ``folder``."""
    # an error here would come again with the next save, which tells of it
    with suppress(OSError):
        if committed := records(folder):
            _retain(folder, committed[-1], keep_last)
        _clear(folder)


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


def _write(path: Path, content: bytes) -> None:
    """Writes ``path``, whole or not at all; afterwards the disk has it, and its name."""
    write_whole(path, content)
    sync_folder(path.parent)


def _point(link: Path, target: Path) -> None:
    """Lets ``link`` lead to ``target``, swapped in one step so that it is never absent."""
    try:
        with replacing(link) as temporary:
            temporary.symlink_to(target.name)
    except OSError:
        # not every file system has links: a text then holds the name
        write_whole(link, target.name.encode())
