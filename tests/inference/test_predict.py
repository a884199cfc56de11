"""mode=predict: which images it names, what it says of them, and what changes nothing of it."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import trained
from PIL import Image

import harness
from harness.cli import job
from harness.config import Config, ConfigError
from harness.inference.predict import predict
from harness.runtime import signals
from harness.runtime.distributed import World
from harness.runtime.errors import DataError, Interrupted
from harness.runtime.folder import refuse_used
from harness.training import resume

Composed = Callable[..., Config]
CLASSES = ("a", "b", "c")
FORMS = (
    "loader.num_workers=0",
    "loader.backend=threads loader.num_workers=3 loader.restart_workers=true",
    "loader.backend=processes loader.num_workers=2 loader.restart_workers=true",
    "loader.backend=arrays",
)
RUN = (
    "data=imagefolder", "data.image_size=32", "data.mean=[0.4,0.5,0.6]", "augment.crop=pad",
    "trainer.epochs=2", "loader.batch_size=16", "device=cpu", "trainer.num_threads=1",
    "optim.lr=0.02", "run.name=first",
)  # fmt: skip


def draw(path: Path, shade: int, seed: int) -> None:
    """A noisy picture of 40 x 36 pixels, by ``shade``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 80, (36, 40, 3))
    noise[..., shade] += 120
    Image.fromarray(noise.astype(np.uint8)).save(path)


def run(config: Config, folder: Path, *typed: str) -> None:
    """A command in this process."""
    folder.mkdir(parents=True)
    job.main_worker(0, job.Job(config, folder, typed))


@pytest.fixture(scope="module")
def first(
    tmp_path_factory: pytest.TempPathFactory, composed: Composed
) -> tuple[Path, dict[str, Any]]:
    """The folder of a run on JPEGs of three colors, and what it reported."""
    root = tmp_path_factory.mktemp("first")
    for part, count in (("train", 24), ("val", 11)):
        for shade, name in enumerate(CLASSES):
            for i in range(count):
                draw(root / "images" / part / name / f"{i}.jpg", shade, 100 * shade + i)
    threads = torch.get_num_threads()
    run(composed(*RUN, f"data.root={root / 'images'}"), root / "run")
    torch.set_num_threads(threads)
    return root / "run", json.loads((root / "run/report.json").read_text())


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """38 images in and below a folder, and three files that cannot be read, one a kind."""
    root = tmp_path / "tree"
    for i in range(37):
        draw(root / ("", "x", "x/y")[i % 3] / f"{i}.png", i % 3, 1000 + i)
    (root / "x" / os.fsdecode(b"\xff,\n.png")).write_bytes((root / "0.png").read_bytes())
    (root / "cut.png").write_bytes((root / "0.png").read_bytes()[:500])
    (root / "empty.jpg").touch()
    (root / "x/words.jpg").write_text("words")
    (root / "notes.txt").write_text("left out")
    return root


@pytest.mark.slow
def test_a_table_is_answered_with_its_keys(
    first: tuple[Path, dict[str, Any]], tree: Path, tmp_path: Path, composed: Composed
) -> None:
    """Each image is called what the table calls it; one that is not there is a bad sample."""
    (tree / "new.csv").write_text("ID,note\n3,a\n25,b\n99,c\n")
    typed = ("mode=predict", f"resume={first[0]}", f"data.root={tree}")
    typed += ("data.table=new.csv", "data.columns={image: ID}", "device=cpu")
    run(composed(*typed), tmp_path / "out", *typed)
    with open(tmp_path / "out/predictions.csv", newline="") as file:
        table = [*csv.DictReader(file)]
    assert [row["ID"] for row in table] == ["3", "25"] and {row["class_1"] for row in table} <= {
        *CLASSES
    }
    [bad] = (tmp_path / "out/bad_samples.jsonl").read_text().splitlines()
    assert json.loads(bad)["where"].endswith("/99")


def rows(folder: Path) -> list[dict[str, Any]]:
    """The lines of ``predictions.jsonl``, of which the table has the same."""
    lines = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    with open(folder / "predictions.csv", errors="surrogateescape", newline="") as file:
        table = [*csv.DictReader(file)]
    for line, cells in zip(lines, table, strict=True):
        count = len(line["classes"])
        names = [cells[f"class_{i + 1}"] for i in range(count)]
        values = [float(cells[f"probability_{i + 1}"]) for i in range(count)]
        assert (cells["path"], names, values) == tuple(line.values())
        assert len(cells) == 1 + 2 * count
    return lines


def bad(folder: Path) -> list[str]:
    """The names of the files in the list."""
    lines = (folder / "bad_samples.jsonl").read_text().splitlines()
    return [Path(json.loads(line)["where"]).name for line in lines]


@pytest.mark.usefixtures("kept_globals")
def test_an_evaluation_repeats_the_runs_result(
    composed: Composed, first: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """From the checkpoint alone: the same top-1 and loss of JPEGs, to the last digit."""
    typed = (
        "mode=evaluate",
        f"model.weights={first[0]}",
        "trainer.num_threads=1",
        "loader.batch_size=16",
    )
    run(composed(*typed), tmp_path / "again", *typed)
    again = json.loads((tmp_path / "again/report.json").read_text())
    names = ("top1", "top5", "loss", "val_images")
    assert [again[name] for name in names] == [first[1][name] for name in names]
    assert again["top1"] > 0.5


@pytest.mark.usefixtures("kept_globals")
def test_every_form_of_feed_predicts_alike(
    composed: Composed, first: tuple[Path, dict[str, Any]], tree: Path, tmp_path: Path
) -> None:
    """The same bytes, in the order of the names; the unreadable are listed and have no row."""
    found = []
    common = ("mode=predict", f"resume={first[0]}", f"data.root={tree}", "trainer.num_threads=1")
    for number, form in enumerate(FORMS):
        typed = (*common, "loader.batch_size=8", *form.split())
        folder = tmp_path / str(number)
        run(composed(*typed), folder, *typed)
        assert bad(folder) == ["cut.png", "empty.jpg", "words.jpg"]
        found.append([(folder / f"predictions.{kind}").read_bytes() for kind in ("csv", "jsonl")])
    assert found.count(found[0]) == len(FORMS)

    lines = rows(tmp_path / "0")
    names = [os.fsencode(line["path"]) for line in lines]
    there = {os.fsencode(path.relative_to(tree)) for path in tree.rglob("*.png")}
    assert names == sorted(there - {b"cut.png"}) and len(names) == 38
    # each image as by itself: no other's row is moved or changed
    net = harness.load(first[0])
    for line in lines:
        assert line["probabilities"] == sorted(line["probabilities"], reverse=True)
        with torch.no_grad():
            alone = net.model(net.transform(tree / line["path"])[None]).softmax(1)[0]
        own = dict(zip(net.classes, alone.tolist(), strict=True))
        told = dict(zip(line["classes"], line["probabilities"], strict=True))
        assert told == pytest.approx(own, abs=1e-5)


@pytest.mark.usefixtures("kept_globals")
def test_one_file(
    composed: Composed, first: tuple[Path, dict[str, Any]], tree: Path, tmp_path: Path
) -> None:
    """Whatever lies beside it; as many classes as were asked for."""
    typed = ("mode=predict", f"model.weights={first[0]}", f"data.root={tree / '0.png'}")
    run(composed(*typed, "predict.top_k=2"), tmp_path / "run", *typed)
    (line,) = rows(tmp_path / "run")
    assert line["path"] == "0.png" and len(line["classes"]) == 2
    assert not (tmp_path / "run/bad_samples.jsonl").exists()


@pytest.mark.usefixtures("kept_globals")
def test_where_no_image_can_be_read(
    composed: Composed, first: tuple[Path, dict[str, Any]], tree: Path, tmp_path: Path
) -> None:
    """An error says so, and nothing but the list is written."""
    for path in tree.rglob("*.png"):
        path.unlink()
    typed = ("mode=predict", f"resume={first[0]}", f"data.root={tree}")
    with pytest.raises(DataError, match="^none of .*2 images .*/empty.jpg: .*bad_samples.jsonl"):
        run(composed(*typed), tmp_path / "run", *typed)
    assert bad(tmp_path / "run") == ["empty.jpg", "words.jpg"]
    assert not [*(tmp_path / "run").glob("predictions*")]


@pytest.mark.usefixtures("kept_globals")
def test_a_signal_leaves_no_part(
    composed: Composed,
    first: tuple[Path, dict[str, Any]],
    tree: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The files are written whole, at the end, or not at all."""
    monkeypatch.setattr(signals, "_received", [(15, 0.0)])
    typed = ("mode=predict", f"resume={first[0]}", f"data.root={tree}")
    with pytest.raises(Interrupted):
        run(composed(*typed), tmp_path / "run", *typed)
    assert not [*(tmp_path / "run").glob("predictions*")]


@pytest.mark.usefixtures("kept_globals")
def test_classes_of_weights_without_names_are_numbered(
    composed: Composed, first: tuple[Path, dict[str, Any]], tree: Path, tmp_path: Path
) -> None:
    """The probabilities are those of the run; a class is its place in the logits."""
    torch.save(harness.load(first[0]).model.state_dict(), tmp_path / "net.pth")
    typed = ("mode=predict", f"model.weights={tmp_path / 'net.pth'}", f"data.root={tree}")
    run(composed(*typed, *RUN[:4]), tmp_path / "numbers", *typed)
    typed = ("mode=predict", f"resume={first[0]}", f"data.root={tree}")
    run(composed(*typed), tmp_path / "names", *typed)
    for numbers, names in zip(rows(tmp_path / "numbers"), rows(tmp_path / "names"), strict=True):
        assert numbers["probabilities"] == pytest.approx(names["probabilities"], abs=1e-6)
        assert [CLASSES[int(number)] for number in numbers["classes"]] == names["classes"]


def check_alike(one: Path, two: Path) -> None:
    """The same files in the same order, each once; probabilities to 1e-5."""
    for line, other in zip(rows(one), rows(two), strict=True):
        assert line["path"] == other["path"]
        values = line["probabilities"]
        assert other["probabilities"] == pytest.approx(values, abs=1e-5)
        if np.diff(values).max() < -1e-5:
            assert line["classes"] == other["classes"]


@pytest.mark.usefixtures("kept_globals")
def test_shares_of_ranks_come_together(
    composed: Composed, first: tuple[Path, dict[str, Any]], tree: Path, tmp_path: Path
) -> None:
    """Three ranks, of which the last has one batch less, in this process, one after the other."""
    shares: list[Any] = []

    class Rank(World):
        def gathered(self, value: Any) -> list[Any]:
            if isinstance(value, bytes):
                return [value]
            shares.append(value)
            return [*shares]

    typed = ("mode=predict", f"resume={first[0]}", f"data.root={tree}", "loader.batch_size=6")
    for ranks in (1, 3):
        saved = resume.find(composed(*typed), tmp_path, World(0, 1, 0, 1, torch.device("cpu")))
        config = resume.settings(composed(*typed), saved, typed)
        folder = tmp_path / str(ranks)
        folder.mkdir()
        shares.clear()
        for rank in reversed(range(ranks)):
            assert saved is not None
            predict(saved, config, Rank(rank, ranks, rank, ranks, torch.device("cpu")), folder)
        assert bad(folder) == ["cut.png", "empty.jpg", "words.jpg"]
    assert [len(share[0]) for share in shares] == [12, 12, 17]
    check_alike(tmp_path / "1", tmp_path / "3")


@pytest.mark.usefixtures("kept_globals")
def test_ranks_that_see_different_files_are_told(
    composed: Composed,
    first: tuple[Path, dict[str, Any]],
    tree: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their shares would not be of one list."""
    monkeypatch.setattr(
        World, "gathered", lambda self, value: [value, *[b"another"] * isinstance(value, bytes)]
    )
    typed = ("mode=predict", f"resume={first[0]}", f"data.root={tree}")
    with pytest.raises(DataError, match=f"^data.root={tree}: ranks see different files"):
        run(composed(*typed), tmp_path / "run", *typed)


def test_a_folder_of_predictions_is_not_used_again(tmp_path: Path) -> None:
    """Nor one with an exported network: what lies there would be gone."""
    for name in ("predictions.csv", "model.pt2", "model.onnx"):
        (tmp_path / name).touch()
        with pytest.raises(ConfigError, match="resume=auto"):
            refuse_used(tmp_path)
        (tmp_path / name).unlink()
    refuse_used(tmp_path)


@pytest.mark.slow
def test_ranks_predict_together(
    first: tuple[Path, dict[str, Any]], tree: Path, tmp_path: Path
) -> None:
    """Two processes find what one does, with threads and with processes that load."""
    common = ("mode=predict", f"resume={first[0]}", f"data.root={tree}", "loader.batch_size=6")
    for name, more in (
        ("one", ()),
        ("two", ("dist=spawn", "dist.nprocs=2")),
        ("processes", ("dist=spawn", "dist.nprocs=2", "loader.backend=processes")),
    ):
        done = trained(tmp_path, *common, *more, f"run.name={name}")
        assert done.returncode == 0 and done.stderr == "", done.stderr
        assert "predicted      38 of 41 images\nbad samples    3 cannot be read" in done.stdout
        assert bad(tmp_path / "outputs" / name) == ["cut.png", "empty.jpg", "words.jpg"]
        check_alike(tmp_path / "outputs/one", tmp_path / "outputs" / name)
