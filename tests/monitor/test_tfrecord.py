"""Records of event files, against TensorBoard's own."""

import io
import random
from pathlib import Path

import pytest

from harness.monitor.writer import RunWriter


@pytest.mark.parametrize(
    "fill",
    [pytest.param(None, id="noise"), pytest.param(0, id="zeros"), pytest.param(255, id="ones")],
)
@pytest.mark.parametrize(
    "size", [4, 5, 8, 31, 63, 64, 65, 648, 1023, 1024, 1025, 4096, 4099, 4100, 8195, 9000]
)
def test_a_record_is_as_tensorboard_writes_it(
    size: int, fill: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte is the same, whatever the length."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    monkeypatch.setattr("time.time", lambda: 100.0)
    text = random.Random(size).randbytes(size) if fill is None else bytes([fill]) * size
    found: list[bytes] = []
    with RunWriter(tmp_path, tensorboard=True) as writer:
        monkeypatch.setattr(writer, "_append", lambda name, data: found.append(data) or True)
        for _ in range(2):
            writer._event(file_version=text.hex())
    written = io.BytesIO()
    from tensorboard.compat.proto.event_pb2 import Event

    # the first event brings the version along
    for version in ("brain.Event:2", text.hex(), text.hex()):
        event = Event(wall_time=100.0, file_version=version)
        RecordWriter(written).write(event.SerializeToString())
    assert b"".join(found) == written.getvalue()
