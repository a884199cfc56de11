"""How a checkpoint gets to disk and back: whole or not at all, and never damaged in silence.

``step-N.pt`` is written to a temporary file in the same folder, synced and renamed; ``step-N.json``, with its digest, is
written last in the same way and is the commit record: a checkpoint without it does not exist. The digest (SHA-256) protects
from rot, not from an attacker; what is loaded is limited to tensors and plain containers (``weights_only=True``).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from harness.runtime.errors import CheckpointError, DiskError, printable
from harness.runtime.files import open_regular, read_json, typed

SCHEMA = 1


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


def save(folder: Path, state: dict[str, Any], *, step: int, epoch: int, top1: float | None, keep_last: int) -> Record:
    """Commit ``state`` as ``folder/step-N.pt``, point ``last.pt`` and ``best.pt`` at their files, drop old ones.

    ``best.pt`` has the highest finite top-1; ties keep the earlier.

    Raises:
        DiskError: a file could not be written; what was there before stays whole.
    """
    path = folder / f"step-{step}.pt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        digest = _write(path, lambda file: torch.save(state, file))
        record = Record(path, step, epoch, top1, digest)
        facts = {"schema": SCHEMA, "step": step, "epoch": epoch, "top1": top1, "sha256": digest}
        _write(path.with_suffix(".json"), lambda file: file.write(json.dumps(facts).encode()))
        committed = [old for old in records(folder) if old.step <= step]
        best = best_of(committed)
        _point(folder / "last.pt", path)
        if best is not None:
            _point(folder / "best.pt", best.path)
        kept = {*committed[-keep_last:], best}
        for old in records(folder):  # those of later steps belong to a past that a resume has left
            if old not in kept:
                old.path.with_suffix(".json").unlink(missing_ok=True)  # first the record, then what it vouches for
                old.path.unlink(missing_ok=True)
    except OSError as error:
        raise DiskError(f"{error.filename or path}: cannot save the checkpoint: {error.strerror or error}") from error
    return record


def records(folder: Path) -> list[Record]:
    """The committed checkpoints of ``folder``, oldest first; a record that cannot be read counts as none."""
    found = []
    for manifest in folder.glob("step-*.json"):
        try:
            found.append(_record(manifest))
        except CheckpointError:
            continue
    return sorted(found, key=lambda record: record.step)


def best_of(committed: list[Record]) -> Record | None:
    """The first of those with the highest finite top-1, if any has one."""
    rated = [r for r in committed if r.top1 is not None]
    return max(rated, key=lambda r: (r.top1, -r.step)) if rated else None


def newest(folder: Path) -> tuple[Record, dict[str, Any], list[str]] | None:
    """The newest checkpoint of ``folder`` that passes its digest, its state, and what was wrong with newer ones.

    Returns:
        None where there is no checkpoint at all.

    Raises:
        CheckpointError: there are checkpoints, and every one is damaged: training never starts anew by itself.
    """
    warnings: list[str] = []
    manifests = sorted(folder.glob("step-*.json"), key=lambda path: -_step_of(path))
    for manifest in manifests:
        try:
            record = _record(manifest)
            return record, _load(record.path, record.sha256), warnings
        except CheckpointError as error:
            warnings.append(str(error))
    if manifests:
        raise CheckpointError(
            f"{folder}: every checkpoint is damaged: {warnings[0]}; resume=null in another run folder starts anew"
        )
    return None


def read(path: Path) -> tuple[Record, dict[str, Any], list[str]]:
    """The checkpoint at ``path``, its state, and what was wrong with newer ones.

    ``path`` is a ``.pt`` file beside its record, or a run's folder, whose newest checkpoint is meant.

    Raises:
        CheckpointError: missing, damaged, without a record or not a checkpoint.
    """
    if path.is_dir():
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        found = newest(folder)
        if found is None:
            raise CheckpointError(f"{printable(str(path))}: holds no checkpoint")
        return found
    if not path.is_file():
        raise CheckpointError(f"{printable(str(path))}: no such checkpoint")
    target = path.resolve()
    record = _record(target.with_suffix(".json"))
    return record, _load(target, record.sha256), []


def read_any(path: Path) -> dict[str, Any]:
    """What a checkpoint of ours (digest checked) or another file with weights holds.

    Raises:
        CheckpointError: missing, damaged or not a checkpoint.
    """
    if path.is_dir() or path.resolve().with_suffix(".json").is_file():
        return read(path)[1]
    if path.is_file():
        return _load(path, None)
    raise CheckpointError(f"model.weights={printable(str(path))}: no such file; use null, DEFAULT or a path")


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The network's weights in a file that ``read_any`` reads."""
    return weights_of(read_any(path), printable(str(path)))


def weights_of(state: dict[str, Any], where: str) -> dict[str, torch.Tensor]:
    """The network's weights in what a file holds.

    Raises:
        CheckpointError: ``where``, which names the file, has none.
    """
    for key in ("model", "state_dict"):  # ours and most others'; pytorch/examples'
        if isinstance(state.get(key), dict):
            state = state[key]
    weights = {str(key).removeprefix("module."): value for key, value in state.items()}
    if not weights or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise CheckpointError(f"{where}: holds no weights of a network")
    return weights


def _record(manifest: Path) -> Record:
    name = printable(str(manifest))
    try:
        facts = read_json(manifest)
        schema, step, epoch = (typed(int, facts[name]) for name in ("schema", "step", "epoch"))
        top1 = typed(float | None, facts["top1"] if facts["top1"] == facts["top1"] else None)
        digest = typed(str, facts["sha256"])
        if not schema or _step_of(manifest) not in (-1, step):
            raise ValueError("another step, or no schema")
    except FileNotFoundError as error:
        raise CheckpointError(f"{name}: missing, so the checkpoint beside it was never committed") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{name}: not the record of a checkpoint ({error})") from error
    if schema > SCHEMA:
        raise CheckpointError(f"{name}: written by a newer version (schema {schema}, this one reads {SCHEMA})")
    return Record(manifest.with_suffix(".pt"), step, epoch, top1, digest)


def _load(path: Path, sha256: str | None) -> dict[str, Any]:
    name = printable(str(path))
    try:
        with open(open_regular(path), "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise CheckpointError(f"{name}: empty file")
            if sha256 is not None:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                if found != sha256:
                    raise CheckpointError(f"{name}: damaged: its digest is {found[:12]}..., recorded {sha256[:12]}...")
            file.seek(0)
            if not zipfile.is_zipfile(file):
                raise CheckpointError(f"{name}: not a checkpoint")
            file.seek(0)
            state = torch.load(file, map_location="cpu", weights_only=True)
    except (CheckpointError, MemoryError):
        raise
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"{name}: refused: holds more than tensors and plain containers, or is damaged") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{name}: not a checkpoint")
    return state


def _write(path: Path, fill: Any) -> str:
    """Write ``path`` whole or not at all, and to the disk before its name shows; the SHA-256 of its bytes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as raw:
            file = _Hashing(raw)
            fill(file)
            raw.flush()
            os.fsync(raw.fileno())
        if file.error is not None:
            raise file.error
        os.replace(temporary, path)
        _sync_folder(path.parent)
        return file.digest.hexdigest()
    except RuntimeError as error:  # torch hides an OSError of the file behind one without path or errno
        raise (file.error or error) from error
    finally:
        temporary.unlink(missing_ok=True)


class _Hashing:
    """A file that hashes what is written, and remembers the first error that torch would hide."""

    def __init__(self, raw: BinaryIO) -> None:
        self.raw = raw
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = self.raw.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.digest.update(data)
        return written

    def flush(self) -> None:
        self.raw.flush()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _point(link: Path, target: Path) -> None:
    """Let ``link`` point at ``target``, swapped in one step so that it is never absent."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    os.replace(temporary, link)


def _sweep(folder: Path) -> None:
    """Remove what a killed save left behind: only one run owns the folder, so no save of another can be under way."""
    for temporary in folder.glob(".*.tmp"):
        temporary.unlink(missing_ok=True)


def _step_of(manifest: Path) -> int:
    match = re.fullmatch(r"step-(\d+)", manifest.stem)
    return int(match[1]) if match else -1
