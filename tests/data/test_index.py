"""The index of a tree of files: what it holds, and when it is made again."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from harness.data import folder_index as module
from harness.data.folder_index import Index, open_index
from harness.runtime import signals
from harness.runtime.errors import DataError, Interrupted


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two classes, a folder inside one, a link to an image; all of long ago."""
    for name in ("set/a/1.jpg", "set/a/x/2.jpg", "set/b/3.jpg", "set/b/notes.txt", "store/4.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"\xff\xd8\xff" if name.endswith("jpg") else b"words")
    (tmp_path / "set/b/4.jpg").symlink_to(tmp_path / "store/4.jpg")
    for folder in (tmp_path, *tmp_path.rglob("*")):
        if folder.is_dir():
            os.utime(folder, (1e9, 1e9))
    return tmp_path / "set"


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets folders that have just been made be trusted."""
    monkeypatch.setattr(module, "_RACY_NS", -(10**15))


def opened(root: Path) -> Index:
    return open_index(os.fsencode(root), root.parent / "kept")


def path(index: Index, i: int) -> bytes:
    begin = index.ends[i - 1] if i else 0
    name = index.names[begin : index.ends[i]].tobytes()
    return os.path.join(index.folders[index.labels[i]], name)


def paths(index: Index) -> list[str]:
    return [os.fsdecode(path(index, i)) for i in range(len(index.labels))]


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The roots that are scanned."""
    found: list[bytes] = []
    real = module._Scan
    monkeypatch.setattr(module, "_Scan", lambda root: found.append(root) or real(root))
    return found


@pytest.mark.usefixtures("settled")
def test_an_index_is_remembered(root: Path, scans: list[bytes]) -> None:
    """The second run finds what the first one saw, down to what was left out, without a scan."""
    first = opened(root)
    second = opened(root)
    assert paths(first) == paths(second) == ["a/1.jpg", "a/x/2.jpg", "b/3.jpg", "b/4.jpg"]
    assert first.labels.tolist() == second.labels.tolist() == [0, 0, 1, 1]
    assert first.folders == second.folders == (b"a", b"b")
    assert first.skipped == second.skipped == {"not an image": 1}
    assert first.digest() == second.digest()
    assert scans == [os.fsencode(root)]


def rename(root: Path) -> None:
    (root / "b/3.jpg").rename(root / "b/0.jpg")


def replace_beside(root: Path) -> None:
    (root.parent / "store/4.jpg").rename(root.parent / "store/5.jpg")


def add_and_set_the_time_back(root: Path) -> None:
    (root / "a/x/0.jpg").write_bytes(b"\xff\xd8\xff")
    os.utime(root / "a/x", (1e9, 1e9))


def move_folder(root: Path) -> None:
    (root / "a/x").rename(root / "b/x")
    os.utime(root / "a", (1e9, 1e9))


CHANGES: dict[str, Any] = {
    "added": (
        lambda root: (root / "a/x/0.jpg").write_bytes(b"\xff\xd8\xff"),
        ["a/1.jpg", "a/x/0.jpg", "a/x/2.jpg", "b/3.jpg", "b/4.jpg"],
    ),
    "removed": (lambda root: (root / "a/x/2.jpg").unlink(), ["a/1.jpg", "b/3.jpg", "b/4.jpg"]),
    "renamed": (rename, ["a/1.jpg", "a/x/2.jpg", "b/0.jpg", "b/4.jpg"]),
    "new class": (
        lambda root: (root / "c").mkdir(),
        ["a/1.jpg", "a/x/2.jpg", "b/3.jpg", "b/4.jpg"],
    ),
    "a link's target": (replace_beside, ["a/1.jpg", "a/x/2.jpg", "b/3.jpg"]),
    "folder moved": (move_folder, ["a/1.jpg", "b/3.jpg", "b/4.jpg", "b/x/2.jpg"]),
    "added, time set back": (
        add_and_set_the_time_back,
        ["a/1.jpg", "a/x/0.jpg", "a/x/2.jpg", "b/3.jpg", "b/4.jpg"],
    ),
}


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(("change", "expected"), CHANGES.values(), ids=CHANGES)
def test_a_changed_tree_is_scanned_again(
    root: Path, change: Callable[[Path], object], expected: list[str]
) -> None:
    """Every change of names is seen, even if a program sets a folder's time back."""
    before = opened(root).digest()
    change(root)
    after = opened(root)
    assert paths(after) == expected
    assert after.digest() != before


@pytest.mark.usefixtures("settled")
def test_a_class_that_leads_elsewhere_is_scanned_again(root: Path) -> None:
    """A link to a folder that gets another target is seen, whatever the times are."""
    (root / "c").symlink_to(root.parent / "store")
    assert paths(opened(root))[-1] == "c/4.jpg"
    (root / "c").unlink()
    (root / "c").symlink_to(root / "a/x")
    os.utime(root, (1e9, 1e9))
    assert paths(opened(root))[-1] == "c/2.jpg"


def test_a_folder_changed_just_now_is_not_trusted(root: Path, scans: list[bytes]) -> None:
    """A folder may change again within the same tick, so nothing is remembered."""
    opened(root)
    assert not (root.parent / "kept").exists()
    assert paths(opened(root)) == ["a/1.jpg", "a/x/2.jpg", "b/3.jpg", "b/4.jpg"]
    assert len(scans) == 2


@pytest.mark.usefixtures("settled")
def test_a_tree_with_a_broken_link_is_not_trusted(root: Path) -> None:
    """The target may come to a folder that nothing tells of, as ``git annex get`` brings it."""
    away = (root.parent / "store").rename(root.parent / "away")
    assert paths(opened(root)) == ["a/1.jpg", "a/x/2.jpg", "b/3.jpg"]
    away.rename(root.parent / "store")
    assert paths(opened(root)) == ["a/1.jpg", "a/x/2.jpg", "b/3.jpg", "b/4.jpg"]


def test_a_folder_of_many_targets_is_asked_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree of links, as git-annex makes it, has as many links to a folder as images."""
    (root / "b/5.jpg").symlink_to(root.parent / "store/4.jpg")
    asked: list[bytes] = []
    real = module.path_state
    monkeypatch.setattr(module, "path_state", lambda path: asked.append(path) or real(path))
    assert len(opened(root).labels) == 5
    assert asked.count(os.fsencode(root.parent / "store")) == 1


def test_a_signal_ends_the_listing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large tree is not listed to its end once a signal has come."""
    monkeypatch.setattr(signals, "_received", [(15, 0.0)])
    with pytest.raises(Interrupted):
        module.listing(os.fsencode(root))


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-5] + bytes([content[-5] ^ 1]) + content[-4:],
        lambda content: content[16:24] + content[8:16] + content[:8] + content[24:],
        lambda content: content[:200],
        lambda content: bytes(len(content)),
        lambda content: b"",
    ],
    ids=["flipped", "swapped words", "cut", "zeros", "empty"],
)
def test_a_damaged_index_is_made_again(
    root: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """What rot or a power failure made of the file is not used, and is put right."""
    expected = paths(opened(root))
    (place,) = (root.parent / "kept").iterdir()
    place.write_bytes(damage(place.read_bytes()))
    for _ in range(2):
        assert paths(opened(root)) == expected
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.usefixtures("settled")
def test_an_index_of_another_tree_is_made_again(root: Path) -> None:
    """A whole index that a mixed-up cache has under another's name is not believed."""
    expected = paths(opened(root))
    (place,) = (root.parent / "kept").iterdir()
    other = root.with_name("other")
    (other / "a").mkdir(parents=True)
    (other / "a/9.jpg").write_bytes(b"\xff\xd8\xff")
    assert paths(opened(other)) == ["a/9.jpg"]
    (theirs,) = {*(root.parent / "kept").iterdir()} - {place}
    shutil.copyfile(theirs, place)
    assert [paths(opened(root)), paths(opened(other))] == [expected, ["a/9.jpg"]]


@pytest.mark.usefixtures("settled")
def test_an_index_need_not_be_kept(root: Path) -> None:
    """Without a place to write, the index lies in memory and is still shared."""
    (root.parent / "kept").write_text("in the way")
    index = opened(root)
    assert (
        paths(pickle.loads(pickle.dumps(index)))
        == paths(index)
        == ["a/1.jpg", "a/x/2.jpg", "b/3.jpg", "b/4.jpg"]
    )


def test_a_folder_that_vanishes_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gone between two looks, or too deep for a path, it is one line."""
    real = module.path_state
    monkeypatch.setattr(
        module, "path_state", lambda path: real(path + b"/gone" * path.endswith(b"/x"))
    )
    with pytest.raises(DataError, match=r"^cannot read \S+/a/x; "):
        opened(root)


def own_kb() -> int:
    """This process's own memory; pages of a mapped file count as nobody's."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def read_all(index: Index, sender: Connection) -> None:
    """Sends how many bytes the paths have, and this process's memory before and after."""
    before = own_kb()
    total = sum(len(path(index, i)) for i in range(len(index.labels)))
    sender.send((total, before, own_kb()))


@pytest.mark.slow
@pytest.mark.usefixtures("settled")
def test_a_worker_that_reads_the_index_does_not_grow(tmp_path: Path) -> None:
    """Of 100,000 names that a worker reads, none is copied into its own memory."""
    count = 100_000
    classes = 100
    for label in range(classes):
        (tmp_path / f"set/{label:04d}").mkdir(parents=True)
        for i in range(count // classes):
            os.close(os.open(tmp_path / f"set/{label:04d}/{i:08d}.jpg", os.O_CREAT))
    index = opened(tmp_path / "set")
    receiver, sender = multiprocessing.Pipe(duplex=False)
    worker = multiprocessing.get_context("forkserver").Process(
        target=read_all, args=(index, sender)
    )
    worker.start()
    total, before, after = receiver.recv()
    worker.join()
    assert total == count * len("0000/00000000.jpg")
    assert after < 1.05 * before
