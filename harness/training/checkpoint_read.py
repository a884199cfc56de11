"""Defines the files of a checkpoint, reads them and detects damage.

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

# 1 had no digest of the record itself
SCHEMA = 2
UNNAMED = -1, 0
# what a resumed run counts on from, as the engine's epochs set it; schema 1 has epoch and step
# alone
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


class NoCheckpoint(CheckpointError):
    """A folder has never had a checkpoint."""


class Record(NamedTuple):
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
        record: of a wellfed checkpoint.
        classes: their names, by place in the logits; empty: they have none.
        trained: the settings of the run that saved it, if a run did.

    Raises:
        CheckpointError: counts, classes or settings are none that a run saves.
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
            # text that a file can hold
            "".join(self.classes).encode("utf-8", "surrogateescape")
            if "settings" in state:
                self.trained = from_plain(state["settings"])


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
    facts = record._asdict()
    del facts["path"]
    blank = json.dumps({"schema": SCHEMA, **facts, "digest": ""})
    digest = hashlib.sha256(blank.encode()).hexdigest()
    return blank.replace('"digest": ""', f'"digest": "{digest}"').encode()


def read(path: Path, *, foreign: bool = False) -> Saved:
    """Returns what the checkpoint at ``path`` holds; warns of damaged newer ones.

    ``path`` is a ``.pt`` file beside its record, a ``foreign`` file with weights where those may be
    named, or a run's folder, whose newest undamaged checkpoint is meant.

    Raises:
        NoCheckpoint: the folder has none.
        CheckpointError: missing, damaged, not a checkpoint, or the newest cannot be read now. Where
            all are damaged or have lost their records, training never starts from nothing by
            itself.
    """
    if not path.is_dir():
        target = _target(path)
        manifest = target.with_suffix(".json")
        if not manifest.is_file():
            if foreign:
                return _load(path)
            if path.is_file() and order(path) == UNNAMED:
                raise CheckpointError(
                    f"{printable(str(path))}: no checkpoint of wellfed, so nothing to resume; to "
                    "use its weights write model.weights= in place of resume="
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
            # no older one serves for a whole one
            if getattr(error.__cause__, "errno", None) in _PASSING:
                raise
            damaged.append(str(error))
            continue
        for text in damaged:
            log.warning("%s; falling back to %s", text, record.path.name)
        return found
    if damaged:
        raise CheckpointError(
            f"{name}: every checkpoint is damaged: {damaged[0]}; resume=null in another run "
            "folder starts from nothing"
        )
    # one may be of a first save that was killed
    if len(list(path.glob("step-*.pt"))) > 1:
        raise CheckpointError(
            f"{name}: the records (step-*.json) of its checkpoints are missing; put them there"
        )
    if foreign:
        files = [typed("model.weights", file) for file in sorted(path.glob("*.*"))]
        raise CheckpointError(f"{name}: a folder of no run; name a file: {listed(files)}")
    raise NoCheckpoint(f"{name}: holds no checkpoint; name one with resume=PATH")


def _record(manifest: Path) -> Record:
    name = printable(str(manifest))
    with user_code.explained(f"{name}: not the record of a checkpoint:", kind=CheckpointError):
        data = read_regular(manifest, 1 << 16)
        facts = json.loads(data)
        schema = from_json(int, facts["schema"])
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
        values = (from_json(kind, facts[key]) for key, kind in kinds.items())
        record = Record(manifest.with_suffix(".pt"), *values)
        if order(manifest)[0] not in (-1, record.step):
            raise ValueError("another step")
    return record


def _target(path: Path) -> Path:
    """Returns the file that ``path`` leads to; a pointer may lag behind the records."""
    # of a loop of links it is the loop
    target = Path(os.path.realpath(path))
    record = pointed(records(path.parent)).get(path.name)
    # a link to a damaged record is an error, as ever
    if record and target.name != path.name:
        _record(target.with_suffix(".json"))
    return record.path if record else target


def _load(path: Path, record: Record | None = None) -> Saved:
    """Returns what the file holds, if its digest is that of its ``record``."""
    name = printable(str(path))
    try:
        with open(open_regular(path), "rb") as file:
            if record is not None:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                if found != record.sha256:
                    raise CheckpointError(
                        f"{name}: damaged: its digest is {found[:12]}..., recorded "
                        f"{record.sha256[:12]}..."
                    )
            state = weights.load(file, name, others=record is None)
    except (CheckpointError, MemoryError):
        raise
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be read: {error.strerror or error}") from error
    except Exception as error:
        # a damaged pickle may raise anything
        raise CheckpointError(
            f"{name}: refused: holds more than tensors and plain containers, or is damaged; save "
            "weights with torch.save(network.state_dict(), PATH)"
        ) from error
    if not isinstance(state, dict) or (record is None and "settings" not in state):
        # entries of other trainers mean other things
        state = {"": state}
    places = Path(os.path.realpath(path)).parents[:2]
    return Saved(name, state, any((place / "train.log").is_file() for place in places), record)
