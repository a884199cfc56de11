"""How a checkpoint gets to disk, whole or not at all, and back, never damaged in silence.

``step-N.json`` is the commit record of ``step-N.pt`` and holds its digest: a checkpoint without a
record does not exist. Further saves of the same step are ``step-N.2.pt``, ``step-N.3.pt`` and so
on. The digests (SHA-256) protect from rot, not from an attacker; what is loaded is limited to
tensors and plain containers (``weights_only=True``).

Each file is written to a temporary one in the same folder, which is synced and renamed: the state
first, then its record. What was committed before is deleted only then. Both were synced, so the
disk has them; reading them back would show the page cache, not the disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import zipfile
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.utils.serialization import config as torch_config

from harness.config import Config, from_plain
from harness.runtime import parts
from harness.runtime.errors import CheckpointError, DiskError, printable
from harness.runtime.files import (
    open_regular,
    parsed,
    read_regular,
    replacing,
    sync_folder,
    typed,
    write_whole,
)
from harness.runtime.folder import log

# 1 had no digest of the record itself
SCHEMA = 2
UNNAMED = -1, 0
# what a resumed run counts on from; schema 1 has epoch and step alone
COUNTS = {
    "epoch": int,
    "step": int,
    "samples": int,
    "pending": bool,
    "best_top1": float | None,
    "stale": int,
}
# none of which is 0
_SIZES = ("ranks", "stop", "steps_per_epoch")
# of a file that may be read the next time
_PASSING = {
    errno.EACCES, errno.EPERM, errno.ESTALE, errno.EMFILE, errno.ENFILE,
    errno.ENOMEM, errno.EAGAIN, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Record:
    """A committed checkpoint.

    Attributes:
        path: the ``.pt`` file.
        step: optimizer updates done.
        epoch: epochs done.
        top1: accuracy on the validation set, 0..1, or None.
        sha256: digest of the file.
    """

    path: Path
    step: int
    epoch: int
    top1: float | None
    sha256: str


@dataclass
class Saved:
    """What a file holds: a run's whole state, or weights alone.

    Attributes:
        where: names the file.
        state: what it holds.
        in_run: whether the file lies in the folder of a run.
        classes: their names, by place in the logits; empty: they have none.
        trained: the settings of the run that saved it, if a run did.

    Raises:
        CheckpointError: counts, classes or settings are none that a run saves.
    """

    where: str
    state: dict[str, Any]
    in_run: bool = False
    classes: tuple[str, ...] = field(init=False)
    trained: Config | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        state = self.state
        with self.in_use():
            for key, value in state.items():
                if key in COUNTS:
                    typed(COUNTS[key], value)
                elif key in _SIZES and not typed(int, value):
                    raise ValueError(f"{key} is 0")
            self.classes = tuple(state.get("classes", ()))
            # text that a file can hold
            "".join(self.classes).encode("utf-8", "surrogateescape")
            if "settings" in state:
                self.trained = from_plain(state["settings"])

    def in_use(self) -> AbstractContextManager[None]:
        """Returns a block that uses the contents; whatever they raise is a ``CheckpointError``."""
        begin = f"{self.where}: cannot be used:"
        return parts.explained(begin, "; name another one", CheckpointError)


def records(folder: Path) -> list[Record]:
    """Returns the committed checkpoints of ``folder``, oldest first, without unreadable records."""
    found = []
    for manifest in sorted(folder.glob("step-*.json"), key=order):
        with suppress(CheckpointError):
            found.append(_record(manifest))
    return found


def pointed(past: list[Record]) -> dict[str, Record]:
    """Returns of ``past``, oldest first, what ``last.pt`` and ``best.pt`` stand for.

    Of equal top-1 the earlier is the best.
    """
    found = {"last.pt": past[-1]} if past else {}
    if rated := [record for record in past if record.top1 is not None]:
        found["best.pt"] = max(rated, key=lambda record: record.top1 or 0.0)
    return found


def order(path: Path) -> tuple[int, int]:
    """Returns the step and the serial number in a checkpoint's name; else ``UNNAMED``."""
    match = re.fullmatch(r"step-(\d{1,18})(?:\.(\d{1,9}))?", path.stem)
    if match is None:
        return UNNAMED
    return int(match[1]), int(match[2] or 1)


def sealed(record: Record) -> bytes:
    """Returns the content of the file of ``record``, its own digest among it."""
    facts = asdict(record)
    del facts["path"]
    blank = json.dumps({"schema": SCHEMA, **facts, "digest": ""})
    digest = hashlib.sha256(blank.encode()).hexdigest()
    return blank.replace('"digest": ""', f'"digest": "{digest}"').encode()


def newest(folder: Path) -> tuple[Record, dict[str, Any]] | None:
    """Returns the newest undamaged checkpoint of ``folder`` and its state; warns of damaged ones.

    None: there is no checkpoint at all.

    Raises:
        CheckpointError: every checkpoint is damaged or has lost its record, or the newest cannot be
            read now: training never starts from nothing by itself.
    """
    damaged: list[str] = []
    for manifest in sorted(folder.glob("step-*.json"), key=order, reverse=True):
        try:
            record = _record(manifest)
            state = _load(record.path, record.sha256)
        except CheckpointError as error:
            # no older one serves for a whole one
            if getattr(error.__cause__, "errno", None) in _PASSING:
                raise
            damaged.append(str(error))
            continue
        for text in damaged:
            log.warning("%s; falling back to %s", text, record.path.name)
        return record, state
    if damaged:
        raise CheckpointError(
            f"{folder}: every checkpoint is damaged: {damaged[0]}; resume=null in another run "
            "folder starts from nothing"
        )
    # one may be of a first save that was killed
    if len(list(folder.glob("step-*.pt"))) > 1:
        raise CheckpointError(
            f"{folder}: the records (step-*.json) of its checkpoints are missing; put them there"
        )
    return None


def read(path: Path) -> tuple[Record, dict[str, Any]]:
    """Returns the checkpoint at ``path`` and its state.

    ``path`` is a ``.pt`` file beside its record, or a run's folder, whose newest checkpoint is
    meant.

    Raises:
        CheckpointError: missing, damaged, without a record or not a checkpoint.
    """
    if path.is_dir():
        inside = path / "checkpoints"
        found = newest(inside if inside.is_dir() else path)
        if found is None:
            raise CheckpointError(f"{printable(str(path))}: holds no checkpoint")
        return found
    target = _target(path)
    record = _record(target.with_suffix(".json"))
    return record, _load(target, record.sha256)


def read_any(path: Path) -> dict[str, Any]:
    """Returns what a checkpoint of ours (digest checked) or another file with weights holds.

    Raises:
        CheckpointError: missing, damaged or not a checkpoint.
    """
    if path.is_dir() or _target(path).with_suffix(".json").is_file():
        return read(path)[1]
    return _load(path, None)


def weights_of(state: dict[str, Any], where: str) -> dict[str, torch.Tensor]:
    """Returns the network's weights in what a file holds: their average, if it has one of ours.

    Raises:
        CheckpointError: ``where``, which names the file, has none.
    """
    averaged = state.get("ema")
    if isinstance(averaged, dict) and "n_averaged" in averaged:
        state = {key: value for key, value in averaged.items() if key != "n_averaged"}
    # ours and most others'; pytorch/examples'
    for key in ("model", "state_dict"):
        if isinstance(state.get(key), dict):
            state = state[key]
    weights = {str(key).removeprefix("module."): value for key, value in state.items()}
    if not weights or not all(map(is_plain, weights.values())):
        raise CheckpointError(f"{where}: holds no weights of a network (dense tensors in memory)")
    for key, value in weights.items():
        if value.is_floating_point() and not value.isfinite().all():
            log.warning("%s: %s holds NaN or infinity", where, printable(key))
            break
    return weights


def is_plain(value: Any) -> bool:
    """Whether ``value`` is a dense tensor in memory, no larger than its storage."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and value.nbytes <= value.untyped_storage().nbytes()
    )


def _record(manifest: Path) -> Record:
    name = printable(str(manifest))
    with parts.explained(f"{name}: not the record of a checkpoint:", kind=CheckpointError):
        data = read_regular(manifest, 1 << 16)
        facts = parsed(data)
        schema = typed(int, facts["schema"])
        if schema > SCHEMA:
            raise CheckpointError(
                f"{name}: written by a newer version (schema {schema}, this one reads {SCHEMA})"
            )
        digest = facts.get("digest", "")
        blank = data.replace(digest.encode(), b"")
        if schema != 1 and hashlib.sha256(blank).hexdigest() != digest:
            raise ValueError("changed since it was written")
        # NaN is no accuracy
        if facts["top1"] != facts["top1"]:
            facts["top1"] = None
        kinds = {"step": int, "epoch": int, "top1": float | None, "sha256": str}
        values = (typed(kind, facts[key]) for key, kind in kinds.items())
        record = Record(manifest.with_suffix(".pt"), *values)
        if order(manifest)[0] not in (-1, record.step):
            raise ValueError("another step")
    return record


def _target(path: Path) -> Path:
    """Returns the file that ``path`` leads to; a pointer may lag behind the records."""
    target = path.resolve()
    record = pointed(records(path.parent)).get(path.name)
    # a link to a damaged record is an error, as ever
    if record and target.name != path.name:
        _record(target.with_suffix(".json"))
    return record.path if record else target


def _load(path: Path, sha256: str | None) -> dict[str, Any]:
    """Returns what the file holds, if its digest is ``sha256`` (None: unknown)."""
    name = printable(str(path))
    try:
        with open(open_regular(path), "rb") as file:
            if sha256 is not None:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                if found != sha256:
                    raise CheckpointError(
                        f"{name}: damaged: its digest is {found[:12]}..., recorded {sha256[:12]}..."
                    )
            # other files would be errors of many kinds in torch; torch packs nothing, and a packed
            # file of megabytes may stand for gigabytes
            size = file.seek(0, os.SEEK_END)
            if (
                not zipfile.is_zipfile(file)
                or sum(part.file_size for part in zipfile.ZipFile(file).infolist()) > size
            ):
                raise CheckpointError(f"{name}: not a checkpoint")
            file.seek(0)
            state = torch.load(file, map_location="cpu", weights_only=True)
    except (CheckpointError, MemoryError):
        raise
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be read: {error.strerror or error}") from error
    except Exception as error:
        # a damaged pickle may raise anything
        raise CheckpointError(
            f"{name}: refused: holds more than tensors and plain containers, or is damaged"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{name}: not a checkpoint")
    return state


def packed(state: dict[str, Any], file: BytesIO) -> BytesIO:
    """Writes ``state`` over what ``file`` held; the caller waits for the device.

    Afterwards the tensors of the state may change. Memory that was filled before is faster.
    """
    file.seek(0)
    # the digest of the whole file makes torch's checksums needless, and they take longer
    with torch_config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
        torch.save(state, file)
    file.truncate()
    return file


def commit(
    folder: Path, state: BytesIO, step: int, epoch: int, top1: float | None, keep_last: int
) -> Record:
    """Commits a packed ``state`` under a free name, moves the pointers and drops old ones.

    The name is that of its ``step``.

    Raises:
        DiskError: a file could not be written; what was there before stays whole.
    """
    path = folder / f"step-{step}.pt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clear(folder)
        if taken := [number for of, number in map(order, folder.glob("step-*")) if of == step]:
            path = folder / f"step-{step}.{1 + max(taken)}.pt"
        with state.getbuffer() as data:
            record = Record(path, step, epoch, top1, hashlib.sha256(data).hexdigest())
            write_whole(path, data)
        sync_folder(folder)
        write_whole(path.with_suffix(".json"), sealed(record))
        sync_folder(folder)
        committed = records(folder)
        # those of later steps belong to a past that a resume has left
        past = [old for old in committed if order(old.path) <= order(path)]
        mark(folder, past)
        sync_folder(folder)
        kept = [*past[-keep_last:], *pointed(past).values()]
        for old in committed:
            if old not in kept:
                old.path.with_suffix(".json").unlink(missing_ok=True)
    except OSError as error:
        raise DiskError(
            f"{error.filename or path}: cannot save the checkpoint: {error.strerror or error}; "
            "earlier ones are whole: make room or mend the disk, then go on with resume=auto"
        ) from error
    finally:
        clear(folder)
    return record


def mark(folder: Path, past: list[Record]) -> None:
    """Lets ``last.pt`` and ``best.pt`` lead to the newest and the best of ``past``, oldest first.

    Each is swapped in one step so that it is never absent.
    """
    for name, record in pointed(past).items():
        try:
            with replacing(folder / name) as temporary:
                temporary.symlink_to(record.path.name)
        except OSError:
            # not every file system has links: a text then holds the name
            write_whole(folder / name, record.path.name.encode())


def clear(folder: Path) -> None:
    """Deletes what belongs to no checkpoint: temporary files, and files without a record.

    Only one run owns the folder, so no save of another can be under way.
    """
    # what cannot be deleted now is in nobody's way, and goes with a later save
    with suppress(OSError):
        orphans = list(folder.glob(".*.tmp"))
        for path in folder.glob("step-*.pt"):
            if order(path) != UNNAMED and not path.with_suffix(".json").exists():
                orphans.append(path)
        for path in orphans:
            if not path.is_dir():
                path.unlink(missing_ok=True)
