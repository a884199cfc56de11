"""The short form of the fuzz: a few changed files of each reader, always the same."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from pathlib import Path

import pytest

from tests.hostile.fuzz import run as fuzz
from tests.hostile.fuzz.readers import READERS, tried

pytestmark = pytest.mark.slow

# of those that take 0.1 s a file
FEW = {"checkpoint": 5, "file of settings": 2, "report.json": 2, "tuning.json": 2}
FEW |= {"metrics.jsonl": 4, "config.yaml": 2}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", READERS)
def test_a_changed_file_is_read_or_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a file holds, a reader takes it or refuses it with its own error."""
    # what the readers change, so that it is put back
    monkeypatch.setattr("harness.data.folder_index._RACY_NS", 0)
    monkeypatch.setattr(logging.getLogger("wellfed"), "handlers", [])
    monkeypatch.setenv("WELLFED_CACHE", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = READERS[name][1](tmp_path)
        found = [tried(name, reader, 1, case) for case in range(FEW.get(name, 25))]
    assert len(found) == FEW.get(name, 25)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_crash_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that ends its process, or raises, is told of with the file; the rest are read."""

    def read(name: str, reader: object, seed: int, case: int) -> str:
        if case == 1:
            raise KeyError("x")
        if case == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return ""

    monkeypatch.setattr(fuzz, "tried", read)
    found = fuzz.outcomes("image, PPM", 4, 0)
    assert [each.get("uncaught") for each in found] == [
        None,
        "KeyError: 'x'",
        "killed by SIGKILL",
        None,
    ]
    row = fuzz.row("image, PPM", found)
    assert (row["files"], row["accepted"], row["uncaught"]) == (
        4,
        2,
        "1 KeyError; 1 killed by SIGKILL",
    )
    assert [line.split(":")[0] for line in fuzz.faults("x", found)] == ["x, case 1", "x, case 2"]
