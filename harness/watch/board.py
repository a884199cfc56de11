"""The one place that writes what a run leaves to be looked at: event file, ``metrics.jsonl``, ``report.json``."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Self

from harness.runtime.folder import LOGGER
from harness.watch.figures import Spread, Window
from harness.watch.tags import Tag

Figure = float | Spread | None

_log = logging.getLogger(LOGGER)


class Board:
    """Writes a run's figures into its folder; a context manager.

    A write that fails (a full disk) costs what it would have written and no more: one warning, ``dropped`` counts, files
    keep whole records only, training goes on, and later writes succeed again once there is room. Every record reaches the
    kernel at once, so that a killed process loses none.

    Args:
        folder: the run's folder.
        tensorboard: write the event file too.
        resumed_step: the step of the checkpoint that the run goes on from; later steps that the folder already has are
            taken out of ``metrics.jsonl`` and hidden from TensorBoard. None: what is in the folder stays.
        now: the clock of ``time_s``, in seconds.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: bool,
        resumed_step: int | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dropped = 0
        self._step = 0  # the last one logged
        self._folder, self._now, self._began = folder, now, now()
        metrics = folder / "metrics.jsonl"
        self._guarded(lambda: _drop_lines_after(metrics, resumed_step), metrics)
        self._metrics = _Records(metrics)
        self._events = _EventFile(folder, resumed_step) if tensorboard else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def scalars(self, step: int, figures: Mapping[str, Figure], *, epoch: int | None = None) -> None:
        """Log figures at a step.

        A ``Spread`` becomes ``<tag>/median``, ``<tag>/p95`` and ``<tag>/max``; None is left out. In ``metrics.jsonl``,
        which has no word for them, NaN and infinities are ``null``.

        Args:
            step: optimizer updates so far.
            figures: value by tag.
            epoch: the running epoch.
        """
        self._step = step
        flat: dict[str, float] = {}
        for tag, figure in figures.items():
            if isinstance(figure, Spread):
                flat |= {f"{tag}/{name}": value for name, value in dataclasses.asdict(figure).items()}
            elif figure is not None:
                flat[str(tag)] = figure
        line = {"step": step, "epoch": epoch, "time_s": round(self._now() - self._began, 3), **flat}
        data = f"{json.dumps(_plain(line), allow_nan=False)}\n".encode()
        self._guarded(lambda: self._metrics.append(data), self._metrics.path)
        if events := self._events:
            self._guarded(lambda: events.scalars(step, flat), events.records.path)

    def text(self, tag: str, markdown: str) -> None:
        """Put a text on TensorBoard's text page."""
        if events := self._events:
            self._guarded(lambda: events.text(tag, markdown), events.records.path)

    def hparams(self, settings: Mapping[str, Any], metrics: Mapping[str, float | None]) -> None:
        """Make the run a row of TensorBoard's HParams page; once, at its end.

        The page has the columns of whichever run it reads first: give the same names in every run of a sweep.

        Args:
            settings: value by dotted name.
            metrics: results by tag, each a tag of its own; None leaves the cell empty.
        """
        if events := self._events:
            self._guarded(lambda: events.hparams(self._step, settings, metrics), events.records.path)

    def report(self, report: Mapping[str, Any]) -> None:
        """Write ``report.json``, whole or not at all; dataclasses become objects without the fields that are None."""
        path = self._folder / "report.json"
        text = json.dumps(_plain(report), indent=2, allow_nan=False) + "\n"
        self._guarded(lambda: _replace(path, text.encode()), path)

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._metrics.close()
        if self._events:
            self._events.records.close()

    def _guarded(self, write: Callable[[], None], path: Path) -> None:
        try:
            write()
        except OSError as error:
            if not self.dropped:
                reason = error.strerror or error
                _log.warning("%s: %s; figures are lost until it can be written, training goes on", path, reason)
            self.dropped += 1


class _Records:
    """A file that is only appended to, one whole record per write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None
        self._closed = False

    def append(self, data: bytes) -> None:
        """Append one record; when it does not fit, the file stays as it was."""
        assert not self._closed, f"{self.path} is closed"
        if self._handle is None:
            self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        before = os.fstat(self._handle).st_size
        if (written := os.write(self._handle, data)) < len(data):
            os.ftruncate(self._handle, before)
            raise OSError(f"only {written} of {len(data)} bytes were written")

    def close(self) -> None:
        self._closed = True
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class _EventFile:
    """TensorBoard's event file.

    ``SummaryWriter`` would do, but for its thread: that dies of the first full disk with a traceback on the terminal, never
    writes again, and keeps up to two minutes of figures in memory.
    """

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]
        from torch.utils.tensorboard import summary

        self._event_pb2, self._summary_pb2, self._framing = event_pb2, summary_pb2, RecordWriter
        self._summary: Any = summary
        self.records = _Records(folder / f"events.out.tfevents.{time.time():.6f}.{os.getpid()}")
        self._head = self._record(file_version="brain.Event:2")
        if resumed_step is not None:  # TensorBoard hides what the folder's older files have from this step on
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._head += self._record(step=resumed_step + 1, session_log=start)

    def scalars(self, step: int, figures: Mapping[str, float]) -> None:
        make = self._summary_pb2.Summary.Value
        values = [make(tag=tag, simple_value=figure) for tag, figure in figures.items()]
        self._append(self._record(step=step, summary=self._summary_pb2.Summary(value=values)))

    def text(self, tag: str, markdown: str) -> None:
        self._append(self._record(summary=self._summary.text(tag, markdown)))

    def hparams(self, step: int, settings: Mapping[str, Any], metrics: Mapping[str, float | None]) -> None:
        plain = {name: _hparam(value) for name, value in settings.items()}
        summaries = self._summary.hparams(plain, dict(metrics))  # of the experiment, the session's start and its end
        self._append(b"".join(self._record(summary=summary) for summary in summaries))
        self.scalars(step, {tag: value for tag, value in metrics.items() if value is not None})

    def _append(self, data: bytes) -> None:
        self.records.append(self._head + data)
        self._head = b""

    def _record(self, **fields: Any) -> bytes:
        framed = io.BytesIO()
        event = self._event_pb2.Event(wall_time=time.time(), **fields)
        self._framing(framed).write(event.SerializeToString())
        return framed.getvalue()


def timings(window: Window) -> dict[str, Figure]:
    """The figures of a window under their tags."""
    return {
        Tag.IMAGES_PER_S: window.images_per_s,
        Tag.STEP_MS: window.step_ms,
        Tag.DATA_WAIT_MS: window.data_wait_ms,
        Tag.COPY_MS: window.copy_ms,
        Tag.COMPUTE_MS: window.compute_ms,
        Tag.STALL_FRACTION: window.stall_fraction,
        Tag.DATA_WAIT_FRACTION: window.data_wait_fraction,
    }


def _hparam(value: Any) -> str | int | float:
    """A value for the HParams page; torch would write true as 1.0, and leave a null out together with its column."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return value if isinstance(value, (int, float)) else str(_plain(value))


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it; NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {name: _plain(item) for name, item in fields if item is not None}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_lines_after(path: Path, step: int | None) -> None:
    """Take out the lines of later steps, and a last one that was cut off."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    lines = [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
    kept = b"".join(line for line in lines if step is None or json.loads(line)["step"] <= step)
    if kept != data:
        _replace(path, kept)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
