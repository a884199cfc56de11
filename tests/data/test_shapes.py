"""The generated data set: its pictures, and how it gets to the disk."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from PIL import Image
from samples import comes_true

pytest.importorskip("sklearn", reason="needs sklearn (uv sync --group dev)")
from sklearn.datasets import load_sample_images
from sklearn.linear_model import RidgeClassifier

from harness.config import ConfigError, DataConfig, GenerateConfig
from harness.data import shapes
from harness.data.storage import FolderSource
from harness.runtime import limits, signals
from harness.runtime.errors import DataError, DiskError, Interrupted

TINY = GenerateConfig(classes=3, train_images=7, val_images=4, width=40, height=32)

Pixels = NDArray[np.uint8]


def config(root: Path, generate: GenerateConfig = TINY) -> DataConfig:
    """The settings of a tree at ``root``."""
    return DataConfig(root=str(root), generate=generate)


def contents(root: Path) -> dict[str, bytes]:
    """Every file below ``root`` with its bytes."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def pictures(count: int, width: int, height: int) -> list[Pixels]:
    """``count`` pictures of all figures in turn."""
    return [shapes.draw(i % 10, 10, width, height, np.random.default_rng(i)) for i in range(count)]


def encode(image: Pixels, quality: int) -> bytes:
    """The JPEG file of ``image``."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def photographs(width: int, height: int) -> list[Pixels]:
    """Four parts of each of scikit-learn's two photographs, resized."""
    found = []
    for photograph in map(Image.fromarray, load_sample_images().images):
        for left, top in ((0, 0), (140, 0), (0, 50), (140, 50)):
            part = photograph.crop((left, top, left + 500, top + 500 * height // width))
            found.append(np.asarray(part.resize((width, height), Image.Resampling.LANCZOS)))
    return found


class Statistics(NamedTuple):
    """What pictures have in common with photographs."""

    slope: float
    correlation: float
    bytes_per_pixel: float


def statistics(pixels: list[Pixels]) -> Statistics:
    """Medians over ``pixels``."""
    rows = []
    for image in pixels:
        channels = image.reshape(-1, 3).astype(np.float64)
        together = np.asarray(np.corrcoef(channels.T))
        rows.append(
            (
                spectral_slope(image @ np.array([0.299, 0.587, 0.114])),
                (together[0, 1] + together[1, 2]) / 2,
                len(encode(image, 90)) / len(channels),
            )
        )
    return Statistics(*np.median(rows, axis=0))


def spectral_slope(luma: NDArray[np.float64]) -> float:
    """The exponent of power over spatial frequency, fitted to means over rings of frequency."""
    height, width = luma.shape
    window = np.hanning(height)[:, None] * np.hanning(width)
    power = np.abs(np.fft.fft2((luma - luma.mean()) * window)) ** 2
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width))
    edges = np.geomspace(2 / min(height, width), 0.4, 9)
    rings = [(frequency >= low) & (frequency < high) for low, high in itertools.pairwise(edges)]
    return float(
        np.polyfit(
            np.log(edges[:-1] * edges[1:]) / 2, [np.log(power[ring].mean()) for ring in rings], 1
        )[0]
    )


@pytest.mark.parametrize(("width", "height"), [(80, 80), (500, 375)], ids=["toy", "imagenet"])
def test_pictures_have_the_statistics_of_photographs(width: int, height: int) -> None:
    """Spectrum, channel correlation and bytes per pixel are those of photographs."""
    ours = statistics(pictures(24, width, height))
    real = statistics(photographs(width, height))
    assert -3 < ours.slope < -1.5
    assert abs(ours.slope - real.slope) < 0.6
    assert ours.correlation == pytest.approx(real.correlation, abs=0.12)
    assert 0.5 < ours.bytes_per_pixel / real.bytes_per_pixel < 2


def test_imagenet_sized_files_weigh_what_imagenet_does() -> None:
    """At 500x375 and quality 94 the mean file has 90 to 130 KB."""
    sizes = [len(encode(image, 94)) for image in pictures(24, 500, 375)]
    assert 90_000 < np.mean(sizes) < 130_000


@pytest.mark.parametrize("classes", [2, 10, 11, 100, 10_000])
def test_every_class_has_its_own_name(classes: int) -> None:
    """Ten classes are figures; more of them differ by hue too."""
    names = [shapes.class_name(label, classes) for label in range(classes)]
    assert len(set(names)) == classes
    assert all(name.isalpha() == (classes <= 10) for name in names)


def test_a_linear_classifier_fails() -> None:
    """Pixels alone do not give the class away: position, size, turn and colors are chance."""
    labels = np.arange(2500) % 10
    rows = [
        shapes.draw(int(label), 10, 32, 32, np.random.default_rng(i))
        for i, label in enumerate(labels)
    ]
    pixels = np.stack(rows).reshape(len(rows), -1) / 255.0
    classifier = RidgeClassifier(alpha=300.0).fit(pixels[:2000], labels[:2000])
    assert classifier.score(pixels[2000:], labels[2000:]) < 0.35


def test_the_tree_is_what_the_settings_say(tmp_path: Path) -> None:
    """Counts, class names, sizes and format follow the settings, and classes take turns."""
    train, val = shapes.open_shapes(config(tmp_path / "tree"))
    assert isinstance(train, FolderSource)
    assert (len(train), len(val)) == (7, 4)
    assert train.classes == val.classes == ("circle", "square", "triangle")
    assert np.bincount(train.labels).tolist() == [3, 2, 2]
    data, _ = train.read(0)
    assert isinstance(data, bytes)
    with Image.open(io.BytesIO(data)) as image:
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (40, 32))


def test_bytes_do_not_depend_on_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes in small chunks write what one process writes in a row."""
    shapes.open_shapes(config(tmp_path / "one"))
    monkeypatch.setattr(shapes, "_processes", lambda pixels: 2)
    monkeypatch.setattr(shapes, "_CHUNK_PIXELS", 2 * TINY.width * TINY.height)
    shapes.open_shapes(config(tmp_path / "two"))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_an_image_does_not_depend_on_its_neighbors(tmp_path: Path) -> None:
    """More images of the same seed begin with the fewer ones."""
    more = GenerateConfig(classes=3, train_images=9, val_images=5, width=40, height=32)
    shapes.open_shapes(config(tmp_path / "few"))
    shapes.open_shapes(config(tmp_path / "more", more))
    few = contents(tmp_path / "few")
    many = contents(tmp_path / "more")
    assert {name: many[name] for name in few if name.endswith(".jpg")} == {
        name: data for name, data in few.items() if name.endswith(".jpg")
    }


def test_seeds_and_splits_share_no_image(tmp_path: Path) -> None:
    """Another seed is another data set, and validation images are not training images."""
    other = GenerateConfig(classes=3, train_images=7, val_images=4, width=40, height=32, seed=1)
    shapes.open_shapes(config(tmp_path / "zero"))
    shapes.open_shapes(config(tmp_path / "one", other))
    files = [
        data
        for root in ("zero", "one")
        for name, data in contents(tmp_path / root).items()
        if ".jpg" in name
    ]
    assert len(set(files)) == len(files) == 22


def test_a_made_tree_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run draws nothing, and the cache holds one folder for each set of settings."""
    monkeypatch.setenv("WELLFED_CACHE", str(tmp_path))
    shapes.open_shapes(DataConfig(generate=TINY))
    (folder,) = tmp_path.iterdir()
    before = folder.stat()
    shapes.open_shapes(DataConfig(generate=TINY))
    assert os.path.samestat(before, folder.stat())
    assert folder.stat().st_mtime_ns == before.st_mtime_ns
    shapes.open_shapes(DataConfig(generate=GenerateConfig(classes=2, train_images=2, val_images=2)))
    assert len(list(tmp_path.iterdir())) == 2


def start_run(root: Path, images: int) -> subprocess.Popen[str]:
    """Another process that opens the data set at ``root`` with two drawing processes."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from harness.config import DataConfig, GenerateConfig\n"
        "from harness.data import shapes\n"
        "if __name__ == '__main__':\n"
        "    shapes._processes = lambda pixels: 2\n"
        f"    generate = GenerateConfig(classes=2, train_images={images}, val_images=2, width=64, "
        "height=64)\n"
        f"    shapes.open_shapes(DataConfig(root={str(root)!r}, generate=generate))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.mark.slow
def test_two_runs_at_once_make_it_once(tmp_path: Path) -> None:
    """Of two processes that start together, one draws and both end well."""
    runs = [start_run(tmp_path / "tree", 600) for _ in range(2)]
    outputs = [run.communicate(timeout=60)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert sum("Generated 600 + 2 " in output for output in outputs) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]


@pytest.mark.slow
def test_a_killed_run_leaves_no_worker_and_no_tree(tmp_path: Path) -> None:
    """After SIGKILL no process is left, and the next run makes the tree."""
    root = tmp_path / "tree"
    run = start_run(root, 50_000)
    assert comes_true(lambda: any(tmp_path.glob("tree.part/train/*/*.jpg")), within_s=60.0)
    family = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGKILL)
    run.communicate(timeout=10)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert not root.exists()
    shapes.open_shapes(config(root))
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_leaves_nothing_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """A signal in mid-generation ends it with nothing left behind."""

    def raise_interrupted() -> None:
        if any(tmp_path.rglob("*.jpg")):
            raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(signals, "check", raise_interrupted)
    monkeypatch.setattr(shapes, "_processes", lambda pixels: processes)
    with pytest.raises(Interrupted):
        shapes.open_shapes(config(tmp_path / "tree"))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up ends in one line with the folder; nothing is left."""

    def fail(image: Image.Image, path: Path, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Image.Image, "save", fail)
    with pytest.raises(DiskError, match="tree: .*No space left on device"):
        shapes.open_shapes(config(tmp_path / "tree"))
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_drawing_is_used_as_it_is(tmp_path: Path) -> None:
    """A whole tree of e818d66, whose pictures were others, is not drawn again."""
    for split, count in (("train", 7), ("val", 4)):
        for i in range(count):
            folder = tmp_path / "tree" / split / ("arrow-plain", "ring", "star")[i % 3]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{i}.jpg").write_bytes(b"as it was drawn")
    facts = {"classes": 3, "train_images": 7, "val_images": 4, "width": 40, "height": 32}
    (tmp_path / "tree/shapes.json").write_text(
        json.dumps({"version": 2, **facts, "quality": 90, "seed": 0})
    )
    before = contents(tmp_path)
    train, _ = shapes.open_shapes(config(tmp_path / "tree"))
    assert train.classes == ("arrow-plain", "ring", "star")
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "found",
    [
        {"thesis.txt": "mine"},
        {"shapes.json": "{"},
        {"shapes.json": "[]"},
        {"shapes.json": '{"version": 2, "width": 48}'},
    ],
    ids=["other files", "damaged", "no object", "other settings"],
)
def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, found: dict[str, str]) -> None:
    """A folder that the user named is neither used nor overwritten."""
    for name, text in found.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match="set data.root to a folder that"):
        shapes.open_shapes(config(tmp_path))
    assert contents(tmp_path) == {name: text.encode() for name, text in found.items()}


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    """``data.root`` may be there already if nothing is in it."""
    (tmp_path / "tree").mkdir()
    assert len(shapes.open_shapes(config(tmp_path / "tree"))[0]) == 7


def test_missing_images_are_noticed(tmp_path: Path) -> None:
    """A tree that lost a file is refused with the counts."""
    shapes.open_shapes(config(tmp_path / "tree"))
    next((tmp_path / "tree/train/circle").iterdir()).unlink()
    with pytest.raises(
        DataError,
        match=r"tree/train\b.* 6 images instead of 7; delete",
    ):
        shapes.open_shapes(config(tmp_path / "tree"))


def test_fewer_images_than_classes_are_refused(tmp_path: Path) -> None:
    """Every class needs an image in both sets."""
    generate = GenerateConfig(classes=10, train_images=10, val_images=9)
    with pytest.raises(
        ConfigError, match="data.generate.val_images=9 is less than data.generate.classes=10"
    ):
        shapes.open_shapes(config(tmp_path / "tree", generate))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("images", "cores", "processes"),
    [(100, 8.0, 1), (50_000, 8.0, 8), (50_000, 0.5, 1), (5_000, 64.0, 16)],
    ids=["small", "large", "quota", "little for each"],
)
def test_processes_follow_cores_and_work(
    monkeypatch: pytest.MonkeyPatch, images: int, cores: float, processes: int
) -> None:
    """As many processes as cores; fewer if there is little to draw."""
    monkeypatch.setattr(limits, "measure", lambda: limits.Limits(cores, 1 << 30, None, 1024))
    assert shapes._processes(80 * 80 * images) == processes


@pytest.mark.parametrize("plant", ["text", "folder", "nothing"])
def test_a_damaged_tree_in_the_cache_is_made_again(
    tmp_path: Path, plant: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A tree in the program's own cache that nobody can vouch for gives way, with one warning."""
    monkeypatch.setenv("WELLFED_CACHE", str(tmp_path / "cache"))
    settings = DataConfig(root=None, generate=TINY)
    shapes.open_shapes(settings)
    (marker,) = tmp_path.glob("cache/*/shapes.json")
    expected = contents(marker.parent)
    marker.unlink()
    if plant == "text":
        marker.write_text("{")
    if plant == "folder":
        marker.mkdir()
    for _ in range(2):
        assert len(shapes.open_shapes(settings)[0]) == 7
    assert contents(marker.parent) == expected
    assert [record.levelname for record in caplog.records] == ["WARNING"]
