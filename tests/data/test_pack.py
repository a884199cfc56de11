"""Images packed into tar shards."""

from __future__ import annotations

import errno
import json
import os
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import encoded, photo
from PIL import Image

from harness.data import pack as module
from harness.data import shrink
from harness.data.pack import main
from harness.data.shard_index import INDEX, INFO
from harness.data.storage import FolderSource

MB = 1_000_000


@cache
def noise(i: int, side: int = 64) -> bytes:
    pixels = np.random.default_rng(i).integers(0, 256, (side, side, 3), np.uint8)
    return encoded(Image.fromarray(pixels), "PNG")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two sets of three classes, 4.4 MB in all: more than one shard of 1 MB."""
    root = tmp_path / "photos"
    names = (
        "0.png",
        "a.b.png",
        "below/c%2E.png",
        "a-b.PNG",
        "a.png",
        "über.png",
        "x" * 120 + ".png",
    )
    for split, turns in (("train", 15), ("val", 5)):
        for label, name in enumerate(("cat", "001.a dog", "éclair")):
            for i in range(turns):
                path = root / split / name / (names[i] if i < len(names) else f"{i:04}.png")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(noise(100 * label + i, 140 if i % 2 else 160))
    return root


def contents(root: Path, but: tuple[str, ...] = ()) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name not in but
    }


def packed(source: Path, out: Path, *more: str) -> dict[str, bytes]:
    assert main([str(source), str(out), "--shard-mb", "1", *more]) == 0
    return contents(out)


def rows(out: Path) -> Iterator[tuple[int, int, bytes]]:
    """Set, label and bytes of each image, by the index."""
    index = np.load(out / INDEX)
    for shard, offset, length, label in zip(
        *(index[name] for name in ("shard", "offset", "length", "label")), strict=True
    ):
        name = str(index["shards"][shard])
        split = ("train", "validation", "test").index(name.partition("-")[0])
        yield split, int(label), (out / name).read_bytes()[offset : offset + length]


def test_the_index_has_the_images_in_the_folders_order(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    files = packed(tree, out)
    wanted = []
    for split, name in enumerate(("train", "val")):
        source = FolderSource(tree / name)
        for i in range(len(source)):
            data, label = source.read(i)
            wanted.append((split, label, data))
    assert sorted(rows(out), key=lambda row: row[0]) == wanted
    index = np.load(out / INDEX)
    assert {name: index[name].dtype.str for name in ("shard", "offset", "length", "label")} == {
        "shard": "<i4", "offset": "<i8", "length": "<i4", "label": "<i4",
    }  # fmt: skip
    assert index["sizes"].tolist() == [len(files[str(name)]) for name in index["shards"]]
    assert index["classes"].tolist() == ["001.a dog", "cat", "éclair"]
    info = json.loads(files[INFO])
    assert info["classes"] == ["001.a dog", "cat", "éclair"]
    train, val = info["splits"]["train"], info["splits"]["validation"]
    assert train["filenames"] + val["filenames"] == index["shards"].tolist()
    assert len(train["filenames"]) == 4 and train["filenames"][1] == "train-00001.tar"
    for own, count in ((train, 45), (val, 15)):
        assert sum(own["shard_lengths"]) == own["num_samples"] == count
        for name, length in zip(own["filenames"], own["shard_lengths"], strict=True):
            with tarfile.open(out / name) as tar:
                assert len(tar.getmembers()) == 2 * length
                assert all(each.mtime == each.uid == each.gid == 0 for each in tar)


def test_each_image_is_beside_its_class_number(tree: Path, tmp_path: Path) -> None:
    packed(tree, tmp_path / "out")
    seen = 0
    for shard in sorted((tmp_path / "out").glob("*.tar")):
        with tarfile.open(shard) as tar:
            members = tar.getmembers()
            for image, number in zip(members[::2], members[1::2], strict=True):
                assert number.name == f"{image.name.rpartition('.')[0]}.cls"
                file = tar.extractfile(number)
                assert file is not None
                name = image.name.partition("/")[0]
                assert ["001.a dog", "cat", "éclair"][int(file.read())] == name
                seen += 1
    assert seen == 60


@pytest.mark.parametrize("options", [(), ("--max-side", "100", "--quality", "80")])
def test_the_bytes_are_the_same_each_time(
    tree: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    one = packed(tree, tmp_path / "one", *options, "--jobs", "1")
    assert packed(tree, tmp_path / "two", *options, "--jobs", "3") == one
    assert packed(tree, tmp_path / "one", *options) == one
    other = packed(tree, tmp_path / "other", *options, "--seed", "1")
    assert other["train-00000.tar"] != one["train-00000.tar"]


@pytest.mark.parametrize("written", range(6))
@pytest.mark.parametrize("after", [False, True])
def test_a_second_call_goes_on_at_any_shard(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int, after: bool
) -> None:
    wanted = packed(tree, tmp_path / "whole")
    replace = Path.replace
    left = [written]

    def ended(path: Path, target: Any) -> Any:
        if path.name.endswith(".tar.part"):
            left[0] -= 1
            if left[0] < 0:
                if after:
                    replace(path, target)
                raise KeyboardInterrupt
        return replace(path, target)

    out = tmp_path / "out"
    monkeypatch.setattr(Path, "replace", ended)
    assert main([str(tree), str(out), "--shard-mb", "1"]) == 130
    monkeypatch.undo()
    assert len([*out.glob("*.tar")]) == written + after
    states = {path: path.stat().st_ino for path in out.glob("*.tar")}
    assert packed(tree, out) == wanted
    assert all(path.stat().st_ino == number for path, number in states.items())
    (out / "train-00001.tar").unlink()
    assert packed(tree, out) == wanted


def test_unpacked_files_are_the_same(tree: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    packed(tree, out)
    assert main(["--unpack", str(out), str(again)]) == 0
    assert contents(again) == contents(tree)
    # one tree of class folders
    packed(tree / "train", tmp_path / "one")
    assert main(["--unpack", str(tmp_path / "one"), str(tmp_path / "classes")]) == 0
    assert contents(tmp_path / "classes") == contents(tree / "train")
    assert main(["--unpack", str(out), str(again)]) == 2
    data = (out / "train-00001.tar").read_bytes()
    (out / "train-00001.tar").write_bytes(data[: len(data) // 2])
    assert main(["--unpack", str(out), str(tmp_path / "cut")]) == 3


def test_an_unpacked_file_stays_below_its_folder(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    packed(tree, out)
    with tarfile.open(out / "train-00000.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("../../far.png"))
    assert main(["--unpack", str(out), str(tmp_path / "a" / "b")]) == 3
    assert not (tmp_path / "far.png").exists() and not (tmp_path / "a" / "far.png").exists()


def test_a_batch_of_neighbors_has_as_many_classes_as_a_uniform_one(tmp_path: Path) -> None:
    root = tmp_path / "many"
    data = encoded(Image.new("RGB", (8, 8)))
    classes, each, batch = 100, 30, 150
    for label in range(classes):
        (root / f"{label:03}").mkdir(parents=True)
        for i in range(each):
            (root / f"{label:03}" / f"{i}.jpg").write_bytes(data)
    out = tmp_path / "out"
    packed(root, out)
    index = np.load(out / INDEX)
    labels = index["label"][np.lexsort((index["offset"], index["shard"]))]
    found = np.mean([len(np.unique(part)) for part in labels.reshape(-1, batch)])
    rng = np.random.default_rng(0)
    uniform = np.mean(
        [
            len(np.unique(part))
            for _ in range(20)
            for part in rng.permutation(labels).reshape(-1, batch)
        ]
    )
    assert abs(found / uniform - 1) < 0.02
    # as the folder has them
    assert np.mean([len(np.unique(part)) for part in index["label"].reshape(-1, batch)]) == 5


def test_images_are_made_smaller_in_the_same_pass(tree: Path, tmp_path: Path) -> None:
    out, copy = tmp_path / "out", tmp_path / "copy"
    packed(tree, out, "--max-side", "100", "--quality", "80")
    shrink.shrink(tree, copy, 100, 80)
    assert main(["--unpack", str(out), str(tmp_path / "again")]) == 0
    assert contents(tmp_path / "again") == contents(copy, (shrink.RECORD,))
    made = shrink.Copy.at(out)
    assert made is not None and (made.source, made.max_side) == (str(tree), 100)


def test_an_unreadable_image_is_listed_and_packed(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tree / "train/cat/bad.jpg"
    bad.write_bytes(encoded(photo(300, 200))[:900])
    out = tmp_path / "out"
    assert main([str(tree), str(out), "--max-side", "100"]) == 3
    assert str(bad) in capsys.readouterr().err
    assert main([str(tree), str(out), "--max-side", "100"]) == 3
    assert str(bad) in capsys.readouterr().err
    assert bad.read_bytes() in [data for *_, data in rows(out)]
    assert main([str(tree), str(tmp_path / "plain")]) == 0


def test_a_full_disk_ends_with_its_code(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(shrink, "write_whole", lambda *_: None)
    out = tmp_path / "out"
    assert main([str(tree), str(out)]) == 7
    assert str(out) in capsys.readouterr().err
    assert not [*out.glob("*.tar")]


def test_other_shards_and_folders_in_each_other_are_refused(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = packed(tree, out)
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("mine")
    for arguments in (
        [tree, tree / "new"], [tree / "train", tree], [tree, out, "--seed", 1], [tree, full],
        [tree, out, "--max-side", 9], [tree / "train", out], [tree, out, "--shard-mb", 2],
    ):  # fmt: skip
        options = [] if "--shard-mb" in arguments else ["--shard-mb", "1"]
        assert main([*map(str, arguments), *options]) == 2
    for option in ("--shard-mb=0", "--jobs=0", "--max-side=0", "--quality=101", "--seed=x"):
        with pytest.raises(SystemExit) as ended:
            main([str(tree), str(tmp_path / "x"), option])
        assert ended.value.code == 2
    # an image more would move all others
    (tree / "train/cat/more.png").write_bytes(noise(0))
    assert main([str(tree), str(out), "--shard-mb", "1"]) == 2
    assert contents(out) == made


def test_a_table_has_the_classes_and_sets(tmp_path: Path) -> None:
    root = tmp_path / "images"
    (root / "part").mkdir(parents=True)
    lines = ["path,label,split"]
    data = {}
    for i in range(12):
        name = f"part/{i}.png" if i % 2 else f"{i}.png"
        data[i] = noise(i)
        (root / name).write_bytes(data[i])
        lines.append(f"{name},{'odd/1' if i % 2 else 'even'},{'val' if i > 7 else 'train'}")
    (root / "labels.csv").write_text("\n".join(lines))
    packed(root / "labels.csv", tmp_path / "out")
    assert json.loads((tmp_path / "out" / INFO).read_text())["classes"] == ["even", "odd/1"]
    assert sorted(rows(tmp_path / "out"), key=lambda row: row[0]) == [
        (split, label, data[i])
        for split, of in enumerate((range(8), range(8, 12)))
        for label in (0, 1)
        for i in sorted((i for i in of if i % 2 == label), key=lambda i: str(i))
    ]
    again = tmp_path / "again"
    assert main(["--unpack", str(tmp_path / "out"), str(again)]) == 0
    assert (again / "val/odd%2F1/part/9.png").read_bytes() == data[9]


def parquet(path: Path, data: list[bytes | None], **labels: list[int | None]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    features: dict[str, Any] = {"image": {"_type": "Image"}}
    columns = {"image": pyarrow.array([own and {"bytes": own, "path": "same.jpg"} for own in data])}
    for name, own in labels.items():
        features[name] = {"names": ["zebra", "ant", "bee/wasp"], "_type": "ClassLabel"}
        columns[name] = pyarrow.array(own, pyarrow.int64())
    features["tags"] = [{"dtype": "string", "_type": "Value"}]
    columns["tags"] = pyarrow.array([["a"]] * len(data))
    facts = {"huggingface": json.dumps({"info": {"features": features}})}
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table(columns).replace_schema_metadata(facts)
    importorskip = pytest.importorskip("pyarrow.parquet")
    importorskip.write_table(table, path, row_group_size=3)


def test_parquet_files_of_the_hub(tmp_path: Path) -> None:
    root, out = tmp_path / "hub", tmp_path / "out"
    data: list[bytes | None] = [noise(i) for i in range(9)]
    data[2] = encoded(photo())
    parquet(root / "data/train-00000-of-00002.parquet", data[:4], label=[2, 0, 0, 1])
    parquet(root / "data/train-00001-of-00002.parquet", data[4:6], label=[0, 2])
    parquet(root / "data/validation-00000-of-00001.parquet", [*data[6:8], None], label=[1, None, 1])
    parquet(root / "data/test-00000-of-00001.parquet", data[8:], label=[-1])
    packed(root, out)
    info = json.loads((out / INFO).read_text())
    assert info["classes"] == ["zebra", "ant", "bee/wasp"] and [*info["splits"]] == [
        "train", "validation",
    ]  # fmt: skip
    assert sorted(rows(out), key=lambda row: row[0]) == [
        (0, 0, data[1]), (0, 0, data[2]), (0, 0, data[4]), (0, 1, data[3]),
        (0, 2, data[0]), (0, 2, data[5]), (1, 1, data[6]),
    ]  # fmt: skip
    with tarfile.open(out / "train-00000.tar") as tar:
        assert {name for name in tar.getnames() if not name.endswith(".cls")} == {
            "zebra/00000001.png", "zebra/00000002.jpeg", "zebra/00000004.png", "ant/00000003.png",
            "bee%2Fwasp/00000000.png", "bee%2Fwasp/00000005.png",
        }  # fmt: skip
    assert packed(root, out) == packed(root, tmp_path / "two")


def test_several_columns_of_labels_are_refused(tmp_path: Path) -> None:
    parquet(tmp_path / "hub/0.parquet", [noise(0), noise(1)], fine=[2, 1], coarse=[0, 1])
    assert main([str(tmp_path / "hub"), str(tmp_path / "out")]) == 3


def test_parquet_without_pyarrow_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "0.parquet").write_bytes(b"PAR1")

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(module.importlib, "import_module", missing)
    assert main([str(tmp_path / "hub"), str(tmp_path / "out")]) == 3
    assert "pip install pyarrow" in capsys.readouterr().err
