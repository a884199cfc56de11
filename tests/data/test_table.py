"""Data sets whose labels are in a table."""

from __future__ import annotations

import csv
import json
import random
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from pictures import encoded, photo

from harness.config import AugmentConfig, ColumnsConfig, ConfigError, DataConfig, Evaluate, OnError
from harness.data.datasets import ImageDataset, Splits, load, load_evaluated
from harness.data.folds import dealt
from harness.data.storage import Source
from harness.data.table import TableSource, main
from harness.runtime.errors import BadSample, DataError

JPEG = encoded(photo(16, 16))
NAMES = [f"{label}/{i}.jpg" for label in ("cat", "dog") for i in range(6)]


def plant(root: Path, names: list[str]) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(JPEG)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return plant(tmp_path / "photos", NAMES)


def settings(root: Path, table: str = "labels.csv", **more: Any) -> DataConfig:
    columns = ColumnsConfig(**more.pop("columns", {}))
    return DataConfig("table", str(root), table=table, columns=columns, image_size=16, **more)


def opened(root: Path, table: str = "labels.csv", **more: Any) -> TableSource:
    return TableSource(str(root), settings(root, table, **more))


def found(source: Source) -> dict[str, str]:
    root = source.root  # type: ignore[attr-defined]
    return {
        source.where(i).removeprefix(f"{root}/"): source.classes[label]
        for i, label in enumerate(source.labels)
    }


def sets(splits: Splits) -> tuple[list[str], list[str]]:
    parts = splits.train, splits.val
    assert all(isinstance(part, ImageDataset) for part in parts)
    return tuple(  # type: ignore[return-value]
        [part.source.where(i) for i in range(len(part))]  # type: ignore[union-attr]
        for part in parts
    )


ROWS = [(name, name[:3]) for name in NAMES]
FORMS = {
    "comma": "path,label\n" + "".join(f"{a},{b}\n" for a, b in ROWS),
    "BOM, CRLF, semicolon": "\ufefffile;class\r\n" + "".join(f"{a};{b}\r\n" for a, b in ROWS),
    "quotes": '"label","Image ID"\n' + "".join(f'"{b}", "{a}"\n' for a, b in ROWS),
    "tabs": "label\tfilename\n" + "".join(f"{b}\t{a}\n" for a, b in ROWS),
    "no header, spaces": "".join(f"{a}  {b}\n" for a, b in ROWS),
    "of Windows": "path,label\n"
    + "".join(f"C:/photos/{a},{b}\n" for a, b in ROWS).replace("/", "\\"),
    "one of two columns known": "ID,breed\n" + "".join(f"{a[:-4]},{b}\n" for a, b in ROWS),
    "blank lines": "\npath,label\n\n"[1:] + "\n".join(f"{a},{b}\n" for a, b in ROWS),
    "objects": "".join(json.dumps({"image": a, "n": 1, "target": b}) + "\n" for a, b in ROWS),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_tables_of_many_forms_are_read(root: Path, form: str) -> None:
    """Delimiters, quotes, headers, line ends, separators and suffixes may be any usual ones."""
    (root / "labels.csv").write_bytes(FORMS[form].encode())
    source = opened(root)
    assert found(source) == dict(ROWS)
    assert source.classes == ("cat", "dog")
    assert source.read(6) == (JPEG, 1)


def test_a_parquet_file_is_read(root: Path) -> None:
    """Its columns are found by name; numbers are labels."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"file_name": NAMES, "label": [int(name.startswith("dog")) for name in NAMES]}
    parquet.write_table(arrow.table(columns), root / "labels.parquet")
    assert opened(root, "labels.parquet").classes == ("0", "1")


def test_columns_are_named_by_settings(root: Path) -> None:
    """By name, or by number where the first row is an image already."""
    rows = "".join(f"{i},{a},x,{b}\n" for i, (a, b) in enumerate(ROWS))
    (root / "labels.csv").write_text(f"n,ID,site,dx\n{rows}")
    assert found(opened(root, columns={"image": "ID", "label": "dx"})) == dict(ROWS)
    (root / "labels.csv").write_text(rows)
    assert found(opened(root, columns={"label": "4"})) == dict(ROWS)


def test_a_named_column_is_never_replaced(root: Path) -> None:
    """Not even by the only other one."""
    (root / "labels.csv").write_text(FORMS["comma"].replace("label", "dx"))
    assert found(opened(root)) == dict(ROWS)
    with pytest.raises(ConfigError, match="no column diagnosis among path, dx"):
        opened(root, columns={"label": "diagnosis"})
    assert found(opened(root, columns={"label": "D_X"})) == dict(ROWS)


def test_a_table_without_labels_lists_what_is_to_be_predicted(root: Path) -> None:
    """Other columns are no labels, and images that are not there keep their rows."""
    (root / "new.csv").write_text("camera,file\n7,cat/0.jpg\n7,cat/99.jpg\n9,fox/1.jpg\n")
    for _ in range(2):
        source = TableSource(str(root), settings(root, "new.csv"), labeled=False)
        assert [source.name(i) for i in range(3)] == ["cat/0.jpg", "cat/99.jpg", "fox/1.jpg"]
        assert source.classes == ("",)
    plant(root, ["fox/1.jpg"])
    assert TableSource(str(root), settings(root, "new.csv"), labeled=False).read(2)[0] == JPEG
    (root / "new.csv").write_text("file\n0\n")
    with pytest.raises(DataError, match="ambiguous names"):
        TableSource(str(root), settings(root, "new.csv"), labeled=False)


def test_groups_in_several_splits_are_counted(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The split column is used as it is."""
    parts = ["train", "test", "train", "train", "val", "val"] * 2
    rows = "".join(
        f"{a},{b},{c},P{i // 2}\n" for i, ((a, b), c) in enumerate(zip(ROWS, parts, strict=True))
    )
    (root / "labels.csv").write_text(f"path,label,split,group\n{rows}")
    load(settings(root), AugmentConfig(), 0)
    assert "2 groups have images in several" in caplog.text


def test_images_are_found_in_folders_that_the_table_leaves_out(tmp_path: Path) -> None:
    """As in archives whose images are spread over several folders; unclear names are refused."""
    root = plant(tmp_path, ["part_1/a.jpg", "part_2/b.JPG", "part_2/c.png", "masks/c.txt"])
    (root / "labels.csv").write_text("image_id,dx\na,x\nb,y\nphotos/part_2/c,y\n")
    names = {"part_1/a.jpg": "x", "part_2/b.JPG": "y", "part_2/c.png": "y"}
    assert found(opened(root)) == names
    plant(root, ["part_3/a.png"])
    with pytest.raises(DataError, match=r"1 ambiguous names\b.*\(a in row 2: "):
        opened(root)


def test_the_way_out_of_names_in_train_and_test_works(tmp_path: Path) -> None:
    """As in archives whose test images are numbered as the training images are."""
    root = plant(tmp_path, [f"{part}/{i}.jpg" for part in ("test", "train") for i in range(4)])
    (root / "labels.csv").write_text("id,label\n0,a\n1,b\n")
    with pytest.raises(DataError) as raised:
        opened(root)
    typed = dict(re.findall(r"data\.(root|table)=(\S+)", str(raised.value)))
    source = opened(Path(typed["root"]), typed["table"])
    assert [source.where(i) for i in range(2)] == [f"{root}/train/{i}.jpg" for i in range(2)]


def test_splits_may_be_numbered(root: Path) -> None:
    """0, 1 and 2 are train, val and test, as CelebA has them."""
    rows = "".join(f"{a},{b},{i % 3}\n" for i, (a, b) in enumerate(ROWS))
    (root / "labels.csv").write_text(f"image_id,label,partition\n{rows}")
    found = opened(root).sets()
    assert {name: len(own) for name, own in found.items()} == {"train": 4, "val": 4, "test": 4}


# what a row is, and which rows are left out
BROKEN = {
    "absent": ("gone.jpg,cat", 1),
    "no label": ("cat/5.jpg,", 1),
    "too short": ("cat/5.jpg", 1),
    "twice": ("cat/4.jpg,cat", 1),
    "twice, other label": ("cat/4.jpg,dog", 2),
}


@pytest.mark.parametrize("row", BROKEN)
def test_broken_rows_are_refused_or_left_out(root: Path, row: str) -> None:
    """Each is named with its number, and data.on_error=skip leaves it out."""
    lines = ["path,label", *(f"{a},{b}" for a, b in ROWS)]
    text, fewer = BROKEN[row]
    lines[6] = text
    (root / "labels.csv").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"(in|:|\() ?rows? (\d and )?7\b"):
        opened(root)
    assert len(opened(root, on_error=OnError.skip)) == len(ROWS) - fewer


REFUSED: dict[str, tuple[bytes, type[Exception]]] = {
    "empty": (b"", DataError),
    "workbook": (b"PK\3\4 and so on", DataError),
    "Latin": ("path,label\ncat/0.jpg,é\n".encode("latin-1"), DataError),
    "UTF-16": ("path,label\ncat/0.jpg,cat\n".encode("utf-16"), DataError),
    "open quote": (b'path,label\n"cat/0.jpg,cat\ncat/1.jpg,cat\n', DataError),
    "list of objects": (b'[\n{"path": "cat/0.jpg", "label": "cat"}\n]', DataError),
    "no label": (b"path,n,kind\ncat/0.jpg,1,cat\n", ConfigError),
    "a column a class": (b"path,cat,dog\ncat/0.jpg,1,0\ndog/0.jpg,0,1\n", ConfigError),
    "COCO": (b'{"images": [{"id": 1}], "annotations": [{"image_id": 1}]}', DataError),
    "a header alone": (b"path,label\n", DataError),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_table_is_refused(root: Path, kind: str) -> None:
    """In one line, with the exit code of the data or the settings."""
    content, error = REFUSED[kind]
    (root / "labels.csv").write_bytes(content)
    with pytest.raises(error) as raised:
        opened(root)
    assert "\n" not in str(raised.value) and "labels.csv" in str(raised.value)


def test_a_table_is_required_by_name(root: Path) -> None:
    """And beside another data set, the error names data=table."""
    with pytest.raises(ConfigError, match="requires data.table"):
        load(settings(root, None), AugmentConfig(), 0)  # type: ignore[arg-type]
    data = DataConfig("shapes", table="labels.csv", split_fraction=0.2)
    with pytest.raises(ConfigError, match=r"data\.table=labels\.csv .*; write data=table, or"):
        load(data, AugmentConfig(), 0)


@pytest.mark.parametrize("columns", [{}, {"label": "my kin"}])
def test_the_way_out_of_a_missing_column_works(root: Path, columns: dict[str, str]) -> None:
    """What the message says to type is what a shell and Hydra read; a label repeats, or is spelled
    nearly like that.
    """
    each = 3 if columns else 1
    rows = "".join(f"P{i // each},{a},{b},1\n" for i, (a, b) in enumerate(ROWS))
    (root / "labels.csv").write_text(f"lesion,path,my kind,n\n{rows}")
    with pytest.raises(ConfigError) as raised:
        opened(root, columns=columns)
    [word] = shlex.split(re.search(r"'data\.columns=.*'$", str(raised.value))[0])  # type: ignore[index]
    [parsed] = OverridesParser.create().parse_overrides([word])
    assert found(opened(root, columns=parsed.value())) == dict(ROWS)


def test_a_label_is_not_guessed_from_several_columns(root: Path) -> None:
    """A patient's number or a hospital repeats too."""
    rows = "".join(f"P{i // 3},{a},{b},1\n" for i, (a, b) in enumerate(ROWS))
    (root / "labels.csv").write_text(f"lesion,path,my kind,n\n{rows}")
    with pytest.raises(ConfigError, match="label: COLUMN"):
        opened(root)


def test_a_table_is_remembered_until_it_or_its_images_change(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run does not read the rows again."""
    from harness.data import table as module

    (root / "labels.csv").write_text(FORMS["comma"])
    # as if all had been written long ago
    monkeypatch.setattr("harness.data.folder_index._RACY_NS", -(10**10))
    reads: list[str] = []
    real = module._Table.read
    monkeypatch.setattr(module._Table, "read", lambda own: reads.append(own.path) or real(own))
    assert found(opened(root)) == found(opened(root)) == dict(ROWS) and len(reads) == 1
    (root / NAMES[0]).unlink()
    with pytest.raises(DataError, match=r"cat/0\.jpg in row 2"):
        opened(root)
    with (root / "labels.csv").open("a") as file:
        file.write("cat/0.jpg,cat\n")
    assert len(opened(root, on_error=OnError.skip)) == len(ROWS) - 1


def test_a_file_that_vanished_is_a_bad_sample(root: Path) -> None:
    """As of a folder."""
    (root / "labels.csv").write_text(FORMS["comma"])
    source = opened(root)
    (root / NAMES[0]).unlink()
    with pytest.raises(BadSample, match=r"cat/0\.jpg: cannot be read"):
        source.read(0)


def test_splits_are_those_of_the_table(root: Path) -> None:
    """By their usual names; test is kept apart, and evaluated on request."""
    parts = ["train", "Training", "VAL", "valid", "test", "testing"] * 2
    rows = "".join(f"{a},{b},{c}\n" for (a, b), c in zip(ROWS, parts, strict=True))
    (root / "labels.csv").write_text(f"path,label,split\n{rows}")
    splits = load(settings(root), AugmentConfig(), 0)
    assert [len(part) for part in sets(splits)] == [4, 4]
    test = load_evaluated(settings(root, evaluate=Evaluate.test), 0, ("dog", "cat"))
    assert [name[-9:] for name in sets(test)[1]] == [
        "cat/4.jpg", "cat/5.jpg", "dog/4.jpg", "dog/5.jpg"
    ]  # fmt: skip
    assert test.val.source.labels.tolist() == [1, 1, 0, 0]  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"data\.split_fraction=0\.5 has no effect"):
        load(settings(root, split_fraction=0.5), AugmentConfig(), 0)


def test_rows_without_a_split_are_for_training(root: Path) -> None:
    """A column may name the rows of val and test alone; without any, there is no validation set."""
    parts = ["", "val", "", "test", " ", "TRAIN"] * 2
    rows = "".join(f"{a},{b},{c}\n" for (a, b), c in zip(ROWS, parts, strict=True))
    (root / "labels.csv").write_text(f"path,label,split\n{rows}")
    found = opened(root).sets()
    assert {name: len(own) for name, own in found.items()} == {"train": 8, "val": 2, "test": 2}
    (root / "labels.csv").write_text("path,label,split\n" + "".join(f"{a},{b}\n" for a, b in ROWS))
    train, val = sets(load(settings(root, split_fraction=0.5), AugmentConfig(), 0))
    assert len(train) == len(val) == 6


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize(
    "held_out", [{"split_fraction": 0.001}, {"split_fraction": 0.999}, {"fold": 3, "folds": 4}],
    ids=str,
)  # fmt: skip
def test_a_split_with_an_empty_part_is_refused(
    root: Path, held_out: dict[str, Any], groups: int
) -> None:
    """Few groups cannot be divided at will; the advice is a split that works."""
    table_of(root, [(a, b, f"patient {i % groups}") for i, (a, b) in enumerate(ROWS)])
    with pytest.raises(DataError) as raised:
        load(settings(root, **held_out), AugmentConfig(), 0)
    fraction = float(re.search(r"set data\.split_fraction=(.*) instead$", str(raised.value))[1])  # type: ignore[index]
    _, val = sets(load(settings(root, split_fraction=fraction), AugmentConfig(), 0))
    assert len(val) == len(ROWS) // groups


def test_a_table_without_a_set_is_refused(root: Path) -> None:
    """So is one with a class that has no training image."""
    (root / "labels.csv").write_text(FORMS["comma"])
    with pytest.raises(DataError, match=r"no validation images; .*data\.split_fraction=0\.1"):
        load(settings(root), AugmentConfig(), 0)
    rows = "".join(f"{a},{b},{'train' if b == 'cat' else 'val'}\n" for a, b in ROWS)
    (root / "labels.csv").write_text(f"path,label,split\n{rows}")
    with pytest.raises(DataError, match="no training images of dog"):
        load(settings(root), AugmentConfig(), 0)


def table_of(root: Path, rows: list[tuple[str, str, str]], name: str = "labels.csv") -> None:
    with (root / name).open("w", newline="") as file:
        csv.writer(file, quoting=random.choice([csv.QUOTE_ALL, csv.QUOTE_MINIMAL])).writerows(
            [("path", "label", "group"), *rows]
        )


@pytest.mark.parametrize("held_out", [{"split_fraction": 0.25}, {"fold": 1, "folds": 3}], ids=str)
def test_a_split_depends_on_the_images_alone(root: Path, held_out: dict[str, Any]) -> None:
    """Not on the rows' order and quoting, the folder's and groups' names or images of test."""
    rows = [(a, b, f"patient {i % 4}") for i, (a, b) in enumerate(ROWS)]
    table_of(root, rows)
    first = sets(load(settings(root, **held_out), AugmentConfig(), 0))
    random.Random(1).shuffle(rows)
    renamed = root.rename(root.with_name("renamed"))
    table_of(renamed, [(a, b, f"P{c[-1]}") for a, b, c in rows])
    second = sets(load(settings(renamed, **held_out), AugmentConfig(), 0))
    assert [[path.replace("renamed", "photos") for path in part] for part in second] == [*first]
    # nor on images that are set aside
    plant(renamed, ["ant/0.jpg", "cat/00.jpg"])
    lines = [f"{a},{b},{c},train" for a, b, c in rows]
    aside = ["ant/0.jpg,cat,patient 9,test", "cat/00.jpg,cat,patient 8,test"]
    (renamed / "labels.csv").write_text("\n".join(["path,label,group,split", *aside, *lines]))
    assert sets(load(settings(renamed, **held_out), AugmentConfig(), 0)) == second
    group = {a: c for a, _, c in rows}
    torn = [{group[path[-9:]] for path in part} for part in first]
    assert not torn[0] & torn[1]


@pytest.mark.parametrize("kind", ["table", "imagefolder"])
def test_folds_validate_each_image_once(root: Path, kind: str) -> None:
    """Each fold has about as many images of every class, of tables and folders."""
    if kind == "table":
        (root / "labels.csv").write_text(FORMS["comma"])
    validated: Counter[str] = Counter()
    for fold in range(5):
        data = settings(root, fold=fold) if kind == "table" else DataConfig(
            kind, str(root), fold=fold, image_size=16
        )  # fmt: skip
        train, val = sets(load(data, AugmentConfig(), 0))
        assert {*train} | {*val} == {str(root / name) for name in NAMES} and len(val) in (2, 3)
        validated.update(val)
    assert {*validated.values()} == {1} and len(validated) == len(NAMES)


def test_parts_have_their_share_of_every_class() -> None:
    """Within an image without groups; groups stay whole and come as near as they can."""
    rng = np.random.default_rng(0)
    labels = rng.choice(5, 500, p=[0.5, 0.3, 0.1, 0.06, 0.04])
    shares = np.array([0.7, 0.2, 0.1])
    parts = dealt(labels, np.arange(500), shares, 0)
    counts = np.array([np.bincount(labels[parts == part], minlength=5) for part in range(3)])
    assert (abs(counts - np.outer(shares, np.bincount(labels))) <= 1).all() and counts.all()
    groups = rng.integers(0, 60, 500)
    parts = dealt(labels, groups, np.full(5, 0.2), 0)
    assert all(len({*parts[groups == group]}) == 1 for group in range(60))
    counts = np.array([np.bincount(labels[parts == part], minlength=5) for part in range(5)])
    assert (abs(counts / np.bincount(labels) - 0.2) < 0.08).all()


def test_a_folder_writes_its_table(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table opens the same images as the folder, in the same order."""
    rest = {"split_fraction": 0.3}
    folder = load(DataConfig("imagefolder", str(root), image_size=16, **rest), AugmentConfig(), 0)  # type: ignore[arg-type]
    assert main([str(root)]) == 0
    (root / "labels.csv").write_text(capsys.readouterr().out)
    assert sets(load(settings(root, **rest), AugmentConfig(), 0)) == sets(folder)
    for part in ("train", "val", "test"):
        plant(root / part, NAMES)
    capsys.readouterr()
    assert main([str(root)]) == 0
    rows = [*csv.DictReader(capsys.readouterr().out.splitlines())]
    assert rows[0] == {"path": "train/cat/0.jpg", "label": "cat", "split": "train"}
    assert len(rows) == 3 * len(NAMES)
    assert main([str(root / "absent")]) == 3
