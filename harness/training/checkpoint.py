"""How a checkpoint comes back from disk: never damaged in silence.

``step-N.json`` is the commit record of ``step-N.pt`` and holds its digest: a checkpoint without a
record does not exist. Further saves of the same step are ``step-N.2.pt``, ``step-N.3.pt`` and so
on. The digests (SHA-256) protect from rot, not from an attacker; what is loaded is limited to
tensors and plain containers (``weights_only=True``).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import zipfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from harness.runtime.errors import CheckpointError, printable
from harness.runtime.files import open_regular, parsed, read_regular, typed
from harness.runtime.folder import log

# 1 had no digest of the record itself
SCHEMA = 2
UNNAMED = -1, 0
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


class _PassingError(CheckpointError):
    """A checkpoint that cannot be read now and may be whole, so no older one serves."""


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
        except _PassingError:
            raise
        except CheckpointError as error:
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
    try:
        data = read_regular(manifest, 1 << 16)
        facts = parsed(data)
        schema = typed(int, facts["schema"])
        if schema > SCHEMA:
            raise CheckpointError(
                f"{name}: written by a newer version (schema {schema}, this one reads {SCHEMA})"
            )
        if schema > 1:
            digest = typed(str, facts["digest"]).encode()
            if hashlib.sha256(data.replace(digest, b"")).hexdigest().encode() != digest:
                raise ValueError("changed since it was written")
        # NaN is no accuracy
        if facts["top1"] != facts["top1"]:
            facts["top1"] = None
        record = Record(
            path=manifest.with_suffix(".pt"),
            step=typed(int, facts["step"]),
            epoch=typed(int, facts["epoch"]),
            top1=typed(float | None, facts["top1"]),
            sha256=typed(str, facts["sha256"]),
        )
        if not schema or order(manifest)[0] not in (-1, record.step):
            raise ValueError("another step, or no schema")
    except FileNotFoundError as error:
        missing = f"{name}: missing, so the checkpoint beside it was never committed"
        raise CheckpointError(missing) from error
    except OSError as error:
        raise _unread(name, error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{name}: not the record of a checkpoint ({error})") from error
    return record


def _target(path: Path) -> Path:
    """Returns the file that ``path`` leads to; a pointer may lag behind the records."""
    target = path.resolve()
    record = pointed(records(path.parent)).get(path.name)
    # a link to a damaged record is an error, as ever
    if record and target.name != path.name:
        _record(target.with_suffix(".json"))
    return record.path if record else target


def _unread(name: str, error: OSError) -> CheckpointError:
    if error.errno in _PASSING:
        return _PassingError(
            f"{name}: cannot be read now: {error.strerror}; try again, or name an older one with "
            "resume=PATH"
        )
    return CheckpointError(f"{name}: cannot be read: {error.strerror or error}")


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
        raise _unread(name, error) from error
    except Exception as error:
        # a damaged pickle may raise anything
        raise CheckpointError(
            f"{name}: refused: holds more than tensors and plain containers, or is damaged"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{name}: not a checkpoint")
    return state
