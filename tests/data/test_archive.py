"""What is read from an archive, and what refuses it."""

from __future__ import annotations

import gzip
import inspect
import os
import signal
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from archives import write_members
from oddities import listing

from harness.data.archive import read_members
from harness.runtime import signals
from harness.runtime.errors import DataError, Interrupted

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
    assert str(caught.value).startswith(f"{archive}: ")
    assert ("damaged: " in str(caught.value)) == ("damaged: " in reason)
    assert str(caught.value).endswith("; delete the file and get it from its publisher")
    assert listing(archive.parent.parent) == ["inner", "inner/x.tar.gz"]


def test_wanted_members(archive: Path) -> None:
    """The wanted members come by name; others and folders are passed over."""
    write_members(
        archive, GOOD | {"set/readme.html": b"hello"}, [member("set", tarfile.DIRTYPE, mode=0o2755)]
    )
    assert read_members(archive, WANTED) == GOOD


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        pytest.param(
            [member("../canary")], r"member \.\./canary has a name that leads out", id="up"
        ),
        pytest.param([member("set/../../canary")], "leads out", id="down and up"),
        pytest.param([member("/tmp/canary")], "leads out", id="absolute"),
        pytest.param(
            [member("a", tarfile.SYMTYPE, "/etc/passwd")],
            "member a is a link",
            id="absolute symlink",
        ),
        pytest.param(
            [member("a", tarfile.SYMTYPE, "set/one")], "member a is a link", id="symlink inside"
        ),
        pytest.param(
            [member("a", tarfile.LNKTYPE, "../../etc/passwd")],
            "member a is a link",
            id="hard link out",
        ),
        pytest.param(link_chain(), "member a is a link", id="CVE-2025-4517"),
        pytest.param(
            [member("a", tarfile.FIFOTYPE)], "a is a link, a device or another", id="FIFO"
        ),
        pytest.param(
            [member("a", tarfile.CHRTYPE)],
            "a is a link, a device or another",
            id="character device",
        ),
        pytest.param(
            [member("a", tarfile.BLKTYPE)], "a is a link, a device or another", id="block device"
        ),
        pytest.param([sparse("a")], "a is a link, a device or another", id="4 GiB sparse"),
        pytest.param([member("a", mode=0o4755)], "member a is setuid or setgid", id="setuid"),
        pytest.param([member("set/one")], "member set/one is there twice", id="twice"),
        pytest.param(
            [member(f"m{i}") for i in range(1500)], "more than 1000 members", id="too many"
        ),
        pytest.param(
            [member("\x1b[2Ja", tarfile.SYMTYPE, "x")],
            r"member \\x1b\[2Ja is",
            id="terminal escape in a name",
        ),
    ],
)
def test_refused_member(archive: Path, more: list[tarfile.TarInfo], reason: str) -> None:
    """One dishonest member refuses the whole archive by name, and nothing is written anywhere."""
    write_members(archive, GOOD, more)
    refused(archive, reason)


def test_folder_in_place_of_file(archive: Path) -> None:
    """A folder with the name of a wanted file is refused."""
    write_members(archive, {"set/two": b"2"}, [member("set/one", tarfile.DIRTYPE)])
    refused(archive, "is a folder")


def test_missing_members(archive: Path) -> None:
    """Missing members are listed."""
    write_members(archive, {"set/three": b""})
    refused(archive, "has no member set/one, set/two")


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


def test_a_signal_ends_the_reading(archive: Path) -> None:
    """Unpacking takes seconds, in which a signal is heard."""
    write_members(archive, GOOD)
    with signals.caught():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted):
            read_members(archive, WANTED)
    with signals.caught():
        assert read_members(archive, WANTED) == GOOD


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
    refused(archive, "damaged: .+")


def test_missing_archive(tmp_path: Path) -> None:
    """A missing archive is an error of the same kind."""
    with pytest.raises(DataError, match="x.tar.gz: damaged: .*No such file"):
        read_members(tmp_path / "x.tar.gz", WANTED)
