"""The published archive to arrays: its protocols, what is refused, what is kept."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import oddities
import pytest
from archives import (
    CIFAR10,
    CIFAR10_CLASSES,
    CIFAR100,
    cifar10_batches,
    py2_pickle,
    write_cifar10,
    write_cifar100,
    write_members,
)
from loopback import files, site
from oddities import Plant, listing

from harness.config import DataConfig
from harness.data.cifar import open_cifar
from harness.data.storage import ArraySource
from harness.runtime.errors import DataError, DiskError

FILES = [
    "batches.meta",
    *(f"data_batch_{i}" for i in range(1, 6)),
    "test_batch",
]
BATCH = "cifar-10-batches-py/data_batch_3"
META = "cifar-10-batches-py/batches.meta"


@pytest.fixture(autouse=True)
def _at_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No proxy, a cache of its own, and a current folder that shows stray files."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("WELLFED_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))


def settings(root: Path, md5: str | None = None, **more: object) -> DataConfig:
    settings: Any = {"name": "cifar10", "download": False, **more}
    return DataConfig(root=str(root), md5=md5, **settings)


def made(md5: str, archive: str = CIFAR10) -> list[str]:
    name = f"{'cifar100' if archive == CIFAR100 else 'cifar10'}-{md5[:16]}"
    files = ["meta", "test", "train"] if archive == CIFAR100 else FILES
    return sorted([archive, name, *(f"{name}/{file}" for file in files)])


@pytest.mark.parametrize(
    "pickled",
    [
        pytest.param(py2_pickle, id="Python 2"),
        *(pytest.param(partial(pickle.dumps, protocol=n), id=f"protocol {n}") for n in (3, 4, 5)),
    ],
)
def test_content(tmp_path: Path, pickled: Callable[[object], bytes]) -> None:
    """Pickles of Python 2 and 3 give the same images, planes in their places, and labels."""
    md5 = write_cifar10(tmp_path, rows=12, pickled=pickled)
    train, val = open_cifar(settings(tmp_path, md5))
    batches = cifar10_batches(rows=12)
    data = np.concatenate(
        [batches[f"cifar-10-batches-py/data_batch_{i}"]["data"] for i in range(1, 6)]
    )
    assert (len(train), len(val)) == (60, 12)
    assert train.classes == val.classes == CIFAR10_CLASSES
    assert train.labels.tolist() == list(map(int, [*range(10), 0, 1] * 5))
    assert train.images.dtype == np.uint8
    assert train.images.shape == (60, 32, 32, 3)
    for row, y, x, channel in [(0, 0, 0, 0), (17, 3, 30, 1), (59, 31, 31, 2)]:
        assert train.images[row, y, x, channel] == data[row, channel * 1024 + y * 32 + x]
    assert np.array_equal(
        val.images[5],
        batches["cifar-10-batches-py/test_batch"]["data"][5].reshape(3, 32, 32).transpose(1, 2, 0),
    )
    assert listing(tmp_path) == made(md5)


def test_columns_first(tmp_path: Path) -> None:
    """An array that was pickled column by column is read as the array that it was."""
    batches = cifar10_batches()
    data = batches[BATCH]["data"]
    assert isinstance(data, np.ndarray)
    batches[BATCH]["data"] = np.asfortranarray(data)
    md5 = write_members(
        tmp_path / CIFAR10, {name: pickle.dumps(part) for name, part in batches.items()}
    )
    train, _ = open_cifar(settings(tmp_path, md5))
    assert np.array_equal(train.images[40:60].transpose(0, 3, 1, 2).reshape(20, 3072), data)


def test_cifar100(tmp_path: Path) -> None:
    """CIFAR-100 comes with its hundred fine labels."""
    md5 = write_cifar100(tmp_path)
    train, val = open_cifar(settings(tmp_path, md5, name="cifar100"))
    assert len(train.classes) == len(set(train.classes)) == 100
    assert train.classes == tuple(sorted(train.classes))
    assert train.labels.tolist() == [*range(100), *range(100)]
    assert len(val) == 200
    assert listing(tmp_path) == made(md5, CIFAR100)


class Call:
    """Pickles as a call of ``function``."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


CANARY = "touch canary"
MALICIOUS = {
    **{
        f"os.system, protocol {n}": pickle.dumps({"data": Call(os.system, CANARY)}, n)
        for n in range(6)
    },
    "eval by STACK_GLOBAL": b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93"
    b"\x8c\x1b__import__('os').mkdir('x')\x85R.",
    "INST": b"(S'touch canary'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'touch canary'\no.",
    "NEWOBJ": b"\x80\x02csubprocess\nPopen\n(S'touch canary'\nt\x81.",
    "dotted name": b"\x80\x04\x8c\x05numpy\x8c\x12ndarray.__class__\x93.",
    "getattr": pickle.dumps(Call(getattr, "", "join")),
    "numpy's runstring": (
        b"cnumpy.testing._private.utils\nrunstring\n(S'import os; os.mkdir(\"x\")'\n}tR."
    ),
    "numpy's load": pickle.dumps(Call(np.load, "x.npy")),
    "numpy's scalar": pickle.dumps({"data": np.float64(1)}),
    "nothing": b"",
}


@pytest.mark.parametrize(
    "content", [pytest.param(content, id=name) for name, content in MALICIOUS.items()]
)
@pytest.mark.parametrize("place", [BATCH, META])
def test_malicious_pickle(tmp_path: Path, place: str, content: bytes) -> None:
    """No pickle executes anything; the member is named and nothing is written."""
    members = {name: py2_pickle(part) for name, part in cifar10_batches(rows=2).items()}
    md5 = write_members(tmp_path / CIFAR10, members | {place: content})
    with pytest.raises(
        DataError, match=f"member {os.path.basename(place)} does not match .*publisher"
    ) as caught:
        open_cifar(settings(tmp_path, md5))
    assert "touch" not in str(caught.value)
    assert os.listdir() == []
    assert listing(tmp_path) == [CIFAR10]


DATA = np.zeros((20, 3072), np.uint8)
OTHER = {
    "too few labels": (BATCH, {"labels": [0] * 19}),
    "no labels": (BATCH, {"labels": None}),
    "label too high": (BATCH, {"labels": [10] * 20}),
    "label below 0": (BATCH, {"labels": [-1] * 20}),
    "text labels": (BATCH, {"labels": ["cat"] * 20}),
    "short rows": (BATCH, {"data": DATA[:, :3071]}),
    "other shape": (BATCH, {"data": DATA.reshape(20, 3, 32, 32)}),
    "other dtype": (BATCH, {"data": DATA.astype(np.int8)}),
    "text for pixels": (BATCH, {"data": "pixels"}),
    "no names": (META, {"label_names": 10}),
}


@pytest.mark.parametrize(
    ("place", "changes"), [pytest.param(*case, id=name) for name, case in OTHER.items()]
)
def test_other_content(tmp_path: Path, place: str, changes: dict[str, object]) -> None:
    """Content that differs from the published form is refused by its member."""
    batches = cifar10_batches()
    batches[place].update(changes)
    md5 = write_members(
        tmp_path / CIFAR10, {name: pickle.dumps(part) for name, part in batches.items()}
    )
    with pytest.raises(DataError, match=f"member {os.path.basename(place)} does not match "):
        open_cifar(settings(tmp_path, md5))
    assert listing(tmp_path) == [CIFAR10]


def test_an_unpacked_archive_is_read(tmp_path: Path) -> None:
    """What torchvision unpacked is enough, in a folder that cannot be written too."""
    batches = cifar10_batches()
    (tmp_path / "cifar-10-batches-py").mkdir()
    for name, part in batches.items():
        (tmp_path / name).write_bytes(py2_pickle(part))
    tmp_path.chmod(0o555)
    try:
        train, _ = open_cifar(settings(tmp_path))
    finally:
        tmp_path.chmod(0o755)
    first = batches["cifar-10-batches-py/data_batch_1"]["data"][0]
    assert np.array_equal(train.images[0].transpose(2, 0, 1).ravel(), first)
    assert isinstance(train.images, np.memmap)


def test_an_archive_in_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files go to the user's cache, and are found there."""
    md5 = write_cifar10(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for _ in range(2):
        assert len(open_cifar(settings(tmp_path, md5))[0]) == 100
        assert listing(tmp_path) == [CIFAR10]


def test_the_unpacked_files_are_enough(tmp_path: Path) -> None:
    """With them, neither archive nor write permission is needed."""
    md5 = write_cifar10(tmp_path)
    first, _ = open_cifar(settings(tmp_path, md5))
    (tmp_path / CIFAR10).unlink()
    tmp_path.chmod(0o555)
    try:
        again, _ = open_cifar(settings(tmp_path, md5))
    finally:
        tmp_path.chmod(0o755)
    assert listing(tmp_path) == made(md5)[1:]
    assert np.array_equal(first.images, again.images)


def test_a_worker_shares_the_pixels(tmp_path: Path) -> None:
    """What is sent to a worker is where the pixels lie."""
    train, _ = open_cifar(settings(tmp_path, write_cifar10(tmp_path)))
    sent = pickle.dumps(train)
    assert len(sent) < train.images.nbytes / 10
    twin = pickle.loads(sent)
    train.images[3] = 77
    assert np.array_equal(twin.images, train.images)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 5000)])
def test_damaged_files_are_named(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    """A file that was lost or cut later is one line with its name."""
    md5 = write_cifar10(tmp_path)
    open_cifar(settings(tmp_path, md5))
    damage(tmp_path / f"cifar10-{md5[:16]}/data_batch_3")
    with pytest.raises(DataError, match="data_batch_3"):
        open_cifar(settings(tmp_path, md5))


def test_other_digest(tmp_path: Path) -> None:
    """Files belong to one archive: with another digest in the settings others are unpacked."""
    open_cifar(settings(tmp_path, write_cifar10(tmp_path)))
    train, _ = open_cifar(settings(tmp_path, write_cifar10(tmp_path, rows=3)))
    assert len(train) == 15


def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that cannot be written leave nothing, and the error says what to do."""

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    md5 = write_cifar10(tmp_path)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(
        DiskError,
        match=r"cifar10-\w+: cannot be written: No space left on device; free space or set",
    ):
        open_cifar(settings(tmp_path, md5))
    assert listing(tmp_path) == [CIFAR10]


def test_foreign_archive(tmp_path: Path) -> None:
    """An archive that was put there by hand is checked too, and not deleted."""
    md5 = write_cifar10(tmp_path)
    with pytest.raises(
        DataError,
        match=f"expected c58f30108f718f92721af3b95e74349a, got {md5}; .* set data.md5={md5} ",
    ):
        open_cifar(settings(tmp_path))
    assert listing(tmp_path) == [CIFAR10]


@pytest.mark.parametrize("cut", [True, False])
def test_incomplete_archives(tmp_path: Path, cut: bool) -> None:
    """An archive whose digest was accepted, but which ends early or lacks a file, is refused."""
    members = {name: py2_pickle(part) for name, part in cifar10_batches().items()}
    if not cut:
        del members[BATCH]
    md5 = write_members(tmp_path / CIFAR10, members)
    if cut:
        content = (tmp_path / CIFAR10).read_bytes()[:-5000]
        (tmp_path / CIFAR10).write_bytes(content)
        md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    with pytest.raises(DataError, match=f"{CIFAR10} is corrupt" if cut else "data_batch_3"):
        open_cifar(settings(tmp_path, md5))
    assert listing(tmp_path) == [CIFAR10]


def test_no_download(tmp_path: Path) -> None:
    """Without download the error says which file to put where."""
    with pytest.raises(DataError, match=f"put {CIFAR10} into {tmp_path}"):
        open_cifar(settings(tmp_path))
    assert listing(tmp_path) == []


def fetched(root: Path, address: str, md5: str | None) -> tuple[ArraySource, ArraySource]:
    return open_cifar(settings(root, md5, download=True, mirror=f"{address}/pub/"))


def test_download(tmp_path: Path) -> None:
    """From a mirror to the arrays through the real download, once."""
    (tmp_path / "there").mkdir()
    md5 = write_cifar10(tmp_path / "there")
    with site(files({f"pub/{CIFAR10}": (tmp_path / "there" / CIFAR10).read_bytes()})) as here:
        train, _ = fetched(tmp_path / "here", here.address, md5)
        fetched(tmp_path / "here", here.address, md5)
    assert len(here.asked) == 1
    assert len(train) == 100
    assert listing(tmp_path / "here") == made(md5)


def test_wrong_checksum(tmp_path: Path) -> None:
    """An archive with another digest than the publisher's is not kept."""
    (tmp_path / "there").mkdir()
    write_cifar10(tmp_path / "there")
    content = (tmp_path / "there" / CIFAR10).read_bytes()
    with (
        site(files({f"pub/{CIFAR10}": content})) as here,
        pytest.raises(DataError, match="expected c58f30108f718f92721af3b95e74349a"),
    ):
        fetched(tmp_path / "here", here.address, None)
    assert listing(tmp_path / "here") == []


def test_default_root(tmp_path: Path) -> None:
    """Without data.root all files lie in a folder of the user's cache."""
    cache = Path(os.environ["WELLFED_CACHE"])
    md5 = write_cifar10(tmp_path)
    (cache / "cifar10").mkdir()
    shutil.move(tmp_path / CIFAR10, cache / "cifar10" / CIFAR10)
    open_cifar(DataConfig(name="cifar10", md5=md5.upper(), download=False))
    assert listing(cache / "cifar10") == made(md5)


@pytest.mark.timeout(20)
@oddities.special
def test_odd_archive(tmp_path: Path, plant: Plant) -> None:
    """No archive but a regular file is read; the error names the file."""
    oddities.put(plant, tmp_path / CIFAR10)
    with pytest.raises(DataError, match=rf"^{tmp_path}/{CIFAR10}\b.*(data\.download|data\.md5)"):
        open_cifar(settings(tmp_path, "0" * 32))
    assert oddities.untouched(tmp_path / CIFAR10)
