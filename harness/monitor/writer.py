"""Writes a run's event file, ``metrics.jsonl`` and ``report.json``."""

from __future__ import annotations

import functools
import json
import math
import os
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..clock.figures import Spread
from ..runtime.errors import printable
from ..runtime.files import from_json, open_regular, write_whole
from ..runtime.folder import log
from .console import say

if TYPE_CHECKING:
    from .wandb_writer import WandbWriter

BAD_SAMPLES = "bad_samples.jsonl"
_METRICS = "metrics.jsonl"
# bytes per checksum block
_BLOCK = 1_024
Value = float | Spread | None


class RunWriter:
    """Writes a run's metrics to its folder; a context manager.

    A failed write (such as on a full disk) loses only its own record: it causes one warning and is
    counted in ``dropped``, files contain only whole records, and later writes succeed once there
    is space. A killed process loses no records. If the run resumes from a checkpoint, records after
    ``resumed_step`` are removed, including from TensorBoard. ``wandb`` receives the same metrics.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: bool,
        resumed_step: int | None = None,
        wandb: WandbWriter | None = None,
    ) -> None:
        self.dropped = 0
        self._resumed_step = resumed_step
        # the last logged step
        self._step = resumed_step or 0
        self._folder = folder
        self._wandb = wandb
        self._began = time.monotonic()
        # descriptors of append-only files
        self._open: dict[str, int] = {}
        # tags already logged at the resumed step
        self._there: set[str] = set()
        try:
            self._go_on(resumed_step)
        except OSError as error:
            self._failed(folder / _METRICS, error)
        # not SummaryWriter, whose thread dies if the disk is full and buffers minutes of metrics
        self._events = ""
        if tensorboard:
            from torch.utils.tensorboard import summary

            self._summary: Any = summary
            self._events = f"events.out.tfevents.{time.time():.6f}.{os.getpid()}"
            # must precede the first event
            self._heads: list[dict[str, Any]] = [{"file_version": "brain.Event:2"}]
            if resumed_step is not None:
                # makes TensorBoard hide older files' events from this step
                self._heads.append({"step": resumed_step + 1, "session_log": {"status": "START"}})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)

    def scalars(self, step: int, figures: Mapping[str, Value], *, epoch: int | None = None) -> None:
        """Log metrics by tag after ``step`` optimizer steps.

        A ``Spread`` becomes ``<tag>/median``, ``<tag>/p95`` and ``<tag>/max``, because TensorBoard
        keeps 1,000 random points per tag and could lose a single slow step. None is omitted; values
        that are not finite are ``null`` in ``metrics.jsonl``.
        """
        self._step = step
        flat = {}
        for tag, figure in figures.items():
            if isinstance(figure, Spread):
                for name in ("median", "p95", "max"):
                    flat[f"{tag}/{name}"] = getattr(figure, name)
            elif figure is not None:
                flat[str(tag)] = figure
        if step == self._resumed_step:
            flat = {tag: figure for tag, figure in flat.items() if tag not in self._there}
            if not flat:
                return
        time_s = round(time.monotonic() - self._began, 3)
        line = {"step": step, "epoch": epoch, "time_s": time_s, **flat}
        if not all(map(math.isfinite, flat.values())):
            line = plain(line)
        self._append(_METRICS, f"{json.dumps(line)}\n".encode())
        values = [{"tag": tag, "simple_value": figure} for tag, figure in flat.items()]
        self._event(step=step, summary={"value": values})
        if self._wandb:
            self._wandb.log(step, flat)

    def text(self, tag: str, lines: Sequence[str]) -> None:
        """Log lines to TensorBoard's text page, unformatted."""
        if self._events:
            # Markdown renders indented lines as code
            text = "\n".join(f"    {printable(line)}" for line in lines)
            self._event(summary=self._summary.text(tag, text))
        if self._wandb:
            self._wandb.summary({f"text/{tag}": "\n".join(lines)})

    def images(self, tag: str, tiles: np.ndarray, texts: Sequence[str]) -> None:
        """Log ``tiles``, uint8 ``[N, 3, S, S]``, to TensorBoard as one image.

        In Weights & Biases, each tile has its own text.
        """
        if self._events:
            # eight per row
            drawn = self._summary.image(tag, tiles, dataformats="NCHW")
            self._event(step=self._step, summary=drawn)
        if self._wandb:
            captioned = zip(tiles.transpose(0, 2, 3, 1), texts, strict=True)
            self._wandb.log(self._step, {tag: list(captioned)})

    def hparams(self, settings: Mapping[str, Any], metrics: Mapping[str, float | None]) -> None:
        """Add the run to TensorBoard's HParams page.

        Every run of a sweep must use the same names.
        """
        if self._events:
            # torch would write true as 1.0, and drop a column with null
            cells = {
                name: value if type(value) in (int, float, str) else json.dumps(value)
                for name, value in plain(settings).items()
            }
            # the experiment, and the session's start and end
            for part in self._summary.hparams(cells, dict(metrics)):
                self._event(summary=part)
            values = [
                {"tag": tag, "simple_value": value}
                for tag, value in metrics.items()
                if value is not None
            ]
            self._event(step=self._step, summary={"value": values})

    def bad_sample(self, name: str, sample: int, where: str, reason: str) -> None:
        """Write a line to ``bad_samples.jsonl`` for a ``sample`` in the set ``name``."""
        line = {"set": name, "index": sample, "where": where, "reason": reason}
        self._append(BAD_SAMPLES, f"{json.dumps(line)}\n".encode())

    def report(self, report: Mapping[str, Any]) -> None:
        """Write ``report.json`` atomically, as converted by ``plain``."""
        found = plain(report)
        self.write("report.json", json.dumps(found, indent=2, allow_nan=False))
        if self._wandb:
            self._wandb.summary(found)

    def write(self, name: str, text: str) -> None:
        """Write one of the run's files atomically, with a final newline."""
        path = self._folder / name
        try:
            write_whole(path, f"{text}\n".encode())
        except OSError as error:
            self._failed(path, error)

    def close(self, *, failed: bool = False) -> None:
        """Close the files and finish the run; a second call does nothing."""
        if self._wandb:
            self._wandb.close(failed)
        self._wandb = None
        while self._open:
            os.close(self._open.popitem()[1])

    def _go_on(self, step: int | None) -> None:
        """Remove lines after ``step`` and corrupt ones; append after the others."""
        path = self._folder / _METRICS
        kept = []
        data = b""
        with suppress(FileNotFoundError), open(open_regular(path, makes_way=True), "rb") as file:
            data = file.read()
        for line in data.splitlines(keepends=True):
            with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                values = json.loads(line)
                found = from_json(float, values["step"])
                time_s = from_json(float, values.get("time_s", 0.0))
                if line.endswith(b"\n") and (step is None or found <= step):
                    kept.append(line)
                    self._began = time.monotonic() - time_s
                    if found == step:
                        self._there.update(values)
        if (whole := b"".join(kept)) != data:
            write_whole(path, whole)

    def _event(self, **content: Any) -> None:
        """Append an event with the current time, if there is an event file.

        A TensorBoard record is a length and data, each with a CRC-32C masked as in TensorFlow. The
        CRC is linear, so a block's CRC is the sum of its bytes' contributions by position. The
        previous state, initially 32 ones, is added to the first four bytes; leading zeros add
        nothing.
        """
        if not self._events:
            return
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

        records = b""
        for event in (*self._heads, content):
            data = Event(wall_time=time.time(), **event).SerializeToString()
            for part in (struct.pack("<Q", len(data)), data):
                padded = np.zeros(-(-len(part) // _BLOCK) * _BLOCK, np.uint8)
                own = padded[-len(part) :]
                own[:] = np.frombuffer(part, np.uint8)
                own[:4] ^= 255
                crc = 0
                for block in padded.reshape(-1, _BLOCK):
                    block[:4] ^= np.frombuffer(struct.pack("<I", crc), np.uint8)
                    crc = int(np.bitwise_xor.reduce(_table()[np.arange(_BLOCK), block]))
                crc ^= 0xFFFFFFFF
                masked = (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF
                records += part + struct.pack("<I", masked)
        if self._append(self._events, records):
            self._heads.clear()

    def _append(self, name: str, data: bytes) -> bool:
        """Append a record in one write; if it does not fit, the file is unchanged."""
        try:
            if name not in self._open:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
                self._open[name] = open_regular(self._folder / name, flags, makes_way=True)
            file = self._open[name]
            if (written := os.write(file, data)) < len(data):
                os.ftruncate(file, os.fstat(file).st_size - written)
                raise OSError(f"only {written} of {len(data)} bytes were written")
        except OSError as error:
            self._failed(self._folder / name, error)
            return False
        return True

    def _failed(self, path: Path, error: OSError) -> None:
        if not self.dropped:
            log.warning(
                "%s: %s; metrics are lost until it can be written, but training continues",
                path,
                error.strerror or error,
            )
        self.dropped += 1


@functools.cache
def _table() -> np.ndarray:
    """Returns each byte's contribution, uint32 ``[positions, 256]``; the last one ends a block."""
    byte: np.ndarray = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        # the Castagnoli polynomial, bit-reversed
        byte = byte >> 1 ^ (byte & 1) * 0x82F63B78
    places = [byte]
    for _ in range(_BLOCK - 1):
        places.append(places[-1] >> 8 ^ byte[places[-1] & 255])
    return np.stack(places[::-1])


def publish(name: str, lines: Sequence[str], value: Any, writer: RunWriter | None) -> None:
    """Prints ``lines``; passes them to ``writer``, if any, with ``value`` as ``name.json``."""
    for line in lines:
        say(line)
    if writer is not None:
        writer.write(f"{name}.json", json.dumps(plain(value), indent=1, allow_nan=False))
        writer.text(name, lines)


def plain(value: Any) -> Any:
    """Returns ``value`` in JSON types.

    NaN and infinities become None; dataclasses become objects without None fields.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if is_dataclass(value):
        return {
            field.name: plain(item)
            for field in fields(value)
            if (item := getattr(value, field.name)) is not None
        }
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
