"""Records of event files, against TensorBoard's own."""

import io
import random

import pytest

from harness.watch.tfrecord import framed


@pytest.mark.parametrize(
    "fill",
    [pytest.param(None, id="noise"), pytest.param(0, id="zeros"), pytest.param(255, id="ones")],
)
@pytest.mark.parametrize(
    "size", [4, 5, 8, 31, 63, 64, 65, 648, 1023, 1024, 1025, 4096, 4099, 4100, 8195, 9000]
)
def test_a_record_is_as_tensorboard_writes_it(size: int, fill: int | None) -> None:
    """Every byte is the same, whatever the length."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    data = random.Random(size).randbytes(size) if fill is None else bytes([fill]) * size
    written = io.BytesIO()
    RecordWriter(written).write(data)
    assert framed(data) == written.getvalue()
