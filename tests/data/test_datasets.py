"""From settings to samples."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from samples import numbers
from sklearn.datasets import load_digits
from sklearn.utils.class_weight import compute_class_weight

from harness.config import (
    AugmentConfig,
    ConfigError,
    Crop,
    DataCache,
    DataConfig,
    GenerateConfig,
    OptimConfig,
)
from harness.data import datasets, decode
from harness.data.datasets import FakeDataset, ImageDataset, Splits, load
from harness.data.storage import ArraySource
from harness.data.transforms import CropTransform


def filled(images: ImageDataset | FakeDataset, epoch: int, index: int) -> np.ndarray:
    assert isinstance(images, ImageDataset)
    out = np.empty((3, images.image_size, images.image_size), np.uint8)
    images.fill(epoch, index, out)
    return out


def tree(root: Path, per_class: int = 5) -> Path:
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in range(per_class):
                Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(
                    folder / f"{i}.png"
                )
    return root


def test_pillow_decodes_jpeg_without_simplejpeg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pixels stay the same, with the decoded cache too, and one warning tells."""
    for path in tree(tmp_path, per_class=2).rglob("*.png"):
        Image.open(path).resize((300, 260)).save(path.with_suffix(".jpg"), quality=90)
        path.unlink()
    data = DataConfig(name="imagefolder", root=str(tmp_path), image_size=64)
    usual = filled(load(data, AugmentConfig(), 0).train, 0, 1)
    monkeypatch.setattr(decode, "simplejpeg", None)
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    for cache in (DataCache.none, DataCache.ram):
        data.cache = cache
        caplog.clear()
        images = load(data, AugmentConfig(), 0).train
        assert np.array_equal(filled(images, 0, 1), usual)
        assert ["simplejpeg" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("name", ["imagefolder", "imagenet"])
def test_a_folder_is_loaded(tmp_path: Path, name: str) -> None:
    """A tree of files gives both sets with their settings."""
    data = DataConfig(name=name, root=str(tree(tmp_path)), image_size=16, max_pixels=600)
    splits = load(data, AugmentConfig(crop=Crop.center, hflip=0.0), 3)
    assert isinstance(splits.train, ImageDataset)
    assert isinstance(splits.val, ImageDataset)
    assert (splits.name, splits.root, splits.classes) == (name, str(tmp_path), ("cat", "dog"))
    assert (len(splits.train), len(splits.val), splits.train.source.classes) == (
        10,
        10,
        ("cat", "dog"),
    )
    assert splits.train.source.labels.tolist() == [0] * 5 + [1] * 5
    assert splits.val.source.where(9).endswith("val/dog/4.png")
    assert (splits.train.seed, splits.train.image_size, splits.train.options.max_pixels) == (
        3,
        16,
        600,
    )
    assert filled(splits.train, 0, 0).std() > 0


def test_one_tree_is_split_the_same_for_every_seed(tmp_path: Path) -> None:
    """The run's seed does not move images between training and validation."""
    root = tree(tmp_path) / "train"
    parts = []
    for seed in (0, 1):
        val = load(
            DataConfig(name="imagefolder", root=str(root), split_fraction=0.4),
            AugmentConfig(),
            seed,
        ).val
        assert isinstance(val, ImageDataset)
        parts.append([val.source.where(i) for i in range(len(val))])
    assert parts[0] == parts[1]
    assert len(parts[0]) == 4


def test_digits() -> None:
    """Those of scikit-learn, each once, every class in both, full contrast, gray."""
    splits = load(
        DataConfig(name="digits", image_size=32, eval_resize=32),
        AugmentConfig(crop=Crop.pad, hflip=0.0),
        0,
    )
    assert isinstance(splits.train, ImageDataset)
    assert isinstance(splits.val, ImageDataset)
    assert splits.classes == tuple("0123456789")
    assert len(splits.train) + len(splits.val) == 1797
    train, val = (
        [np.asarray(part.source.read(i)[0]) for i in range(len(part))]
        for part in (splits.train, splits.val)
    )
    assert not {image.tobytes() for image in train} & {image.tobytes() for image in val}
    assert {(image.shape, image.dtype.name, image.min()) for image in train} == {
        ((8, 8, 3), "uint8", 0)
    }
    assert np.max(train) == 255
    theirs = np.rint(load_digits().images * (255 / 16)).astype(np.uint8)
    assert sorted(image[..., 0].tobytes() for image in train + val) == sorted(
        image.tobytes() for image in theirs
    )
    assert (
        np.abs(
            np.bincount(splits.val.source.labels) / np.bincount(splits.train.source.labels) - 0.25
        ).max()
        < 0.01
    )
    pixels = filled(splits.val, 0, 0)
    assert pixels.max() > 200
    assert (pixels == pixels[0]).all()


def test_fake_is_numbers_alone() -> None:
    """The fake data set makes nothing: it is a length, a size and a count of classes."""
    generate = GenerateConfig(classes=4, train_images=20, val_images=8)
    splits = load(DataConfig(name="fake", image_size=40, generate=generate), AugmentConfig(), 0)
    assert (splits.train, splits.val) == (FakeDataset(20, 40), FakeDataset(8, 40))
    assert (len(splits.train), splits.classes) == (20, ("0", "1", "2", "3"))


def test_a_new_data_set_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function entered under a name is loaded by it, with whatever settings it has."""
    monkeypatch.setitem(datasets.DATASETS, "numbers", lambda data: (numbers(), numbers(3)))
    splits = load(DataConfig(name="numbers", root="/somewhere", image_size=8), AugmentConfig(), 0)
    assert (len(splits.train), len(splits.val), splits.classes) == (6, 3, ("a", "b", "c"))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"name": "zzz"}, r"data\.name=zzz: .* choose from shapes, .*fake$"),
        (
            {"name": "imagefolder"},
            r"data\.root .*, for example data\.root=/data/imagefolder",
        ),
        ({"name": "imagenet"}, r"data\.root .*, for example data\.root=/data/imagenet"),
        (
            {"name": "cifar10", "split_fraction": 0.1},
            r"data\.split_fraction=0\.1 has no effect with data=cifar10",
        ),
        (
            {"name": "cifar100", "generate": GenerateConfig(classes=3)},
            r"data\.generate=.* has no effect with data=cifar100",
        ),
        ({"name": "cifar10", "max_pixels": 9}, r"data\.max_pixels=9 has no effect"),
        (
            {"name": "imagefolder", "mirror": "http://x"},
            r"data\.mirror=http://x has no effect with data=imagefolder",
        ),
        ({"name": "imagenet", "md5": "0"}, r"data\.md5=0 has no effect"),
        (
            {"name": "shapes", "split_fraction": 0.1},
            r"data\.split_fraction=0\.1 has no effect with data=shapes",
        ),
        ({"name": "digits", "root": "/x"}, r"data\.root=/x has no effect with data=digits"),
        (
            {"name": "fake", "exif_orientation": True},
            r"data\.exif_orientation=True has no effect with data=fake",
        ),
        ({"name": "fake", "root": "/x"}, r"data\.root=/x has no effect with data=fake"),
    ],
    ids=lambda value: " ".join(map(str, value.values()))[:30] if isinstance(value, dict) else "",
)
def test_settings_that_cannot_be_used_are_refused(settings: dict[str, Any], text: str) -> None:
    """An unknown name, a missing root and a setting without effect are named with the way out."""
    with pytest.raises(ConfigError, match=text):
        load(DataConfig(**settings), AugmentConfig(), 0)


def test_balanced_weights_are_scikit_learns() -> None:
    """By the training images; a class without any counts for nothing."""
    labels = np.repeat([0, 2, 3], [60, 30, 5])
    transform = CropTransform(8)
    images = ImageDataset(
        ArraySource(np.zeros((95, 8, 8, 3), np.uint8), labels, "abcd", "x"),
        transform,
        DataConfig(),
        8,
        seed=0,
    )
    splits = Splits(images, images, tuple("abcd"), "x", "")
    found = splits.class_weights(OptimConfig(class_weights="balanced"))
    assert found is not None
    expected = compute_class_weight("balanced", classes=np.array([0, 2, 3]), y=labels)
    assert [found[0], *found[2:]] == pytest.approx(expected)
    assert splits.class_weights(OptimConfig()) is None
    assert splits.class_weights(OptimConfig(class_weights=(1, 2, 3, 4))) == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match=r"optim\.class_weights\b.* 3 .* 4 classes"):
        splits.class_weights(OptimConfig(class_weights=(1, 2, 3)))
