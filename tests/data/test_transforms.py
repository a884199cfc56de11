"""Geometry against torchvision's, pixel for pixel and in distribution."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pictures import NAMES, noise, photograph
from PIL import Image

pytest.importorskip("scipy", reason="needs scipy (uv sync --group dev)")
from samples import eval_transform
from scipy.stats import binomtest, ks_2samp
from torchvision import transforms as tv
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tvf

from harness.config import AugmentConfig, Crop, DataConfig, Interpolation
from harness.data.datasets import as_evaluated
from harness.data.transforms import CropTransform
from harness.runtime.seeding import SampleRng, uniforms

SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
SIZES = [(96, 64), (64, 96), (500, 375), (33, 257), (32, 32), (7, 5), (1, 1)]


def planes(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image).permute(2, 0, 1)


def applied(transform: CropTransform, image: np.ndarray, seed: int = 0) -> np.ndarray:
    batch = np.full((2, transform.size, transform.size, 3), 77, np.uint8).transpose(0, 3, 1, 2)
    before = image.copy()
    transform(image, SampleRng(seed, 0, 0), batch[0])
    assert (batch[1] == 77).all()
    assert np.array_equal(image, before)
    return batch[0]


def boxes(
    width: int, height: int, scale: Any, ratio: Any, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Left, top, width and height of ``count`` boxes: ours, and torchvision's."""
    rng = SampleRng(1, 0, 0)
    transform = CropTransform(1, scale=scale, ratio=ratio)
    ours = [transform.part(rng, width, height) for _ in range(count)]
    image = torch.empty(3, height, width)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        theirs = [
            tv.RandomResizedCrop.get_params(image, list(scale), list(ratio)) for _ in range(count)
        ]
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
def test_crop_boxes_have_torchvisions_distribution(
    width: int, height: int, scale: Any, ratio: Any
) -> None:
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


@pytest.mark.parametrize(
    ("width", "height", "box"),
    [(1000, 11, (492, 0, 15, 11)), (11, 1000, (0, 492, 11, 15)), (1, 1, (0, 0, 1, 1))],
)
def test_narrow_images_give_their_center(
    width: int, height: int, box: tuple[int, int, int, int]
) -> None:
    """If no try fits, the largest allowed central part is taken, as by torchvision."""
    theirs = tv.RandomResizedCrop.get_params(
        torch.empty(3, height, width), list(SCALE), list(RATIO)
    )
    assert CropTransform(1).part(SampleRng(0, 0, 0), width, height) == box
    assert (theirs[1], theirs[0], theirs[3], theirs[2]) == box


def test_a_box_is_never_empty() -> None:
    """An extreme ratio on a single pixel still leaves one pixel."""
    for ratio in ((3.0, 4.0), (0.2, 0.3)):
        transform = CropTransform(1, scale=(1.0, 1.0), ratio=ratio)
        assert transform.part(SampleRng(0, 0, 0), 1, 1) == (0, 0, 1, 1)


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("vflip", [0.0, 1.0])
@pytest.mark.parametrize("hflip", [0.0, 1.0])
def test_random_resized_pixels_are_torchvisions(
    width: int, height: int, hflip: float, vflip: float
) -> None:
    """For equal boxes, pixels are those of resized_crop, hflip and vflip, bit for bit."""
    image = noise(width, height)
    for seed in range(5):
        left, top, w, h = CropTransform(1).part(SampleRng(seed, 0, 0), width, height)
        expected = tvf.resized_crop(
            planes(image), top, left, h, w, [48, 48], tv.InterpolationMode.BILINEAR, antialias=True
        )
        expected = tvf.hflip(expected) if hflip else expected
        expected = tvf.vflip(expected) if vflip else expected
        assert np.array_equal(
            applied(CropTransform(48, hflip=hflip, vflip=vflip), image, seed), expected.numpy()
        )


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("name", NAMES)
def test_photographs_are_cropped_as_pillow_does(name: str, interpolation: str) -> None:
    """Crops are torchvision's on PIL images but for rounding: 0.05 levels, 1 at most.

    Bicubic ones by more at sharp edges, where the order of the two directions matters.
    """
    image = photograph(name)
    errors = []
    for seed in range(40):
        left, top, w, h = CropTransform(1).part(SampleRng(seed, 0, 0), *image.size)
        expected = tvf.resized_crop(
            image, top, left, h, w, [224, 224], tv.InterpolationMode(interpolation)
        )
        transform = CropTransform(224, hflip=0.0, interpolation=interpolation)
        ours = applied(transform, np.array(image), seed)
        errors.append(np.abs(ours.transpose(1, 2, 0).astype(int) - np.asarray(expected)))
    assert np.mean(errors) <= 0.05 and np.max(errors) <= (1 if interpolation == "bilinear" else 10)


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize(("size", "resize"), [(48, None), (48, 48), (224, 256), (33, 40)])
@pytest.mark.parametrize("hflip", [None, 0.0, 1.0], ids=["eval", "center", "center mirrored"])
def test_center_crops_are_torchvisions(
    width: int, height: int, size: int, resize: int | None, hflip: float | None
) -> None:
    """Evaluation and center crops are Resize and CenterCrop on tensors, bit for bit."""
    image = noise(width, height)
    theirs = v2.Compose([v2.Resize(resize or round(size * 256 / 224)), v2.CenterCrop(size)])(
        planes(image)
    )
    theirs = tvf.hflip(theirs) if hflip else theirs
    ours = (
        eval_transform(size, resize)
        if hflip is None
        else CropTransform(size, "center", hflip=hflip, resize=resize)
    )
    assert np.array_equal(applied(ours, image), theirs.numpy())


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("squash", [False, True], ids=["sides kept", "squashed"])
@pytest.mark.parametrize(("size", "resize"), [(224, 256), (224, 224), (176, 232), (288, 303)])
@pytest.mark.parametrize("name", NAMES)
def test_photographs_are_evaluated_as_with_pillow(
    name: str, size: int, resize: int, squash: bool, interpolation: str
) -> None:
    """As Resize and CenterCrop on PIL images but for rounding: 0.05 levels, 1 at most."""
    image = photograph(name)
    how = tv.InterpolationMode(interpolation)
    expected = v2.Compose(
        [v2.Resize((resize, resize) if squash else resize, how), v2.CenterCrop(size)]
    )(image)
    data = DataConfig(
        image_size=size,
        eval_resize=resize,
        eval_squash=squash,
        interpolation=Interpolation[interpolation],
    )
    ours = applied(as_evaluated(data), np.array(image))
    errors = np.abs(ours.transpose(1, 2, 0).astype(int) - np.asarray(expected))
    assert errors.mean() <= 0.05 and errors.max() <= 1


@pytest.mark.parametrize("crop", list(Crop))
def test_every_crop_resizes_by_the_filter(crop: Crop) -> None:
    """Another filter gives other pixels, of the same places."""
    image = np.array(photograph("china"))
    first, second = (
        applied(CropTransform(64, crop.name, interpolation=name), image, 1).astype(int)
        for name in ("bilinear", "bicubic")
    )
    assert 0 < np.abs(first - second).mean() < 8


@pytest.mark.parametrize("crop", ["center", "eval"])
def test_images_of_the_right_size_stay_as_they_are(crop: str) -> None:
    """Pixels that fit are neither enlarged nor cut in evaluation."""
    image = noise(32, 32)
    transform = eval_transform(32) if crop == "eval" else CropTransform(32, crop=crop, hflip=0.0)
    assert np.array_equal(applied(transform, image), image.transpose(2, 0, 1))


def test_an_explicit_resize_holds_for_images_of_the_right_size_too() -> None:
    """data.eval_resize is never passed over in silence."""
    image = noise(32, 32)
    theirs = v2.Compose([v2.Resize(40), v2.CenterCrop(32)])(planes(image))
    assert np.array_equal(applied(eval_transform(32, 40), image), theirs.numpy())


def test_a_thread_of_an_image_is_refused() -> None:
    """An image a pixel wide is not blown up to gigabytes."""
    with pytest.raises(
        ValueError,
        match="1x10000 pixels .* would be 2560000",
    ):
        applied(eval_transform(224), noise(1, 10000))


@pytest.mark.parametrize("pad", [0, 4])
@pytest.mark.parametrize(
    ("width", "height"), [(16, 16), (40, 48)], ids=["of the size", "other size"]
)
def test_pad_crops_are_windows_of_the_padded_image(pad: int, width: int, height: int) -> None:
    """Every crop is a window of the zero-padded image, mirrored or not, and all windows occur."""
    image = noise(width, height)
    fitted = tvf.resize(planes(image), [16, 16]).permute(1, 2, 0).numpy()
    padded = np.pad(fitted, ((pad, pad), (pad, pad), (0, 0))).transpose(2, 0, 1)
    windows = {}
    for top in range(2 * pad + 1):
        for left in range(2 * pad + 1):
            window = padded[:, top : top + 16, left : left + 16]
            windows[window.tobytes()] = (top, left, False)
            windows[window[:, :, ::-1].tobytes()] = (top, left, True)
    transform = CropTransform(16, crop="pad", pad=pad)
    seen = {windows[applied(transform, image, seed).tobytes()] for seed in range(2000)}
    assert seen == set(windows.values())


@pytest.mark.parametrize("vflip", [0.0, 0.4])
def test_pad_crops_draw_top_left_and_flips(vflip: float) -> None:
    """The first numbers of a sample are top, left, horizontal flip and vertical flip."""
    image = noise(16, 16)
    pad = 3
    padded = np.pad(image, ((pad, pad), (pad, pad), (0, 0))).transpose(2, 0, 1)
    draws = uniforms(5, 6, np.arange(50), 4)
    for index, (top, left) in enumerate((draws[:, :2] * (2 * pad + 1)).astype(int).tolist()):
        window = padded[:, top : top + 16, left : left + 16]
        out = np.empty((3, 16, 16), np.uint8)
        transform = CropTransform(16, crop="pad", pad=pad, hflip=0.3, vflip=vflip)
        transform(image, SampleRng(5, 6, index), out)
        window = window[:, :, ::-1] if draws[index, 2] < 0.3 else window
        assert np.array_equal(out, window[:, ::-1] if draws[index, 3] < vflip else window)


@pytest.mark.parametrize("across", [True, False], ids=["horizontal", "vertical"])
def test_flips_have_torchvisions_rate(across: bool) -> None:
    """Flips happen with the set probability, independent of the crop."""
    image = np.zeros((8, 8, 3), np.uint8)
    if across:
        image[:, :4] = 255
    else:
        image[:4] = 255
    transform = CropTransform(8, crop="center", hflip=0.3 * across, vflip=0.3 * (not across))
    mirrored = [bool(applied(transform, image, seed)[0, 0, 0] == 0) for seed in range(4000)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        flip = tv.RandomHorizontalFlip(0.3) if across else tv.RandomVerticalFlip(0.3)
        picture = Image.fromarray(image)
        theirs = sum(flip(picture).getpixel((0, 0)) == (0, 0, 0) for _ in range(4000))
    assert binomtest(sum(mirrored), 4000, 0.3).pvalue > 0.001
    assert binomtest(theirs, 4000, 0.3).pvalue > 0.001


@pytest.mark.parametrize("crop", list(Crop))
def test_settings_reach_the_transform(crop: Crop) -> None:
    """from_config takes every value over, and the result survives the way into a worker."""
    augment = AugmentConfig(
        crop=crop, scale=(0.2, 0.3), ratio=(0.9, 1.1), pad=2, hflip=0.25, vflip=0.75
    )
    made = CropTransform.from_config(
        augment,
        DataConfig(
            image_size=24, eval_resize=28, eval_squash=True, interpolation=Interpolation.bicubic
        ),
    )
    assert pickle.loads(pickle.dumps(made)) == CropTransform(
        24, crop.name, (0.2, 0.3), (0.9, 1.1), 2, 0.25, 0.75, 28, True, "bicubic"
    )


@pytest.mark.parametrize("size", [(60, 40), (24, 24)], ids=["other size", "of the size"])
@pytest.mark.parametrize("crop", [*Crop, "eval"], ids=str)
def test_laps_are_told_in_order_and_change_nothing(crop: Crop | str, size: tuple[int, int]) -> None:
    """Each transform tells the end of the stages that it names, in order."""
    transform = eval_transform(24) if crop == "eval" else CropTransform(24, crop=Crop(crop).name)
    image = noise(*size)
    told = list[str]()
    out = np.empty((3, 24, 24), np.uint8)
    transform(image, SampleRng(5, 0, 0), out, told.append)
    assert np.array_equal(out, applied(transform, image, 5))
    assert tuple(told) == transform.stages


@pytest.mark.parametrize("crop", [*Crop, "eval"], ids=str)
def test_any_layout_of_the_batch_does(crop: Crop | str) -> None:
    """A batch of planes gets the pixels that one in channels_last gets."""
    transform = eval_transform(24) if crop == "eval" else CropTransform(24, crop=Crop(crop).name)
    for seed in range(4):  # some of them mirrored
        out = np.empty((3, 24, 24), np.uint8)
        transform(noise(60, 40), SampleRng(seed, 0, 0), out)
        assert np.array_equal(out, applied(transform, noise(60, 40), seed))
