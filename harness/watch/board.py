"""Writes what a run leaves to be looked at: event file, ``metrics.jsonl``, ``report.json``."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from harness.runtime.errors import printable
from harness.runtime.files import make_way, open_regular, parsed, read_regular, typed, write_whole
from harness.runtime.folder import log
from harness.watch.console import say
from harness.watch.figures import Spread, Tag
from harness.watch.stages import StageTotals
from harness.watch.tfrecord import framed

if TYPE_CHECKING:
    from harness.watch.wandb_writer import WandbWriter

BAD_SAMPLES = "bad_samples.jsonl"
Value = float | Spread | None


class Board:
    """Writes a run's figures into its folder; a context manager.

    A write that fails (a full disk) costs what it would have written and no more: one warning,
    ``dropped`` counts, files keep whole records only, and once there is room writes succeed again.
    A killed process loses no record. Where the run goes on from a checkpoint, what ``folder`` has
    of steps after ``resumed_step`` gives way, in TensorBoard too. ``writers`` are told too.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: bool,
        resumed_step: int | None = None,
        writers: Sequence[WandbWriter] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dropped = 0
        self._step = resumed_step or 0  # the last one logged
        self._folder = folder
        self._writers = writers
        self._now = now
        self._began = now()
        self._metrics = _Records(folder / "metrics.jsonl", self._failed)
        self._bad_samples = _Records(folder / BAD_SAMPLES, self._failed)
        # the tags that the step that the run goes on from has already
        self._there: set[tuple[int, str]] = set()
        try:
            self._go_on(resumed_step)
        except OSError as error:
            self._failed(self._metrics.path, error)
        # SummaryWriter would do, but for its thread: that dies of the first full disk, and keeps
        # minutes of figures in memory
        self._events: _Records | None = None
        if tensorboard:
            from torch.utils.tensorboard import summary

            self._summary: Any = summary
            name = f"events.out.tfevents.{time.time():.6f}.{os.getpid()}"
            self._events = _Records(folder / name, self._failed)
            self._events.head = _event(file_version="brain.Event:2")
            if resumed_step is not None:
                # TensorBoard hides what the folder's older files have from this step on
                start = _event(step=resumed_step + 1, session_log={"status": "START"})
                self._events.head += start

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)

    def scalars(self, step: int, figures: Mapping[str, Value], *, epoch: int | None = None) -> None:
        """Log figures by tag after ``step`` optimizer updates.

        A ``Spread`` becomes ``<tag>/median``, ``<tag>/p95`` and ``<tag>/max``, because TensorBoard
        keeps 1,000 random points of a tag and would lose a lone slow step. None is left out; what
        is not finite is ``null`` in ``metrics.jsonl``.
        """
        self._step = step
        flat: dict[str, float] = {}
        for tag, figure in figures.items():
            if isinstance(figure, Spread):
                flat |= {f"{tag}/{of}": value for of, value in asdict(figure).items()}
            elif figure is not None:
                flat[str(tag)] = figure
        if self._there:
            flat = {tag: figure for tag, figure in flat.items() if (step, tag) not in self._there}
            if not flat:
                return
        line = {"step": step, "epoch": epoch, "time_s": round(self._now() - self._began, 3), **flat}
        if not all(map(math.isfinite, flat.values())):
            line = plain(line)
        self._metrics.append(f"{json.dumps(line)}\n".encode())
        if self._events:
            self._events.append(_scalars(step, flat))
        for writer in self._writers:
            writer.log(step, flat)

    def text(self, tag: str, lines: Sequence[str]) -> None:
        """Put lines on TensorBoard's text page, as they are."""
        if self._events:
            # Markdown shows what is indented as code
            text = "\n".join(f"    {printable(line)}" for line in lines)
            self._events.append(_event(summary=self._summary.text(tag, text)))
        for writer in self._writers:
            writer.summary({f"text/{tag}": "\n".join(lines)})

    def images(self, tag: str, tiles: np.ndarray, texts: Sequence[str]) -> None:
        """Put ``tiles``, uint8 ``[N, 3, S, S]``, on TensorBoard's page of images, as one picture.

        Each has its text in Weights & Biases.
        """
        if self._events:
            # eight in a row
            drawn = self._summary.image(tag, tiles, dataformats="NCHW")
            self._events.append(_event(step=self._step, summary=drawn))
        for writer in self._writers:
            captioned = zip(tiles.transpose(0, 2, 3, 1), texts, strict=True)
            writer.log(self._step, {tag: list(captioned)})

    def hparams(self, settings: Mapping[str, Any], metrics: Mapping[str, float | None]) -> None:
        """Make the run a row of TensorBoard's HParams page.

        Every run of a sweep must give the same names.
        """
        if self._events:
            # torch would write true as 1.0, and leave a null out together with its column
            cells = {
                name: value if type(value) in (int, float, str) else json.dumps(value)
                for name, value in plain(settings).items()
            }
            # of the experiment, the session's start and its end
            for part in self._summary.hparams(cells, dict(metrics)):
                self._events.append(_event(summary=part))
            known = {tag: value for tag, value in metrics.items() if value is not None}
            self._events.append(_scalars(self._step, known))

    def bad_sample(self, name: str, sample: int, where: str, reason: str) -> None:
        """Write a line of ``bad_samples.jsonl``, of a ``sample`` of the set ``name``."""
        line = {"set": name, "index": sample, "where": where, "reason": reason}
        self._bad_samples.append(f"{json.dumps(line)}\n".encode())

    def report(self, report: Mapping[str, Any]) -> None:
        """Write ``report.json``, whole or not at all, as ``plain`` gives it."""
        found = plain(report)
        self.write("report.json", json.dumps(found, indent=2, allow_nan=False))
        for writer in self._writers:
            writer.summary(found)

    def write(self, name: str, text: str) -> None:
        """Write a file of the run and a last newline, whole or not at all."""
        path = self._folder / name
        try:
            write_whole(path, f"{text}\n".encode())
        except OSError as error:
            self._failed(path, error)

    def close(self, *, failed: bool = False) -> None:
        """Close the files and end the writers; a second call does nothing."""
        for writer in self._writers:
            writer.close(failed)
        self._writers = ()
        self._metrics.close()
        self._bad_samples.close()
        if self._events:
            self._events.close()

    def _go_on(self, step: int | None) -> None:
        """Take out the lines of steps after ``step`` and damaged ones; begin behind the others."""
        path = self._metrics.path
        kept = []
        make_way(path)
        make_way(self._bad_samples.path)
        data = read_regular(path) if path.exists() else b""
        for line in data.splitlines(keepends=True):
            try:
                values = parsed(line)
                found = typed(float, values["step"])
                time_s = typed(float, values.get("time_s", 0.0))
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            if line.endswith(b"\n") and (step is None or found <= step):
                kept.append(line)
                self._began = self._now() - time_s
                if step is not None and found == step:
                    self._there |= {(step, tag) for tag in values}
        if (whole := b"".join(kept)) != data:
            write_whole(path, whole)

    def _failed(self, path: Path, error: OSError) -> None:
        if not self.dropped:
            log.warning(
                "%s: %s; figures are lost until it can be written, training goes on",
                path,
                error.strerror or error,
            )
        self.dropped += 1


@dataclass(slots=True)
class _Records:
    """A file that is only appended to, one whole record per write, behind ``head``.

    ``failed`` is told of every record that could not be written.
    """

    path: Path
    failed: Callable[[Path, OSError], None]
    head: bytes = b""
    _handle: int | None = None

    def append(self, data: bytes) -> None:
        """Append one record; when it does not fit, the file stays as it was."""
        data = self.head + data
        try:
            if self._handle is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
                self._handle = open_regular(self.path, flags)
            if (written := os.write(self._handle, data)) < len(data):
                os.ftruncate(self._handle, os.fstat(self._handle).st_size - written)
                raise OSError(f"only {written} of {len(data)} bytes were written")
        except OSError as error:
            self.failed(self.path, error)
        else:
            self.head = b""

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _event(**content: Any) -> bytes:
    """Returns a record of TensorBoard's event file, of now."""
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

    return framed(Event(wall_time=time.time(), **content).SerializeToString())


def _scalars(step: int, figures: Mapping[str, float]) -> bytes:
    values = [{"tag": tag, "simple_value": figure} for tag, figure in figures.items()]
    return _event(step=step, summary={"value": values})


def stages(totals: StageTotals, worker_s: float) -> dict[str, Value]:
    """Returns wall milliseconds per sample of each stage, and how busy the workers were.

    ``worker_s`` are the seconds of all workers together.
    """
    if not totals.samples or worker_s <= 0:
        return {}
    each = {f"stages/{row['name']}_ms": row["wall_ms"] for row in totals.rows()}
    return {**each, Tag.BUSY_FRACTION: min(1.0, totals.busy_s / worker_s)}


def publish(name: str, lines: Sequence[str], value: Any, board: Board | None) -> None:
    """Prints ``lines``; gives them to ``board``, if any, with ``value`` as ``name.json``."""
    for line in lines:
        say(line)
    if board is not None:
        board.write(f"{name}.json", json.dumps(plain(value), indent=1, allow_nan=False))
        board.text(name, lines)


def plain(value: Any) -> Any:
    """Returns ``value`` as JSON can hold it.

    NaN and infinities become None, dataclasses objects without the fields that are None.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if is_dataclass(value):
        known = {field.name: getattr(value, field.name) for field in fields(value)}
        return {name: plain(item) for name, item in known.items() if item is not None}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
