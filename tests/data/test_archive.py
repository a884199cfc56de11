"""What is read from an archive, and what refuses it."""

from __future__ import annotations

import gzip
import inspect
import os
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from archives import write_members
from oddities import listing

from harness.data.cifar import read_members
from harness.runtime.errors import DataError

GOOD = {"set/one": b"1" * 1000, "set/two": b"2"}
WANTED = tuple(GOOD)


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


def link_chain() -> list[tarfile.TarInfo]:
    """CVE-2025-4517: links whose real path outgrows PATH_MAX, then a link out behind them.

    ``os.path.realpath`` stops resolving at that length, so that tarfile's data filter takes the
    link for one that stays.
    """
    members = []
    path = ""
    long = "d" * 247
    for letter in "abcdefghijklmnop":
        members.append(member(os.path.join(path, long), tarfile.DIRTYPE, mode=0o755))
        members.append(member(os.path.join(path, letter), tarfile.SYMTYPE, long))
        path = os.path.join(path, long)
    last = "/".join("abcdefghijklmnop") + "/" + "l" * 254
    members.append(member(last, tarfile.SYMTYPE, "../" * 16))
    members.append(member("escape", tarfile.SYMTYPE, last + "/.."))
    members.append(member("escape/canary"))
    return members


def sparse(name: str) -> tarfile.TarInfo:
    info = member(name)
    info.pax_headers = {
        "GNU.sparse.major": "0",
        "GNU.sparse.minor": "1",
        "GNU.sparse.map": "0,1",
        "GNU.sparse.size": str(2**32),
    }
    return info


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive alone in a folder that is alone in its own, so that whatever leaves it is seen."""
    (tmp_path / "inner").mkdir()
    return tmp_path / "inner" / "x.tar.gz"


def refused(archive: Path, reason: str, most_bytes: int = 1 << 20) -> None:
    with pytest.raises(DataError, match=reason) as caught:
        read_members(archive, WANTED, most_bytes)
    assert str(caught.value).startswith(f"{archive} ")
    assert str(caught.value).endswith("; delete it and download it from its publisher")
    assert listing(archive.parent.parent) == ["inner", "inner/x.tar.gz"]


def test_wanted_members(archive: Path) -> None:
    """The wanted members come by name; others and folders are passed over."""
    write_members(
        archive, GOOD | {"set/readme.html": b"hello"}, [member("set", tarfile.DIRTYPE, mode=0o2755)]
    )
    assert read_members(archive, WANTED) == GOOD


PASSED_OVER: dict[str, Any] = {
    "up": [member("../canary")],
    "down and up": [member("set/../../canary")],
    "absolute": [member("/tmp/canary")],
    "absolute symlink": [member("a", tarfile.SYMTYPE, "/etc/passwd")],
    "symlink inside": [member("set/one", tarfile.SYMTYPE, "two")],
    "hard link out": [member("a", tarfile.LNKTYPE, "../../etc/passwd")],
    "CVE-2025-4517": link_chain(),
    "FIFO": [member("a", tarfile.FIFOTYPE)],
    "character device": [member("set/two", tarfile.CHRTYPE)],
    "block device": [member("a", tarfile.BLKTYPE)],
    "4 GiB sparse": [sparse("set/one")],
    "setuid": [member("a", mode=0o4755)],
    "terminal escape in a name": [member("\x1b[2Ja", tarfile.SYMTYPE, "x")],
}


@pytest.mark.parametrize("more", PASSED_OVER.values(), ids=PASSED_OVER)
def test_what_is_no_wanted_file_is_passed_over(archive: Path, more: list[tarfile.TarInfo]) -> None:
    """Dishonest members are never looked into, and nothing is written anywhere."""
    write_members(archive, GOOD, more)
    before = listing(archive.parent.parent)
    assert read_members(archive, WANTED) == GOOD
    assert listing(archive.parent.parent) == before == ["inner", "inner/x.tar.gz"]


@pytest.mark.parametrize(
    "kind", [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE]
)
def test_something_in_place_of_a_file(archive: Path, kind: bytes) -> None:
    """What has the name of a wanted file and is none does not count as one."""
    write_members(archive, {"set/two": b"2"}, [member("set/one", kind, "set/two")])
    refused(archive, "has no file set/one")


@pytest.mark.parametrize("name", ["set/one", "rest"], ids=["wanted", "not wanted"])
def test_bomb(archive: Path, name: str) -> None:
    """An archive that unpacks to too much stops the reading early, whatever the members are."""
    write_members(archive, GOOD | {name: bytes(64 << 20)})
    tracemalloc.start()
    try:
        refused(archive, "unpacks to more than 1048576 bytes")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_published_sizes_fit() -> None:
    """CIFAR's archives, of 50,000 and 10,000 images of 3072 bytes, are below what is allowed."""
    most_bytes = inspect.signature(read_members).parameters["most_bytes"].default
    assert 60_000 * 3072 < most_bytes < 1 << 29


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def without_trailer(data: bytes) -> bytes:
    return data[:-8]


def wrong_checksum(data: bytes) -> bytes:
    return data[:-8] + bytes([data[-8] ^ 1]) + data[-7:]


def bad_block(data: bytes) -> bytes:
    return data[:200] + b"\xff" * 100 + data[300:]


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        without_trailer,
        wrong_checksum,
        bad_block,
        lambda _: b"",
        lambda _: b"not an archive",
        gzip.compress,
    ],
)
def test_damage(archive: Path, damage: Callable[[bytes], bytes]) -> None:
    """A damaged archive is an error that says so, even behind the last member."""
    write_members(archive, GOOD | {"set/noise": os.urandom(5000)})
    archive.write_bytes(damage(archive.read_bytes()))
    refused(archive, ".")
