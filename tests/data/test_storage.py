"""Reading folders and arrays."""

import os
import pickle
import pwd
import re
import shlex
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from harness.config import ConfigError
from harness.data.storage import (
    ArraySource,
    FolderSource,
    Source,
    Subset,
    cache_root,
    open_folder_splits,
    part,
    split,
)
from harness.runtime.errors import BadSample, DataError

JPEG = b"\xff\xd8\xff\xe0 the rest does not matter here"


def plant(root: Path, *names: str, data: bytes = JPEG) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def names(source: FolderSource) -> list[str]:
    return [os.path.relpath(source.where(i), source.root) for i in range(len(source))]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return plant(tmp_path / "set", "b/2.jpg", "a/x/3.png", "a/1.jpg", "b/1.JPEG")


@pytest.fixture
def as_a_user() -> Iterator[Path]:
    """A folder of a user whom permissions bind, as they do not bind root."""
    with tempfile.TemporaryDirectory() as folder:
        is_root = os.geteuid() == 0
        if is_root:
            os.chown(folder, 65534, 65534)
            os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            if is_root:
                os.seteuid(0)


def test_a_folder_is_read_in_the_order_of_its_names(tree: Path) -> None:
    """Classes, files and labels come sorted, from every depth."""
    source = FolderSource(tree)
    assert source.classes == ("a", "b")
    assert names(source) == ["a/1.jpg", "a/x/3.png", "b/1.JPEG", "b/2.jpg"]
    assert source.labels.dtype == np.int64
    assert source.labels.tolist() == [0, 0, 1, 1]
    assert source.read(3) == (JPEG, 1)


def test_a_pickled_folder_reads_without_another_scan(tree: Path) -> None:
    """Workers get the table of names, not the tree."""
    source = FolderSource(tree)
    plant(tree, "a/0.jpg")
    twin = pickle.loads(pickle.dumps(source))
    assert [twin.where(i) for i in range(len(twin))] == [source.where(i) for i in range(4)]
    assert twin.read(0) == (JPEG, 0)


def test_a_pickled_folder_is_small(tmp_path: Path) -> None:
    """However many files there are, a worker gets no list of them: it maps the trainer's."""
    source = FolderSource(plant(tmp_path, *(f"a/{i:010d}.jpg" for i in range(2000))))
    assert len(pickle.dumps(source)) < 1000
    part = split(source, 0.5, 0)[1]
    twin = pickle.loads(pickle.dumps(part))
    assert [twin.where(i) for i in range(1000)] == [part.where(i) for i in range(1000)]
    assert (twin.labels.tolist(), twin.classes) == (part.labels.tolist(), part.classes)


def test_what_is_no_image_is_left_out_and_counted(
    tree: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden entries, text, pipes, sockets, folders named like images and files beside the classes
    are no samples.
    """
    plant(tree, "a/.hidden.jpg", ".ipynb_checkpoints/x.jpg", "b/sub/.git/x.jpg")
    plant(tree, "notes.txt", "a/readme.txt", data=b"words")
    plant(tree, "a/folder.jpg/inner.jpg")
    os.mkfifo(tree / "a" / "pipe.jpg")
    monkeypatch.chdir(tree / "a")  # a socket's address has room for a hundred bytes
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket.jpg")
    source = FolderSource(tree)
    assert len(source) == 4
    assert source.index.skipped == {
        "hidden": 3,
        "file next to the class folders": 1,
        "not an image": 1,
        "folder named like an image": 1,
        "not a regular file": 2,
    }
    assert "a/readme.txt" in caplog.text


@pytest.mark.parametrize("name", ["a/plain", "a/odd.suffix"])
def test_a_strange_suffix_is_judged_by_content(tree: Path, name: str) -> None:
    """A file without an image's suffix is a sample if it starts like one."""
    assert name in names(FolderSource(plant(tree, name)))


LITTER = ["Thumbs.db", "desktop.ini", ".DS_Store", "._1.jpg", "@eaDir/1.jpg/thumb.jpg"]
LITTER += ["__MACOSX/a/._1.jpg", ".ipynb_checkpoints/1.jpg", ".git/config", "lost+found/1.jpg"]


@pytest.mark.parametrize("place", ["", "a", "a/x"])
def test_litter_of_systems_is_left_out_wherever_it_lies(tree: Path, place: str) -> None:
    """Files and folders of operating systems, archivers and storage are no images or classes."""
    source = FolderSource(plant(tree / place, *LITTER) and tree)
    assert (source.classes, len(source)) == (("a", "b"), 4)
    assert source.index.skipped == {"hidden": len(LITTER)}


def test_links_are_followed_out_of_the_tree(tree: Path, tmp_path: Path) -> None:
    """Classes, folders and images may be links to anywhere, which may hold links in turn."""
    outside = plant(tmp_path / "outside", "blobs/hash", "o/1.jpg")
    (outside / "o" / "2.jpg").symlink_to("../blobs/hash")
    (tree / "c").symlink_to(outside / "o")
    (tree / "a" / "y").symlink_to(outside / "o")
    (tree / "b" / "0.jpg").symlink_to(outside / "blobs" / "hash")
    source = FolderSource(tree)
    assert source.classes == ("a", "b", "c")
    assert names(source) == [
        *("a/1.jpg", "a/x/3.png", "a/y/1.jpg", "a/y/2.jpg"),
        *("b/0.jpg", "b/1.JPEG", "b/2.jpg", "c/1.jpg", "c/2.jpg"),
    ]
    assert source.read(4) == (JPEG, 1)


def test_links_give_each_file_once(
    tree: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a loop of links, and of links to one folder, each image counts once in a class."""
    outside = plant(tmp_path / "outside", "o/5.jpg", "p/6.jpg")
    (outside / "o" / "up").symlink_to(outside)
    (outside / "o" / "p").symlink_to("../p")
    (outside / "p" / "o").symlink_to("../o")
    (tree / "c").symlink_to(outside / "o")
    (tree / "a" / "latest").symlink_to("x")
    (tree / "a" / "loop").symlink_to(tree)
    (tree / "loop").symlink_to(tree)
    (tree / "d").symlink_to(outside / "gone")
    (tree / "a" / "round.jpg").symlink_to("round.jpg")
    source = FolderSource(tree)
    assert source.classes == ("a", "b", "c")
    assert names(source) == [
        *("a/1.jpg", "a/x/3.png", "b/1.JPEG", "b/2.jpg", "c/5.jpg", "c/p/6.jpg"),
    ]
    assert source.index.skipped == {"link to a folder already read": 5, "broken link": 2}
    assert "2 broken link (a/round.jpg, d)" in caplog.text


@pytest.mark.parametrize(
    "name",
    [b"caf\xe9.jpg", b"new\nline.jpg", b"a\ttab.jpg", b"\x1b[31mred.jpg"],
    ids=["bytes", "newline", "tab", "escape"],
)
def test_any_name_works_and_is_escaped_in_messages(tmp_path: Path, name: bytes) -> None:
    """A name that is not UTF-8 or drives a terminal is read, and printed escaped."""
    (tmp_path / "a").mkdir()
    path = os.path.join(os.fsencode(tmp_path), b"a", name)
    with open(path, "wb") as file:
        file.write(JPEG)
    source = FolderSource(tmp_path)
    assert source.read(0) == (JPEG, 0)
    os.unlink(path)
    with pytest.raises(BadSample, match="cannot be read: No such file") as caught:
        source.read(0)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "entry", ["c/closed.jpg", "b/closed.dat", "b/closed"], ids=["file", "unknown suffix", "folder"]
)
def test_what_may_not_be_read_is_listed(as_a_user: Path, entry: str) -> None:
    """A folder, or its first file, without read permission stops the scan and is named."""
    tree = plant(
        as_a_user / "set", "a/1.jpg", "b/1.jpg", entry if "." in entry else f"{entry}/x.jpg"
    )
    (tree / entry).chmod(0)
    with pytest.raises(DataError, match=rf"^cannot read .*{entry}; .*permissions"):
        FolderSource(tree)
    (tree / entry).chmod(0o700)


def test_long_lists_are_cut(as_a_user: Path) -> None:
    """A message names five of many files."""
    tree = plant(as_a_user / "set", *(f"{i}/{i}.jpg" for i in range(9)))
    for path in tree.glob("*/*"):
        path.chmod(0)
    with pytest.raises(DataError, match=r"4/4\.jpg and 4 more;"):
        FolderSource(tree)


EMPTY: dict[str, Any] = {
    "missing": (None, "data.root=.*set: no such folder; set it to"),
    "file": ("", "data.root=.*set: no such folder; set it to"),
    "no classes": (
        "1.jpg",
        r"no images \(skipped: 1 file next to the class folders .*\)",
    ),
    "empty class": ("a/notes.txt", r"no images in a \(skipped: 1 not an image"),
}


@pytest.mark.parametrize(("planted", "text"), EMPTY.values(), ids=EMPTY)
def test_a_folder_without_data_is_refused(tmp_path: Path, planted: str | None, text: str) -> None:
    """A wrong data.root is named with what is wrong and the way out."""
    if planted is not None:
        plant(tmp_path / "set" if planted else tmp_path, planted or "set", data=b"words")
    with pytest.raises(DataError, match=text):
        FolderSource(tmp_path / "set")


def test_a_file_that_vanished_is_a_bad_sample(tree: Path) -> None:
    """A sample that is gone since the scan is named."""
    source = FolderSource(tree)
    (tree / "a" / "1.jpg").unlink()
    with pytest.raises(BadSample, match="a/1.jpg: cannot be read: No such file"):
        source.read(0)


@pytest.mark.timeout(10)
def test_a_file_that_is_too_large_is_a_bad_sample(tree: Path) -> None:
    """A sparse file of 100 GB takes neither time nor memory."""
    source = FolderSource(tree)
    os.truncate(tree / "a" / "1.jpg", 100 << 30)
    with pytest.raises(BadSample, match=r"a/1.jpg: cannot be read: more than 1024 MiB"):
        source.read(0)


@pytest.mark.timeout(10)
def test_a_pipe_in_a_files_place_does_not_block(tree: Path) -> None:
    """A FIFO that took a file's place since the scan is refused at once."""
    source = FolderSource(tree)
    (tree / "a" / "1.jpg").unlink()
    os.mkfifo(tree / "a" / "1.jpg")
    with pytest.raises(BadSample, match="cannot be read: not a regular file"):
        source.read(0)


@pytest.mark.parametrize("val", ["val", "valid", "Validation", "test", "Testing"])
@pytest.mark.parametrize("train", ["train", "Train", "TRAINING"])
def test_splits_are_found_by_name(tmp_path: Path, train: str, val: str) -> None:
    """The folders of the two sets may have any of their usual names, in capitals or not."""
    plant(tmp_path, f"{train}/a/1.jpg", f"{train}/a/2.jpg", f"{val}/a/1.jpg")
    assert [len(part) for part in open_folder_splits(tmp_path, None)] == [2, 1]


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    """Without a set to validate, Train is a class of one tree."""
    plant(tmp_path, *(f"{name}/{i}.jpg" for name in ("Bus", "Train") for i in range(2)))
    assert open_folder_splits(tmp_path, 0.5)[0].classes == ("Bus", "Train")


def way_out(error: pytest.ExceptionInfo[Exception]) -> tuple[Source, Source]:
    """The two sets that the settings at the end of a message open, as a shell and Hydra read it."""
    words = shlex.split(re.search(r"\S*data\.root=.*$", str(error.value))[0])  # type: ignore[index]
    parsed = OverridesParser.create().parse_overrides(words)
    typed = {each.key_or_group: each.value() for each in parsed}
    return open_folder_splits(typed["data.root"], typed.get("data.split_fraction"))


@pytest.mark.parametrize(
    "splits",
    [
        ["fold_0", "fold_1"],
        ["seg_test", "seg_train"],
        ["test_set/test_set", "training_set/training_set"],
        # data.root one level too high
        ["flowers"],
    ],
    ids=str,
)
def test_folders_that_hold_the_classes_are_no_classes(tmp_path: Path, splits: list[str]) -> None:
    """A tree whose folders have the same sub-folders of images is refused; the message's settings
    open one of them.
    """
    for each in splits:
        plant(tmp_path, *(f"{each}/{name}/{i}.jpg" for name in "ab" for i in range(4)))
    with pytest.raises(DataError) as error:
        open_folder_splits(tmp_path, 0.5)
    train, val = way_out(error)
    assert train.classes == ("a", "b") and (len(train), len(val)) == (6, 2)


@pytest.mark.parametrize(
    "inner",
    [
        {"cat": ["images"], "dog": ["images"]},
        {"cat": ["", "left", "right"], "dog": ["left", "right"]},
        {"cat": ["2019", "2020"], "dog": ["2020", "2021"]},
        {"cat": ["raw/left", "raw/tom"], "dog": ["raw/left", "raw/rex"]},
    ],
    ids=["one in each", "images beside them", "one in common", "deeper"],
)
def test_class_folders_may_have_sub_folders(tmp_path: Path, inner: dict[str, list[str]]) -> None:
    """Images anywhere below a class folder are the class's."""
    for name, folders in inner.items():
        plant(tmp_path, *(f"{name}/{each}/{i}.jpg" for each in folders for i in range(2)))
    assert open_folder_splits(tmp_path, 0.5)[0].classes == ("cat", "dog")


@pytest.mark.parametrize("test", ["test/1.jpg", "val/images.txt"], ids=["flat", "no image"])
def test_a_set_without_classes_has_a_way_out(tmp_path: Path, test: str) -> None:
    """Validation images that no class folders hold are refused; the message's settings open a part
    of the training images instead.
    """
    plant(tmp_path, *(f"train/a/{i}.jpg" for i in range(4)), test)
    with pytest.raises(DataError) as error:
        open_folder_splits(tmp_path, None)
    assert [len(part) for part in way_out(error)] == [3, 1]


def test_a_test_folder_beside_val_is_left_alone(tmp_path: Path) -> None:
    """train, val and test: val validates."""
    plant(tmp_path, "train/a/1.jpg", "val/a/1.jpg", "test/a/1.jpg")
    assert "/val/" in open_folder_splits(tmp_path, None)[1].where(0)


def test_splits_may_be_links_and_share_files(tmp_path: Path) -> None:
    """The user's own link to a split is followed, and files
    may link to anywhere below data.root.
    """
    plant(tmp_path / "far", "a/1.jpg")
    plant(tmp_path / "set", "store/1.jpg", "val/a/2.jpg")
    (tmp_path / "set" / "train").symlink_to(tmp_path / "far")
    (tmp_path / "set" / "val" / "a" / "1.jpg").symlink_to(tmp_path / "set" / "store" / "1.jpg")
    assert [len(part) for part in open_folder_splits(tmp_path / "set", None)] == [1, 2]


UNCLEAR: dict[str, Any] = {
    "two validation sets": (
        ["train/a/1.jpg", "val/a/1.jpg", "valid/a/1.jpg"],
        None,
        DataError,
        "val and valid .* the validation",
    ),
    "no val": (
        ["train/a/1.jpg"],
        None,
        DataError,
        r"no val folder .*data\.root=.*/train data\.split_fraction=0\.1",
    ),
    "no train": (
        ["a/1.jpg"],
        None,
        DataError,
        r"no train folder .*found: a.* set data\.split_fraction=0\.1",
    ),
    "fraction without effect": (
        ["train/a/1.jpg", "val/a/1.jpg"],
        0.2,
        ConfigError,
        r"data\.split_fraction=0\.2 has no effect",
    ),
    "one image": (["a/1.jpg"], 0.2, DataError, "class a has only 1 training images"),
    "other classes": (
        ["train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg", "val/c/1.jpg"],
        None,
        DataError,
        "different classes: only in .*/train: 'b'; only in .*/val: 'c'",
    ),
}


@pytest.mark.parametrize(("planted", "fraction", "error", "text"), UNCLEAR.values(), ids=UNCLEAR)
def test_unclear_splits_are_refused(
    tmp_path: Path, planted: list[str], fraction: float | None, error: type[Exception], text: str
) -> None:
    """A layout that does not say which images train and which validate
    is refused with the way out.
    """
    plant(tmp_path, *planted)
    with pytest.raises(error, match=text):
        open_folder_splits(tmp_path, fraction)


def test_one_tree_is_split_by_class(tmp_path: Path) -> None:
    """The parts are disjoint, whole, the same share of every class, and a function of the seed."""
    plant(tmp_path, *(f"a/{i}.jpg" for i in range(30)), *(f"b/{i}.jpg" for i in range(10)))

    def files(seed: int) -> tuple[set[str], set[str]]:
        train, val = split(FolderSource(tmp_path), 0.2, seed)
        assert np.bincount(val.labels).tolist() == [6, 2]
        train_files, val_files = (
            {part.where(i) for i in range(len(part))} for part in (train, val)
        )
        return train_files, val_files

    train, val = files(0)
    assert not train & val
    assert len(train | val) == 40
    assert files(0) == (train, val)
    assert files(1) != (train, val)


def test_a_split_stays_what_it_was() -> None:
    """The images that validate a network must not become ones that it is trained on: the choice is
    pinned.
    """
    source = ArraySource(
        np.zeros((12, 2, 2, 3), np.uint8), np.arange(12) % 3, ["a", "b", "c"], "zeros"
    )
    train, val = split(source, 0.5, 0)
    assert val.indices.tolist() == [1, 3, 4, 5, 9, 11]
    assert sorted([*train.indices, *val.indices]) == list(range(12))


@pytest.mark.parametrize(("fraction", "count"), [(0.001, 1), (0.999, 2)])
def test_both_parts_of_a_split_have_every_class(fraction: float, count: int) -> None:
    """A tiny or huge share still leaves one image of a class on either side."""
    source = ArraySource(np.zeros((3, 2, 2, 3), np.uint8), np.zeros(3), ["a"], "zeros")
    assert len(split(source, fraction, 0)[1]) == count


def test_arrays_are_read_as_they_are() -> None:
    """An array source gives a view of its pixels, and names the row."""
    images = np.arange(4 * 2 * 2 * 3, dtype=np.uint8).reshape(4, 2, 2, 3)
    source = ArraySource(images, np.array([1, 0, 1, 0], np.int32), ["a", "b"], "numbers")
    pixels, label = source.read(2)
    assert np.shares_memory(pixels, images)
    assert (label, source.where(2), source.labels.dtype.name) == (1, "numbers[2]", "int64")


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(lambda images: images, id="whole"),
        pytest.param(lambda images: images[2:], id="end"),
        pytest.param(lambda images: images[::2], id="every second"),
    ],
)
def test_a_pickled_map_has_the_same_pixels(
    tmp_path: Path, part: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Of a mapped file, and of a part of it, a worker reads what the trainer reads."""
    images = np.arange(4 * 2 * 2 * 3, dtype=np.uint8).reshape(4, 2, 2, 3)
    for number, content in enumerate((images, np.asfortranarray(images))):
        np.save(tmp_path / f"{number}.npy", content)
        mapped = part(np.load(tmp_path / f"{number}.npy", mmap_mode="r"))
        source = ArraySource(mapped, np.zeros(len(mapped)), ["a"], "map")
        twin = pickle.loads(pickle.dumps(source))
        assert np.array_equal(twin.images, source.images)


def test_a_subset_counts_from_zero() -> None:
    """Index, label and name are the chosen samples'."""
    images = np.arange(4, dtype=np.uint8)[:, None, None, None].repeat(3, axis=3)
    part = Subset(
        ArraySource(images, np.array([1, 0, 1, 0]), ["a", "b"], "numbers"), np.array([3, 2])
    )
    pixels, label = part.read(1)
    assert isinstance(pixels, np.ndarray)
    assert (len(part), part.labels.tolist(), part.where(0), int(pixels[0, 0, 0]), label) == (
        2,
        [0, 1],
        "numbers[3]",
        2,
        1,
    )
    assert len(Subset(part, np.array([], int))) == 0


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WELLFED_CACHE": "/one", "XDG_CACHE_HOME": "/two"}, "/one"),
        ({"XDG_CACHE_HOME": "/two"}, "/two/wellfed"),
        ({"HOME": "/home/me"}, "/home/me/.cache/wellfed"),
        ({}, "/~/.cache/wellfed"),
    ],
    ids=["own", "xdg", "home", "a user without name and home"],
)
def test_the_cache_folder(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    """The cache lies where the most specific variable says, and never below the current folder."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "WELLFED_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(cache_root()) == expected


def test_a_part_has_its_share_of_every_class() -> None:
    """Rounded, at least one image of each, ascending; a larger part has a smaller one's images."""
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 3], [40, 10, 1]))
    parts = {fraction: part(labels, fraction, 0) for fraction in (0.01, 0.1, 0.5, 1.0)}
    counts = {
        fraction: np.bincount(labels[rows], minlength=4).tolist()
        for fraction, rows in parts.items()
    }
    assert counts == {
        0.01: [1, 1, 0, 1],
        0.1: [4, 1, 0, 1],
        0.5: [20, 5, 0, 1],
        1.0: [40, 10, 0, 1],
    }
    assert set(parts[0.01]) <= set(parts[0.1]) <= set(parts[0.5]) <= set(parts[1.0])
    assert all(np.all(np.diff(rows) > 0) for rows in parts.values())
    assert not np.array_equal(parts[0.5], part(labels, 0.5, 1))


@pytest.mark.parametrize(
    ("named", "fraction"),
    [("", None), ("", 0.1), ("set/train", None), ("set/train/a", None)],
    ids=["above", "above, split", "below", "a class"],
)
def test_a_root_of_another_level_has_a_way_out(
    tmp_path: Path, named: str, fraction: float | None
) -> None:
    """The settings at the end of the message open the two sets."""
    place = tmp_path / "mine, 'a=b'"
    plant(place, *(f"set/{part}/{name}/1.jpg" for part in ("train", "valid") for name in "ab"))
    with pytest.raises(DataError) as error:
        open_folder_splits(place / named, fraction)
    assert [len(part) for part in way_out(error)] == [2, 2]


def test_the_only_folder_of_each_set_is_no_class(tmp_path: Path) -> None:
    """train/data/a and train/data/b: the settings of the message train on a and b."""
    plant(
        tmp_path,
        *(
            f"{part}/data/{name}/{i}.jpg"
            for part in ("train", "val")
            for name in "ab"
            for i in range(2)
        ),
    )
    with pytest.raises(DataError) as error:
        open_folder_splits(tmp_path, None)
    assert way_out(error)[0].classes == ("a", "b")


@pytest.mark.parametrize(
    ("train", "val"),
    [("caf\u00e9", "cafe\u0301"), ("cat", "cat "), ("a b", "a\u00a0b"), ("Cat", "cat")],
    ids=["unicode", "blank", "no-break", "case"],
)
def test_names_that_look_alike_are_shown_apart(tmp_path: Path, train: str, val: str) -> None:
    """The line has both names in ASCII, and names of other scripts as they are."""
    plant(tmp_path, f"train/{train}/1.jpg", f"val/{val}/1.jpg", "val/\u732b/1.jpg")
    with pytest.raises(DataError) as error:
        open_folder_splits(tmp_path, None)
    text = str(error.value)
    assert ascii(train) in text and ascii(val) in text and "\u732b" in text


def test_numbers_as_names_and_a_class_in_a_class_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Classes stay in the order of text; the command of the warning moves the images."""
    names = "0", "1", "2", "10"
    plant(tmp_path, *(f"{name}/{i}.jpg" for name in names for i in range(2)), "1/x/2/9.jpg")
    assert open_folder_splits(tmp_path, 0.5)[0].classes == ("0", "1", "10", "2")
    assert "0, 1, 10, 2" in capsys.readouterr().out
    command = re.search("mv .*", caplog.text)
    assert command
    subprocess.run(command[0], shell=True, check=True)
    assert (tmp_path / "2/9.jpg").exists()
