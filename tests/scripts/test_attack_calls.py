"""The short form of the attack on calls, and what it makes of a crash."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import attack_calls
from scripts.attack_case import Case, End


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_every_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that ends its process, raises or changes something is a fault; the rest are made."""

    def crash() -> End:
        os.kill(os.getpid(), signal.SIGKILL)
        return End()

    def stop() -> End:
        raise KeyboardInterrupt

    def cases(seed: int, place: Path) -> Iterator[Case]:
        yield Case("accepted", End)
        yield Case("crashes", crash)
        yield Case("stops", stop)
        yield Case("changes", lambda: End(wrong="silent change: of all"))
        yield Case("refused", lambda: End("no"))

    monkeypatch.setattr(attack_calls, "CLASSES", {"some": (9, cases)})
    (row,) = attack_calls.attack(seed=3)
    assert (row["calls"], row["refused"], row["accepted"], row["failed"]) == (5, 1, 1, 3)
    assert row["how"] == "1 crash; 1 uncaught; 1 silent change"
    assert [fault.split("\n")[0].split(": ")[1] for fault in row["faults"]] == [
        "crash",
        "uncaught",
        "silent change",
    ]
    assert "crashes" in row["faults"][0]
