"""An ImageFolder with this project's decoding: the same draws, nearly the same pixels."""

from __future__ import annotations

import pickle
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from harness.data.libraries import in_use
from harness.hooks import trial
from harness.hooks.faster import faster, load_image
from harness.hooks.session import offered
from harness.report.evidence import WorkerCost

NORMALIZE = T.Normalize((0.5, 0.4, 0.3), (0.2, 0.2, 0.2))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photograph-like JPEGs of several sizes, one gray, and a PNG."""
    place = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for number, (width, height) in enumerate([(160, 120), (90, 200), (64, 64), (300, 70)]):
        noise = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
        image = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
        folder = place / f"class_{number % 2}"
        folder.mkdir(exist_ok=True)
        image.save(folder / f"{number}.jpg", quality=90)
        image.convert("L").save(folder / f"gray_{number}.jpg", quality=90)
        image.save(folder / f"{number}.png")
    return place


class Preset:
    """As the references of torchvision have their transforms."""

    def __init__(self, *steps: Any) -> None:
        self.transforms = v2.Compose(steps)

    def __call__(self, image: Image.Image) -> Any:
        return self.transforms(image.convert("RGB"))


@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(
            T.Compose([T.RandomResizedCrop(48), T.RandomHorizontalFlip(), T.ToTensor(), NORMALIZE]),
            id="training",
        ),
        pytest.param(
            T.Compose([
                T.Compose([T.RandomResizedCrop(48), T.RandomHorizontalFlip()]), T.ToTensor(),
            ]),
            id="nested",
        ),
        pytest.param(
            Preset(
                v2.RandomResizedCrop(48), v2.RandomHorizontalFlip(), v2.PILToTensor(),
                v2.ToDtype(torch.float32, scale=True), v2.RandomErasing(0.5),
            ),
            id="preset",
        ),
        pytest.param(
            Preset(
                v2.PILToTensor(), v2.Resize(56), v2.CenterCrop(48),
                v2.ToDtype(torch.float32, scale=True),
            ),
            id="preset of tensors",
        ),
        pytest.param(
            T.Compose([T.Resize(56), T.CenterCrop(48), T.ToTensor(), NORMALIZE]), id="evaluation"
        ),
        pytest.param(
            T.Compose([T.Resize(56, T.InterpolationMode.BICUBIC), T.CenterCrop(48), T.ToTensor()]),
            id="bicubic",
        ),
        pytest.param(
            v2.Compose([v2.RandomResizedCrop(48, interpolation="bicubic"), T.ToTensor()]),
            id="bicubic, version 2",
        ),
        pytest.param(
            T.Compose([T.RandomResizedCrop(48), T.ColorJitter(0.4, 0.4, 0.4), T.ToTensor()]),
            id="more random transforms",
        ),
        pytest.param(
            v2.Compose([
                v2.RandomResizedCrop(48), v2.RandomHorizontalFlip(), v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
            ]),
            id="version 2",
        ),
    ],
)  # fmt: skip
def test_draws_stay_and_pixels_nearly(root: Path, transform: Any) -> None:
    """After each sample the generator is where it was; pixels differ by under a gray level."""
    before = ImageFolder(str(root), transform)
    after = pickle.loads(pickle.dumps(faster(before)))
    assert isinstance(after, ImageFolder) and after.classes == before.classes
    for index in range(len(before)):
        torch.manual_seed(index)
        one, label = before[index]
        state = torch.get_rng_state()
        torch.manual_seed(index)
        other, other_label = after[index]
        assert torch.equal(torch.get_rng_state(), state)
        assert (label, one.shape, one.dtype) == (other_label, other.shape, other.dtype)
        normalized = isinstance(transform, T.Compose) and NORMALIZE in transform.transforms
        scale = 255 * (0.2 if normalized else 1.0)
        assert scale * float((one - other).abs().mean()) < 1.0


def test_later_epochs_decode_parts_to_the_same_pixels(tmp_path: Path) -> None:
    """Workers share which JPEGs are intact; a file that was cut since is an error again."""
    if "parts of JPEG" not in in_use():
        pytest.skip("no library decodes parts of a JPEG")
    rng = np.random.default_rng(0)
    (tmp_path / "a").mkdir()
    for number in range(4):
        small = rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((400, 320), Image.Resampling.BICUBIC)
        image.save(tmp_path / "a" / f"{number}.jpg", quality=90)
    transform = T.Compose([T.RandomResizedCrop(48, (0.05, 0.2)), T.ToTensor(), NORMALIZE])
    dataset = faster(ImageFolder(str(tmp_path), transform))

    def drawn() -> list[torch.Tensor]:
        torch.manual_seed(1)
        return [dataset[index][0] for index in range(4)]

    def remembered() -> int:
        return int(np.count_nonzero(np.frombuffer(dataset.transform.seen.file.map, np.uint64)))

    assert remembered() == 0
    loader = DataLoader(dataset, 2, num_workers=2, multiprocessing_context="fork")
    assert sum(len(labels) for _, labels in loader) == 4
    dataset = pickle.loads(pickle.dumps(dataset))
    assert remembered() == 4
    parts = drawn()
    np.frombuffer(dataset.transform.seen.file.map, np.uint64)[:] = 0
    assert all(torch.equal(one, other) for one, other in zip(parts, drawn(), strict=True))
    path = tmp_path / "a" / "0.jpg"
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(OSError, match=re.escape(str(path))):
        drawn()


def test_a_data_set_of_ones_own_takes_the_parts(root: Path) -> None:
    """The loader of images and the transform by themselves."""
    transform = T.Compose([T.Resize(56), T.CenterCrop(48), T.PILToTensor()])
    path = str(next(root.glob("*/0.jpg")))
    one = transform(Image.open(path).convert("RGB")).int()
    other = faster(transform)(load_image(path)).int()
    assert float((one - other).abs().float().mean()) < 1.0


# timm leaves its files open
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("interpolation", ["bilinear", "random"])
def test_timms_data_sets(root: Path, interpolation: str) -> None:
    """``create_loader`` gives them their transform; damaged files are skipped as before."""
    data = pytest.importorskip("timm.data", reason="timm is not installed")
    (root / "class_1" / "9.jpg").write_bytes(b"\xff\xd8 cut")
    try:
        before = data.create_dataset("", root=str(root))
        after = pickle.loads(pickle.dumps(faster(before)))
        for dataset in (before, after):
            dataset.transform = data.create_transform(
                48, is_training=True, interpolation=interpolation, auto_augment="rand-m9-mstd0.5"
            )
        after = pickle.loads(pickle.dumps(after))
        for index in range(len(before)):
            found = []
            for dataset in (before, after):
                torch.manual_seed(index)
                random.seed(index)
                np.random.seed(index)
                found.append((*dataset[index], torch.get_rng_state(), random.getstate()))
            (one, label, *states), (other, other_label, *other_states) = found
            assert torch.equal(states[0], other_states[0]) and states[1] == other_states[1]
            assert label == other_label
            # RandAugment may make a level of difference more
            assert 255 * 0.23 * float((one - other).abs().mean()) < 2.0
    finally:
        (root / "class_1" / "9.jpg").unlink()


def saved(path: Path, kind: str) -> Path:
    """An image of 40 by 30 pixels in a class folder, as ``kind`` says."""
    rgb = np.random.default_rng(1).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    gray = rgb[..., 0]
    clear = np.where(gray > 100, 255, 0).astype(np.uint8)
    more: dict[str, Any] = {}
    image = Image.fromarray(rgb)
    if kind.startswith("palette"):
        image = image.quantize(32)
        more = {"transparency": 0}
    elif kind.startswith("16 bits"):
        image = Image.fromarray(gray.astype(np.uint16) * 257)
    elif kind.startswith("LA"):
        image = Image.merge("LA", [*map(Image.fromarray, (gray, clear))])
    elif "alpha" in kind:
        image.putalpha(Image.fromarray(clear))
        more = {"lossless": True, "exact": True} if kind.endswith("webp") else {}
    elif kind.startswith("CMYK"):
        image = image.convert("CMYK")
    elif kind.startswith("gray"):
        image = Image.fromarray(gray)
    path = path / "a" / f"1.{kind.split()[-1]}"
    path.parent.mkdir()
    image.save(path, **more)
    return path


CUT = T.Compose([T.Resize(24), T.CenterCrop(24)])


@pytest.mark.parametrize(
    "kind",
    ["RGB jpg", "gray jpg", "CMYK jpg", "RGB png", "alpha png", "LA png", "palette png",
     "16 bits png", "alpha webp", "RGB bmp"],
)  # fmt: skip
def test_pixels_are_those_of_the_loader_it_replaces(tmp_path: Path, kind: str) -> None:
    """Each kind of image is decoded to exactly the pixels that torchvision has."""
    path = str(saved(tmp_path, kind))
    plain = ImageFolder(str(tmp_path), CUT)
    assert np.array_equal(faster(plain).loader(path), np.asarray(plain.loader(path)))


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("kind", ["RGB jpg", "RGB png"])
def test_a_truncated_file_is_read_as_pillow_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, lenient: bool
) -> None:
    """It is an error that names the file, or the pixels of torchvision with
    ``LOAD_TRUNCATED_IMAGES``.
    """
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", lenient)
    path = saved(tmp_path, kind)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    plain = ImageFolder(str(tmp_path), CUT)
    if lenient:
        assert np.array_equal(faster(plain).loader(str(path)), np.asarray(plain.loader(str(path))))
    else:
        with pytest.raises(OSError, match=re.escape(str(path))):
            faster(plain)[0]


def test_pillows_limit_of_pixels_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image is read up to the size at which Pillow refuses it, which is then an error."""
    saved(tmp_path, "RGB jpg")
    plain = ImageFolder(str(tmp_path), CUT)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40 * 30 // 2 - 1)
    with pytest.raises(Image.DecompressionBombError, match=re.escape(str(tmp_path))):
        faster(plain)[0]


def test_an_image_of_60_million_pixels_is_read(tmp_path: Path) -> None:
    """A size that torchvision reads, this reads too."""
    (tmp_path / "a").mkdir()
    Image.new("L", (10_000, 6_000), 128).save(tmp_path / "a" / "1.jpg")
    assert np.array_equal(
        np.asarray(faster(ImageFolder(str(tmp_path), CUT))[0][0]), np.full((24, 24, 3), 128)
    )


@pytest.mark.parametrize(
    "transform",
    [
        None,
        T.ToTensor(),
        T.Compose([T.ToTensor(), T.RandomResizedCrop(48)]),
        T.Compose([T.RandomResizedCrop((48, 64)), T.ToTensor()]),
        T.Compose([T.RandomResizedCrop(48, interpolation=T.InterpolationMode.LANCZOS)]),
        T.Compose([T.Resize((56, 56)), T.CenterCrop(48)]),
        T.Compose([T.Resize(40), T.CenterCrop(48)]),
        T.Compose([T.Resize(56)]),
    ],
)
def test_other_transforms_are_refused(root: Path, transform: Any) -> None:
    """What would become other pixels is named."""
    with pytest.raises(ValueError, match="does not begin with RandomResizedCrop, or Resize and"):
        faster(ImageFolder(str(root), transform))


def test_a_loader_of_ones_own_is_refused(root: Path) -> None:
    """Who opens images otherwise wants that."""
    transform = T.Compose([T.RandomResizedCrop(48), T.ToTensor()])
    with pytest.raises(ValueError, match="with its default loader"):
        faster(ImageFolder(str(root), transform, loader=Image.open))


def test_it_is_offered_where_it_serves(root: Path) -> None:
    """A data set with other transforms, or one that has it already, gets no such line.

    One's own gets its two lines if decoding takes time.
    """
    transform = T.Compose([T.RandomResizedCrop(48), T.ToTensor()])
    plain = ImageFolder(str(root), transform)
    own = SimpleNamespace(paths=[], transform=transform)
    slow, quick = (
        WorkerCost(1.0, 1.0, 1.0, 1.0, {"decode": part}, "decode", "decode", False)
        for part in (0.5, 0.01)
    )
    for dataset, cost, begin in (
        (plain, quick, trial.FASTER), (faster(plain), slow, ""), (None, slow, ""),
        (ImageFolder(str(root), T.ToTensor()), slow, ""), (own, quick, ""), (own, None, ""),
        (SimpleNamespace(transform=faster(transform)), slow, ""),
        (own, slow, "self.transform = wellfed.faster(self.transform), "),
    ):  # fmt: skip
        lines = offered(dataset, cost)
        assert len(lines) == bool(begin) and all(line.startswith(begin) for line in lines)
