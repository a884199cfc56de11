"""Tar shards: the headers' reader, the index, the labels, and the order of the folder."""

import io
import json
import os
import pickle
import random
import tarfile

import numpy as np
import pytest
from PIL import Image

from harness.config import AugmentConfig, ConfigError, DataConfig
from harness.data import datasets
from harness.data.ahead import BLOCK_BYTES
from harness.data.shard_index import open_shards
from harness.data.storage import FolderSource
from harness.data.tar import TarError, members
from harness.runtime.errors import BadSample, DataError


@pytest.fixture(autouse=True)
def _kept(tmp_path, monkeypatch):
    monkeypatch.setenv("WELLFED_CACHE", str(tmp_path / "cache"))


def packed(files, form=tarfile.USTAR_FORMAT, **facts):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=form) as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for fact, value in facts.items():
                setattr(info, fact, value)
            archive.addfile(info, io.BytesIO(data))
    return content.getvalue()


def found(content, **how):
    read = lambda at, length: content[at : at + length]
    return [(name, at, length) for name, at, length, _ in members(read, len(content), **how)]


def by_tarfile(content):
    """Returns what tarfile finds; None: it stops before the end, or at what no plain file is."""
    try:
        with tarfile.open(fileobj=io.BytesIO(content), errorlevel=2) as archive:
            infos = list(archive)
            end = archive.offset
    except (tarfile.TarError, ValueError, OSError, OverflowError, EOFError):
        return None
    plain = [info for info in infos if not info.isdir()]
    # at the block of zeros tarfile stands behind it
    if content[end : end + 512].strip(b"\0") or len(content) < end + 512:
        return None
    if any(info.type not in b"0\x007" or info.sparse for info in plain):
        return None
    return [(os.fsencode(info.name), info.offset_data, info.size) for info in plain]


ARCHIVES = [
    packed([(f"n{i % 3}/{i}.jpg", bytes(i * 97)) for i in range(12)], form)
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
] + [
    packed([(f"n{i}/{'x' * 90 * i}.jpg", bytes(700 * i)) for i in range(5)], form, mtime=1.5)
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
]


@pytest.mark.parametrize("plain", ARCHIVES)
def test_headers_are_those_of_tarfile_and_cut_ones_refused(plain):
    assert found(plain) == by_tarfile(plain)
    end = len(plain.rstrip(b"\0"))
    for stop in random.Random(1).sample(range(1, end), 50):
        with pytest.raises(TarError):
            found(plain[:stop])


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (packed([("a.jpg", b"1")])[:900], "cut off"),
        (packed([("a.jpg", b"1")])[:1024], "cut off"),
        (packed([("a.jpg", b"1")]) + packed([("b.jpg", b"1")]), "after its end"),
        (b"\x1f\x8b" + bytes(range(256)) * 8, "decompress"),
        (packed([("a.jpg", b"")], type=tarfile.LNKTYPE, linkname="b"), "a link"),
        (packed([("a.jpg", b"")], type=tarfile.SYMTYPE, linkname="b"), "a link"),
        (packed([("a.jpg", b"")], type=tarfile.FIFOTYPE), "a link"),
        (packed([("a/../b.jpg", b"1")]), "outside"),
        (packed([("/b.jpg", b"1")]), "outside"),
        (
            packed([("a.jpg", b"1")], tarfile.PAX_FORMAT, pax_headers={"GNU.sparse.map": "0"}),
            "sparse",
        ),
    ],
)
def test_what_has_no_plain_bytes_is_refused(content, word):
    with pytest.raises(TarError, match=word):
        found(content)


def test_sizes_of_more_than_eight_gigabytes_are_read():
    size = 9 << 30
    head = tarfile.TarInfo("a.jpg")
    head.size = size
    header = head.tobuf(tarfile.GNU_FORMAT)
    end = 512 + size
    read = lambda at, length: header if at == 0 else bytes(length)
    assert [each[:3] for each in members(lambda at, n: read(at, n)[:n], end + 1024)] == [
        (b"a.jpg", 512, size)
    ]


def shards(folder, sets, info=None):
    """Writes shards, by name, each a list of (name, bytes)."""
    folder.mkdir(exist_ok=True)
    for name, files in sets.items():
        (folder / name).write_bytes(packed(files))
    if info is not None:
        (folder / "_info.json").write_text(json.dumps(info))
    return folder


def sample(key, label=None, suffix="jpg"):
    return [(f"{key}.{suffix}", key.encode())] + (
        [] if label is None else [(f"{key}.cls", f"{label}\n".encode())]
    )


def opened(folder, **how):
    return open_shards(str(folder), DataConfig(name="shards", **how))


def listing(source):
    return [source.name(i).partition(":")[2] for i in range(len(source))]


def test_samples_are_in_the_folders_order(tmp_path):
    keys = ["b/10", "a/z", "b/2", "a/c-d/1", "a/c/1", "c/1.5", "c/1.25"]
    for key in keys:
        path = tmp_path / "tree" / f"{key}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(key.encode())
    tree = FolderSource(tmp_path / "tree")
    labels = {"a": 0, "b": 1, "c": 2}
    for told in (True, False):
        parts = {
            f"{i}.tar": [
                each for key in keys[i::2] for each in sample(key, labels[key[0]] if told else None)
            ]
            for i in range(2)
        }
        source = opened(shards(tmp_path / f"shards{told}", parts))
        assert source.classes == tree.classes
        assert source.labels.tolist() == tree.labels.tolist()
        assert [source.read(i) for i in range(7)] == [tree.read(i) for i in range(7)]
        assert listing(source) == [tree.name(i) for i in range(7)]


def test_a_source_is_remembered_pickled_and_small(tmp_path, monkeypatch):
    folder = shards(tmp_path / "s", {"0.tar": sample("a/1") + sample("b/1")})
    first = opened(folder)
    monkeypatch.setattr("harness.data.shard_index.members", None)
    kept = opened(folder)
    again = pickle.loads(pickle.dumps(kept))
    assert [again.read(i) for i in range(2)] == [first.read(i) for i in range(2)]
    columns = (first.shard, first.offset, first.length, first.labels)
    assert sum(column.itemsize for column in columns) == 20
    (folder / "0.tar").write_bytes(packed(sample("a/1") + sample("b/2")))
    with pytest.raises(TypeError):
        opened(folder)


def test_long_names_are_told(tmp_path):
    content = packed([(f"{c}/{'x' * 150}.jpg", b"1") for c in "ab"], tarfile.GNU_FORMAT)
    folder = shards(tmp_path / "s", {})
    (folder / "0.tar").write_bytes(content)
    source = opened(folder)
    assert source.where(1) == f"{folder}/0.tar:b/{'x' * 150}.jpg"
    os.truncate(folder / "0.tar", 600)
    with pytest.raises(BadSample, match=r"0\.tar:byte"):
        source.read(1)


@pytest.mark.parametrize(
    ("files", "classes", "labels"),
    [
        (sample("1", 7) + sample("2", 3), ["3", "7"], [0, 1]),
        (sample("p/1", 10) + sample("p/2", 9), ["9", "10"], [0, 1]),
        (sample("ant/x/1") + sample("cat/x/2"), ["ant", "cat"], [0, 1]),
        (sample("ant/1", 1) + sample("cat/1", 0), ["cat", "ant"], [0, 1]),
        ([("./b/1.JPEG", b"b"), ("./a/1.png", b"a"), ("a/._1.png", b"?")], ["a", "b"], [0, 1]),
        (
            [("1.jpg", b""), ("1.json", b'{"label": 4}'), ("2.jpg", b""), ("2.cls", b"04")],
            ["4"],
            [0, 0],
        ),
    ],
)
def test_labels(tmp_path, files, classes, labels):
    source = opened(shards(tmp_path / "s", {"0.tar": files}))
    assert [*source.classes] == classes
    assert source.labels.tolist() == labels


@pytest.mark.parametrize(
    "files",
    [
        sample("1", 7) + sample("2"),
        sample("1") + sample("2"),
        [*sample("1", 7), ("1.json", b'{"label": 8}')],
        [*sample("1", 7), ("1.png", b"")],
        sample("1", "cat"),
        [("1.jpg", b""), ("1.json", b"{")],
        sample("a/1") + sample("a/1") + sample("b/1"),
        [("1.txt", b"a cat")],
    ],
)
def test_labels_that_are_unsure_are_refused(tmp_path, files):
    with pytest.raises(DataError):
        opened(shards(tmp_path / "s", {"0.tar": files}))


def test_names_of_numbers(tmp_path):
    files = sample("000/1", 1) + sample("000/2", 0) + sample("001/3", 1)
    folder = shards(tmp_path / "s", {"0.tar": files}, {"classes": ["ant", "cat"]})
    source = opened(folder)
    assert source.classes == ("ant", "cat")
    assert source.labels.tolist() == [0, 1, 1]
    for given in (["ant"], ["000", "001"]):
        (folder / "_info.json").write_text(json.dumps({"classes": given}))
        with pytest.raises(DataError):
            opened(folder)


def info(train, val):
    return {
        "splits": {
            "train": {"name": "train", "filenames": [train], "shard_lengths": [2]},
            "validation": {"name": "validation", "filenames": [val], "shard_lengths": [2]},
        }
    }


def two(folder, info=None):
    both = sample("a/1") + sample("b/1")
    others = sample("a/8") + sample("b/9")
    return shards(folder, {"t-0.tar": both, "v-0.tar": others}, info)


def pair(folder, **how):
    train, val = datasets.open_listed(DataConfig(name="shards", root=str(folder), **how))
    return [[s.read(i)[0].decode() for i in range(len(s))] for s in (train, val)]


def test_sets_by_info_patterns_and_fraction(tmp_path):
    both = [["a/1", "b/1"], ["a/8", "b/9"]]
    assert pair(two(tmp_path / "i", info("t-0.tar", "v-0.tar"))) == both
    folder = two(tmp_path / "p")
    assert pair(folder, train="t-{0..0}.tar", val="v-*.tar") == both
    train, val = pair(folder, split_fraction=0.5)
    assert sorted(train + val) == sorted(both[0] + both[1])
    for how, error in (
        ({}, DataError),
        ({"train": "t-{0..1}.tar", "val": "v-*.tar"}, ConfigError),
        ({"train": "*.tar", "val": "v-*.tar"}, DataError),
        ({"train": "t*", "val": "v*", "split_fraction": 0.5}, ConfigError),
    ):
        with pytest.raises(error):
            pair(folder, **how)


def test_shards_that_are_gone_are_refused(tmp_path):
    with pytest.raises(DataError, match="v-1"):
        opened(two(tmp_path / "a", info("t-0.tar", "v-1.tar")))


def test_a_ready_index_is_used_while_sizes_fit(tmp_path, monkeypatch):
    folder = two(tmp_path / "s", info("t-0.tar", "v-0.tar"))
    plain = opened(folder)
    np.savez(
        folder / "_index.npz",
        shards=np.array(plain.shards),
        sizes=np.array([os.path.getsize(folder / name) for name in plain.shards]),
        shard=plain.shard,
        offset=plain.offset,
        length=plain.length,
        label=plain.labels,
        classes=np.array(plain.classes),
        split=np.zeros(4, np.int8),
    )
    with monkeypatch.context() as patch:
        patch.setattr("harness.data.shard_index.members", None)
        ready = opened(folder)
    assert ready.digest() == plain.digest()
    (folder / "t-0.tar").write_bytes(packed(sample("a/1") + sample("b/1")) + bytes(10240))
    assert len(opened(folder)) == 4


def test_blocks_cover_their_samples(tmp_path):
    big = bytes(BLOCK_BYTES // 3)
    files = [(f"{'ab'[i % 2]}/{i}.jpg", big) for i in range(8)]
    source = opened(shards(tmp_path / "s", {"0.tar": files, "1.tar": [("a/x.jpg", b"1")]}))
    assert source.blocks.dtype == np.int32
    assert len({*source.blocks}) == source.blocks.max() + 1 == 4
    for block in range(4):
        own = source.blocks == block
        assert len({*source.shard[own]}) == 1
        assert np.ptp(source.offset[own]) < BLOCK_BYTES


def test_training_images_are_those_of_the_folder(tmp_path):
    rng = np.random.default_rng(0)
    files = {"train": [], "val": []}
    for part, members_of in files.items():
        for i in range(12):
            label = "abc"[i % 3]
            path = tmp_path / "tree" / part / label / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (40, 48, 3), dtype=np.uint8)).save(path)
            members_of.insert(i // 2, (f"{label}/{i}.png", path.read_bytes()))
    folder = shards(tmp_path / "s", {f"{part}.tar": files[part] for part in files})
    sets = []
    for name, root, more in (
        ("imagefolder", tmp_path / "tree", {}),
        ("shards", folder, {"train": "train.tar", "val": "val.tar"}),
    ):
        data = DataConfig(name=name, root=str(root), image_size=32, fraction=0.7, **more)
        split = datasets.load(data, AugmentConfig(), seed=3)
        out = np.empty((len(split.train) + len(split.val), 3, 32, 32), np.uint8)
        labels = [split.train.fill(1, i, out[i]) for i in range(len(split.train))]
        labels += [split.val.fill(0, i, out[-i - 1]) for i in range(len(split.val))]
        sets.append((out.tobytes(), labels, split.classes))
        assert split.fingerprint() == split.fingerprint()
    assert sets[0] == sets[1]
