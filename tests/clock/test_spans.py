"""Names in a trace: given where something records, free elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from harness.clock import spans


def test_a_recording_is_told_every_name() -> None:
    """Blocks are handed to the recording in the order in which they begin and end."""
    told: list[str] = []

    @contextmanager
    def mark(name: str) -> Iterator[None]:
        told.append(f"{name} begins")
        yield
        told.append(f"{name} ends")

    spans.record(mark)
    try:
        with spans.named("step 1"), spans.named("forward"):
            pass
    finally:
        spans.record(None)
    assert told == ["step 1 begins", "forward begins", "forward ends", "step 1 ends"]


def test_nothing_is_made_where_nothing_records() -> None:
    """All names share one context that does nothing, also inside itself."""
    with spans.named("step 1") as first, spans.named("forward") as second:
        assert first is second is None
    assert spans.named("step 1") is spans.named("forward")
