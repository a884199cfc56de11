"""Files that come back: what is odd is an error at once, and no value."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import oddities
import pytest
from oddities import Plant

from harness.runtime import files


@dataclass(frozen=True, slots=True)
class Inner:
    rate: float
    high: float = math.inf


@dataclass(frozen=True, slots=True)
class Outer:
    count: int
    kind: Literal["a", "b"]
    flag: bool
    inner: Inner | None
    pairs: tuple[tuple[float, int], ...]
    name: str


PLAIN: dict[str, Any] = {
    "count": 3,
    "kind": "a",
    "flag": True,
    "inner": {"rate": 2, "high": None},
    "pairs": [[0.5, 1], [1.5, 2]],
    "name": "y",
}


def test_plain_values_become_what_they_were() -> None:
    """Dataclasses, optional ones and tuples, and null where a float has a default."""
    assert files.from_json(Outer, PLAIN) == Outer(
        3, "a", True, Inner(2.0), ((0.5, 1), (1.5, 2)), "y"
    )
    assert files.from_json(Outer, PLAIN | {"inner": None}).inner is None


@pytest.mark.parametrize(
    "change",
    [
        {"count": "3"}, {"count": 3.0}, {"count": True}, {"count": None}, {"count": -1},
        {"count": 10**400}, {"kind": "c"}, {"kind": None}, {"flag": 1}, {"flag": "true"},
        {"inner": []}, {"inner": {"rate": 1.0}}, {"inner": {"rate": "1", "high": 1}},
        {"inner": {"rate": None, "high": 1}},
        {"inner": {"rate": math.inf, "high": 1}}, {"inner": {"rate": math.nan, "high": 1}},
        {"inner": {"rate": True, "high": 1}},
        {"pairs": {}}, {"pairs": [[1.0]]}, {"pairs": [[1.0, 2, 3]]}, {"pairs": [1]},
        {"pairs": "ab"},
        {"name": 1}, {"name": []}, {"name": "\x1b[2J"}, {"name": "\ud800"},
        {"more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_nothing_is_converted(change: dict[str, Any]) -> None:
    """A value of another type, a number that is no figure, a
    text that drives a terminal: refused.
    """
    with pytest.raises((ValueError, TypeError)):
        files.from_json(Outer, PLAIN | change)


@pytest.mark.parametrize("value", [None, 1, "x", [], [1], {}])
def test_something_else_is_no_dataclass(value: object) -> None:
    """Whatever a file holds in place of an object is refused."""
    with pytest.raises(ValueError, match="type"):
        files.from_json(Outer, value)


@pytest.mark.timeout(10)
@oddities.special
def test_what_is_no_regular_file_is_an_error(tmp_path: Path, plant: Plant) -> None:
    """Neither a wait nor endless content; a link to a regular file is followed."""
    oddities.put(plant, tmp_path / "file")
    if oddities.elsewhere(tmp_path / "file").exists():
        assert files.read_regular(tmp_path / "file").decode() == oddities.SECRET
    else:
        with pytest.raises(OSError, match="not a regular file"):
            files.read_regular(tmp_path / "file")
    with pytest.raises(OSError, match=r"not a regular file|link to another location"):
        files.read_inside(tmp_path, "file")


@pytest.mark.parametrize("name", oddities.CONTENTS)
def test_odd_json_is_a_value_error_or_a_value(tmp_path: Path, name: str) -> None:
    """What cannot be read as JSON is one kind of error, however it fails."""
    (tmp_path / "file").write_bytes(oddities.CONTENTS[name])
    try:
        files.read_json(tmp_path / "file")
    except ValueError:
        assert name in ("empty", "one byte", "deep", "not UTF-8")
    else:
        assert name not in ("empty", "one byte", "deep", "not UTF-8")


def test_too_large_a_text_is_not_read(tmp_path: Path) -> None:
    """A sparse file takes neither time nor memory."""
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="more than 16 MiB"):
        files.read_json(tmp_path / "file")


@pytest.mark.parametrize("most", [7, 1 << 20], ids=["in pieces", "at once"])
@pytest.mark.parametrize("claimed", [-1, 0, 1], ids=["shrunk", "as it was", "grown"])
def test_a_file_may_shrink_or_grow_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, claimed: int
) -> None:
    """All that is there is read, in as many pieces as it comes and whatever size it had."""
    (tmp_path / "file").write_bytes(bytes(range(100)))
    real, state = os.read, os.fstat

    def fstat(file: int) -> SimpleNamespace:
        found = state(file)
        return SimpleNamespace(st_mode=found.st_mode, st_size=found.st_size - claimed)

    monkeypatch.setattr(os, "fstat", fstat)
    monkeypatch.setattr(os, "read", lambda file, size: real(file, min(size, most)))
    assert files.read_regular(tmp_path / "file") == bytes(range(100))


def test_a_folder_of_links_is_not_inside(tmp_path: Path) -> None:
    """A link anywhere below the folder leads out of it; the folder itself may be named by one."""
    (tmp_path / "run" / "real").mkdir(parents=True)
    (tmp_path / "run" / "real" / "file").write_text("x")
    (tmp_path / "run" / "linked").symlink_to("real")
    (tmp_path / "again").symlink_to("run")
    assert files.read_inside(tmp_path / "again", "real/file") == b"x"
    with pytest.raises(OSError, match="link to another location"):
        files.read_inside(tmp_path / "run", "linked/file")


@pytest.mark.timeout(10)
@oddities.special
def test_what_lies_in_the_way_is_set_aside(
    tmp_path: Path, plant: Plant, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes, with one warning; what a link leads to and what a folder holds stay."""
    path = tmp_path / "file"
    oddities.put(plant, path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
    os.close(files.open_regular(path, flags, makes_way=True))
    assert path.read_bytes() == b"" and oddities.untouched(path)
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} is not a regular file; rebuilding it"
    ]
    path.write_text("x")
    os.close(files.open_regular(path, flags, makes_way=True))
    assert path.read_text() == "x" and len(caplog.records) == 1


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error leaves what was there, and no temporary file."""
    files.write_whole(tmp_path / "file", b"before")
    monkeypatch.setattr(os, "fsync", lambda file: os.close(-1))
    with pytest.raises(OSError, match="Bad file descriptor"):
        files.write_whole(tmp_path / "file", b"after")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"before"}


def test_a_sheet_computes_nothing() -> None:
    """Text that begins like a formula gets an apostrophe; numbers and other names stay."""
    rows = [["=1+1.jpg", "@SUM(A1)", "-cat", "+1", "-2.5", "a=b", "", -3, 0.5]]
    assert files.sheet(rows) == "'=1+1.jpg,'@SUM(A1),'-cat,+1,-2.5,a=b,,-3,0.5\n"
