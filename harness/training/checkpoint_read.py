"""Defines the checkpoint format, reads checkpoints and detects corruption.

``step-N.json`` is the commit record of ``step-N.pt`` and contains its digest; a ``.pt`` file
without a record is not a checkpoint. Further saves at the same step are named ``step-N.2.pt``,
``step-N.3.pt``, etc. The SHA-256 digests detect corruption, not attacks; loading is limited to
tensors and plain containers (``weights_only=True``).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..config import Config, from_plain
from ..runtime import user_code
from ..runtime.errors import CheckpointError, listed, printable
from ..runtime.files import from_json, open_regular, read_regular
from ..runtime.folder import log
from ..suggestions import typed
from . import weights

# schema 1 had no digest for the record itself
SCHEMA = 2
UNNAMED = -1, 0
# counters that a resumed run restores; schema 1 has only epoch and step
COUNTS = {
    "epoch": int,
    "step": int,
    "samples": int,
    "pending": bool,
    "best_top1": float | None,
    "stale": int,
}
# must not be 0
_SIZES = ("ranks", "stop", "steps_per_epoch")
# errors after which a retry may succeed
_PASSING = {
    errno.EACCES, errno.EPERM, errno.ESTALE, errno.EMFILE, errno.ENFILE,
    errno.ENOMEM, errno.EAGAIN, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN,
}  # fmt: skip


class NoCheckpoint(CheckpointError):
    """The folder has never had a checkpoint."""


class Record(NamedTuple):
    """A committed checkpoint.

    Attributes:
        path: the ``.pt`` file.
        step: completed optimizer steps.
        epoch: completed epochs.
        top1: validation accuracy, 0..1, or None.
        sha256: the file's digest.
    """

    path: Path
    step: int
    epoch: int
    top1: float | None
    sha256: str


@dataclass
class Saved:
    """A file's content: the full state of a run, or only weights.

    Attributes:
        where: the file name, for messages.
        state: the content.
        in_run: whether the file is in a run folder.
        record: the record, if the file is a wellfed checkpoint.
        classes: the class names in logit order; empty if there are none.
        trained: the settings of the run that saved the file, if any.

    Raises:
        CheckpointError: counters, classes or settings are invalid.
    """

    where: str
    state: dict[str, Any]
    in_run: bool = False
    record: Record | None = None
    classes: tuple[str, ...] = field(init=False)
    trained: Config | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        state = self.state
        with user_code.explained(f"{self.where}: cannot be used:", kind=CheckpointError):
            for key, value in state.items():
                if key in COUNTS:
                    from_json(COUNTS[key], value)
                elif key in _SIZES and not from_json(int, value):
                    raise ValueError(f"{key} is 0")
            self.classes = tuple(state.get("classes", ()))
            # raises if they cannot be encoded
            "".join(self.classes).encode("utf-8", "surrogateescape")
            if "settings" in state:
                self.trained = from_plain(state["settings"])


def records(folder: Path) -> list[Record]:
    """Returns the readable committed checkpoints in ``folder``, oldest first."""
    found = []
    for manifest in sorted(folder.glob("step-*.json"), key=order):
        with suppress(CheckpointError):
            found.append(_record(manifest))
    return found


def pointed(past: list[Record]) -> dict[str, Record]:
    """Returns the targets of ``last.pt`` and ``best.pt`` in ``past``, which is oldest first.

    If top-1 is equal, the earlier one is the best.
    """
    found = {"last.pt": past[-1]} if past else {}
    if rated := [record for record in past if record.top1 is not None]:
        found["best.pt"] = max(rated, key=lambda record: record.top1 or 0.0)
    return found


def order(path: Path) -> tuple[int, int]:
    """Returns the step and the serial number from a checkpoint's name, or ``UNNAMED``."""
    match = re.fullmatch(r"step-(\d{1,18})(?:\.(\d{1,9}))?", path.stem)
    if not match:
        return UNNAMED
    return int(match[1]), int(match[2] or 1)


def sealed(record: Record) -> bytes:
    """Returns the file content for ``record``, including its own digest."""
    facts = record._asdict()
    del facts["path"]
    blank = json.dumps({"schema": SCHEMA, **facts, "digest": ""})
    digest = hashlib.sha256(blank.encode()).hexdigest()
    return blank.replace('"digest": ""', f'"digest": "{digest}"').encode()


def read(path: Path, *, foreign: bool = False) -> Saved:
    """Returns the checkpoint at ``path``; warns about newer ones that are damaged.

    ``path`` is a ``.pt`` file next to its record, any weights file if ``foreign``, or a run folder,
    whose newest undamaged checkpoint is read.

    Raises:
        NoCheckpoint: the folder has none.
        CheckpointError: it is missing, damaged or not a checkpoint, or the newest one cannot be
            read now. If all are damaged or lack records, training does not start from scratch.
    """
    if not path.is_dir():
        target = _target(path)
        manifest = target.with_suffix(".json")
        if not manifest.is_file():
            if foreign:
                return _load(path)
            if path.is_file() and order(path) == UNNAMED:
                raise CheckpointError(
                    f"{printable(str(path))} is not a wellfed checkpoint, so it cannot be "
                    "resumed; to use its weights, write model.weights= instead of resume="
                )
        return _load(target, _record(manifest))
    if (path / "checkpoints").is_dir():
        path /= "checkpoints"
    name = printable(str(path))
    damaged: list[str] = []
    for manifest in sorted(path.glob("step-*.json"), key=order, reverse=True):
        try:
            record = _record(manifest)
            found = _load(record.path, record)
        except CheckpointError as error:
            # the newest one may be intact, so an older one must not replace it
            if getattr(error.__cause__, "errno", None) in _PASSING:
                raise
            damaged.append(str(error))
            continue
        for text in damaged:
            log.warning("%s; falling back to %s", text, record.path.name)
        return found
    if damaged:
        raise CheckpointError(
            f"{name}: every checkpoint is damaged: {damaged[0]}; to start from scratch, use "
            "resume=null and a different run folder"
        )
    # a single file may be from a killed first save
    if len(list(path.glob("step-*.pt"))) > 1:
        raise CheckpointError(
            f"{name}: the records (step-*.json) of its checkpoints are missing; restore them to "
            "that folder"
        )
    if foreign:
        files = [typed("model.weights", file) for file in sorted(path.glob("*.*"))]
        raise CheckpointError(f"{name} is not a run folder; specify a file: {listed(files)}")
    raise NoCheckpoint(f"{name} contains no checkpoint; specify one with resume=PATH")


def _record(manifest: Path) -> Record:
    name = printable(str(manifest))
    with user_code.explained(f"{name} is not a checkpoint record:", kind=CheckpointError):
        data = read_regular(manifest, 1 << 16)
        facts = json.loads(data)
        schema = from_json(int, facts["schema"])
        if schema > SCHEMA:
            raise CheckpointError(
                f"{name} was written by a newer version (schema {schema}, this one reads {SCHEMA})"
            )
        digest = facts.get("digest", "")
        blank = data.replace(digest.encode(), b"")
        if schema != 1 and hashlib.sha256(blank).hexdigest() != digest:
            raise ValueError("it has changed since it was written")
        # NaN is not an accuracy
        if facts["top1"] != facts["top1"]:
            facts["top1"] = None
        kinds = {"step": int, "epoch": int, "top1": float | None, "sha256": str}
        values = (from_json(kind, facts[key]) for key, kind in kinds.items())
        record = Record(manifest.with_suffix(".pt"), *values)
        if order(manifest)[0] not in (-1, record.step):
            raise ValueError("its step differs from its name")
    return record


def _target(path: Path) -> Path:
    """Returns the file that ``path`` points to; a pointer may lag behind the records."""
    # resolves a link loop to itself
    target = Path(os.path.realpath(path))
    record = pointed(records(path.parent)).get(path.name)
    # a link to a checkpoint with a damaged record is still an error
    if record and target.name != path.name:
        _record(target.with_suffix(".json"))
    return record.path if record else target


def _load(path: Path, record: Record | None = None) -> Saved:
    """Returns the file's content, after checking its digest against ``record``."""
    name = printable(str(path))
    try:
        with open(open_regular(path), "rb") as file:
            if record:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                if found != record.sha256:
                    raise CheckpointError(
                        f"{name} is damaged: its digest is {found[:12]}..., but the record has "
                        f"{record.sha256[:12]}..."
                    )
            state = weights.load(file, name, others=not record)
    except (CheckpointError, MemoryError):
        raise
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        # a damaged pickle may raise anything
        raise CheckpointError(
            f"{name} was rejected, because it contains more than tensors and plain containers, or "
            "is damaged; save weights with torch.save(network.state_dict(), PATH)"
        ) from error
    if not isinstance(state, dict) or (not record and "settings" not in state):
        # the same keys have other meanings in other trainers
        state = {"": state}
    places = Path(os.path.realpath(path)).parents[:2]
    return Saved(name, state, any((place / "train.log").is_file() for place in places), record)
