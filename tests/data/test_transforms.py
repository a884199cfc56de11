"""Geometry against torchvision's, pixel for pixel and in distribution."""

import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import binomtest, ks_2samp
from torchvision import transforms as tv
from torchvision.transforms import functional as tvf

from harness.config import AugmentConfig, Crop
from harness.data.transforms import EvalTransform, TrainTransform, random_crop_box

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
SIZES = [(96, 64), (64, 96), (500, 375), (33, 257), (32, 32), (7, 5), (1, 1)]


def photo(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8))


def planes(image: Image.Image) -> np.ndarray:
    return np.stack([np.asarray(band) for band in image.split()])


def applied(transform: TrainTransform | EvalTransform, image: Image.Image | np.ndarray, seed: int = 0) -> np.ndarray:
    out, guard = np.full((2, 3, transform.size, transform.size), 77, np.uint8)
    transform(image, random.Random(seed), out)
    assert (guard == 77).all()
    return np.asarray(out)


def boxes(width: int, height: int, scale: Any, ratio: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Left, top, width and height of ``count`` boxes: ours, and torchvision's."""
    rng = random.Random(1)
    ours = [random_crop_box(rng, width, height, scale, ratio) for _ in range(count)]
    image = torch.empty(3, height, width)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        theirs = [tv.RandomResizedCrop.get_params(image, list(scale), list(ratio)) for _ in range(count)]
    return np.array(ours), np.array(theirs)[:, [1, 0, 3, 2]]


@pytest.mark.parametrize(
    ("width", "height", "scale", "ratio"),
    [
        (500, 375, SCALE, RATIO),
        (375, 500, (0.3, 0.9), (0.5, 2.0)),
        (375, 500, (0.1, 0.2), (0.5, 2.0)),
        (400, 100, SCALE, RATIO),
    ],
    ids=["landscape", "portrait", "small", "fallback"],
)
def test_crop_boxes_have_torchvisions_distribution(width: int, height: int, scale: Any, ratio: Any) -> None:
    """Area, aspect ratio, left and top of the boxes cannot be told from torchvision's."""
    ours, theirs = boxes(width, height, scale, ratio, 8000)
    measures: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "area": lambda b: b[:, 2] * b[:, 3],
        "aspect": lambda b: b[:, 2] / b[:, 3],
        "left": lambda b: b[:, 0],
        "top": lambda b: b[:, 1],
        "left share": lambda b: b[:, 0] / np.maximum(1, width - b[:, 2]),
    }
    for name, value in measures.items():
        assert ks_2samp(value(ours), value(theirs)).pvalue > 0.001, name


def test_the_distribution_test_has_power() -> None:
    """The same test tells a slightly smaller scale and a uniform instead of a log-uniform ratio apart."""
    ours, _ = boxes(375, 500, (0.3, 0.9), (0.5, 2.0), 8000)
    _, other_scale = boxes(375, 500, (0.34, 0.9), (0.5, 2.0), 8000)
    assert ks_2samp(ours[:, 2] * ours[:, 3], other_scale[:, 2] * other_scale[:, 3]).pvalue < 1e-4
    small, _ = boxes(375, 500, (0.1, 0.2), (0.5, 2.0), 8000)
    uniform_ratio = np.random.default_rng(0).uniform(0.5, 2.0, 8000)
    assert ks_2samp(small[:, 2] / small[:, 3], uniform_ratio).pvalue < 1e-4


@pytest.mark.parametrize(
    ("width", "height", "box"), [(1000, 11, (492, 0, 15, 11)), (11, 1000, (0, 492, 11, 15)), (1, 1, (0, 0, 1, 1))]
)
def test_narrow_images_give_their_centre(width: int, height: int, box: tuple[int, int, int, int]) -> None:
    """Where no try fits, the largest central part of an allowed ratio is taken, as torchvision does."""
    theirs = tv.RandomResizedCrop.get_params(torch.empty(3, height, width), list(SCALE), list(RATIO))
    assert random_crop_box(random.Random(0), width, height, SCALE, RATIO) == box
    assert (theirs[1], theirs[0], theirs[3], theirs[2]) == box


def test_a_box_may_lie_anywhere() -> None:
    """Every position occurs, those at all four edges among them."""
    rng = random.Random(0)
    seen = {random_crop_box(rng, 4, 3, (1 / 3, 1 / 3), (1.0, 1.0)) for _ in range(200)}
    assert seen == {(left, top, 2, 2) for left in range(3) for top in range(2)}


def test_a_box_is_never_empty() -> None:
    """An extreme ratio on a single pixel still leaves one pixel."""
    assert random_crop_box(random.Random(0), 1, 1, (1.0, 1.0), (3.0, 4.0)) == (0, 0, 1, 1)
    assert random_crop_box(random.Random(0), 1, 1, (1.0, 1.0), (0.2, 0.3)) == (0, 0, 1, 1)


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("hflip", [0.0, 1.0])
def test_random_resized_pixels_are_torchvisions(width: int, height: int, hflip: float) -> None:
    """For the same box, the pixels equal torchvision's resized_crop and hflip on PIL images bit for bit."""
    image = photo(width, height)
    for seed in range(5):
        left, top, w, h = random_crop_box(random.Random(seed), width, height, SCALE, RATIO)
        expected = tvf.resized_crop(image, top, left, h, w, [48, 48], tv.InterpolationMode.BILINEAR)
        expected = tvf.hflip(expected) if hflip else expected
        assert np.array_equal(applied(TrainTransform(48, hflip=hflip), image, seed), planes(expected))


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize(("size", "resize"), [(48, None), (48, 48), (224, 256), (33, 40)])
def test_eval_pixels_are_torchvisions(width: int, height: int, size: int, resize: int | None) -> None:
    """The pixels equal torchvision's Resize and CenterCrop on PIL images bit for bit."""
    image = photo(width, height)
    theirs = tv.Compose([tv.Resize(resize or round(size * 256 / 224)), tv.CenterCrop(size)])
    assert np.array_equal(applied(EvalTransform(size, resize), image), planes(theirs(image)))


@pytest.mark.parametrize("crop", ["center", "eval"])
def test_arrays_of_the_right_size_stay_as_they_are(crop: str) -> None:
    """Pixels that fit are neither enlarged nor cut in evaluation."""
    image = np.asarray(photo(32, 32))
    transform = EvalTransform(32) if crop == "eval" else TrainTransform(32, crop=crop, hflip=0.0)
    assert np.array_equal(applied(transform, image), image.transpose(2, 0, 1))


def test_an_explicit_resize_holds_for_arrays_too() -> None:
    """data.eval_resize is never passed over in silence."""
    image = photo(32, 32)
    assert np.array_equal(applied(EvalTransform(32, 40), np.asarray(image)), applied(EvalTransform(32, 40), image))


def test_a_thread_of_an_image_is_refused() -> None:
    """An image a pixel wide is not blown up to gigabytes."""
    with pytest.raises(ValueError, match="1x10000 pixels are too narrow: resized, the longer side would have 2560000"):
        applied(EvalTransform(224), photo(1, 10000))


@pytest.mark.parametrize("pad", [0, 4])
@pytest.mark.parametrize("kind", ["array", "image", "other size"])
def test_pad_crops_are_windows_of_the_padded_image(pad: int, kind: str) -> None:
    """Every crop is a window of the zero-padded image, mirrored or not, and all windows occur."""
    image = photo(40, 48) if kind == "other size" else photo(16, 16)
    fitted = np.asarray(tvf.resize(image, [16, 16]))
    padded = np.pad(fitted, ((pad, pad), (pad, pad), (0, 0))).transpose(2, 0, 1)
    windows = {}
    for top in range(2 * pad + 1):
        for left in range(2 * pad + 1):
            window = padded[:, top : top + 16, left : left + 16]
            windows[window.tobytes()] = (top, left, False)
            windows[window[:, :, ::-1].tobytes()] = (top, left, True)
    transform = TrainTransform(16, crop="pad", pad=pad)
    given = np.asarray(image) if kind == "array" else image
    seen = {windows[applied(transform, given, seed).tobytes()] for seed in range(2000)}
    assert seen == set(windows.values())


def test_flips_have_torchvisions_rate() -> None:
    """Mirroring happens with the set probability, independent of the crop."""
    image = np.zeros((8, 8, 3), np.uint8)
    image[:, :4] = 255
    transform = TrainTransform(8, crop="center", hflip=0.3)
    mirrored = [bool(applied(transform, image, seed)[0, 0, 0] == 0) for seed in range(4000)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        flip, picture = tv.RandomHorizontalFlip(0.3), Image.fromarray(image)
        theirs = sum(flip(picture).getpixel((0, 0)) == (0, 0, 0) for _ in range(4000))
    assert binomtest(sum(mirrored), 4000, 0.3).pvalue > 0.001
    assert binomtest(theirs, 4000, 0.3).pvalue > 0.001


def test_flips_do_not_depend_on_the_box() -> None:
    """Boxes of mirrored and of other samples have one distribution."""
    mirrored: list[tuple[int, ...]] = []
    others: list[tuple[int, ...]] = []
    for seed in range(6000):
        rng = random.Random(seed)
        box = random_crop_box(rng, 500, 375, SCALE, RATIO)
        (mirrored if rng.random() < 0.5 else others).append(box)
    for column in range(4):
        assert ks_2samp(np.array(mirrored)[:, column], np.array(others)[:, column]).pvalue > 0.001


@pytest.mark.parametrize("crop", list(Crop))
def test_settings_reach_the_transform(crop: Crop) -> None:
    """from_config takes every value over, and the result survives the way into a worker."""
    augment = AugmentConfig(crop=crop, scale=(0.2, 0.3), ratio=(0.9, 1.1), pad=2, hflip=0.25)
    transform = pickle.loads(pickle.dumps(TrainTransform.from_config(augment, 24, 28)))
    assert transform == TrainTransform(24, crop.name, (0.2, 0.3), (0.9, 1.1), 2, 0.25, 28)


@pytest.mark.parametrize("crop", list(Crop))
def test_equal_seeds_give_equal_pixels(crop: Crop) -> None:
    """The generator alone decides; Python's and torch's own are neither read nor moved."""
    transform = TrainTransform(24, crop=crop.name)
    image, before = photo(60, 40), (random.getstate(), torch.get_rng_state())
    first = applied(transform, image, 5)
    random.random()
    assert np.array_equal(first, applied(transform, image, 5))
    random.setstate(before[0])
    assert torch.equal(before[1], torch.get_rng_state())


@pytest.mark.parametrize("kind", ["image", "array", "array of the size"])
@pytest.mark.parametrize("crop", [*Crop, "eval"], ids=str)
def test_laps_are_told_in_order_and_change_nothing(crop: Crop | str, kind: str) -> None:
    """Each transform tells the end of the stages that it names, in order; an array of the right size does without some."""
    transform = EvalTransform(24) if crop == "eval" else TrainTransform(24, crop=Crop(crop).name)
    image = photo(24, 24) if kind == "array of the size" else photo(60, 40)
    pixels = image if kind == "image" else np.asarray(image)
    told: list[str] = []
    out = np.empty((3, 24, 24), np.uint8)
    transform(pixels, random.Random(5), out, told.append)
    assert np.array_equal(out, applied(transform, pixels, 5))
    assert told == [stage for stage in transform.stages if stage in told]
    assert {"write"} <= set(told) and set(transform.stages) - set(told) <= ({"resize", "crop"} if "size" in kind else set())


def test_a_decoded_file_is_not_changed() -> None:
    """Transforming a lazily opened image leaves it whole for another use."""
    buffer = io.BytesIO()
    photo(60, 40).save(buffer, "PNG")
    image = Image.open(buffer)
    assert np.array_equal(applied(TrainTransform(24), image, 3), applied(TrainTransform(24), image, 3))
