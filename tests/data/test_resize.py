"""The one resize, against torch's, torchvision's and Pillow's."""

import os
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pictures import noise
from PIL import Image

from harness.data.transforms import Box, resize_into, resized

SIDE = 48
FILTERS = ("bilinear", "bicubic")


def row(side: int = SIDE) -> np.ndarray:
    """A row of a channels_last batch."""
    return np.full((side, side, 3), 77, np.uint8).transpose(2, 0, 1)


def written(
    pixels: np.ndarray,
    box: Box,
    flip: bool = False,
    size: tuple[int, int] | None = None,
    interpolation: str = "bilinear",
) -> np.ndarray:
    out = row()
    resize_into(pixels, box, out, flip, size, interpolation)
    return out


def torchs(part: np.ndarray, width: int, height: int, interpolation: str) -> np.ndarray:
    """By torch's public function, in planes; of fractions exactly."""
    planes = torch.from_numpy(part.transpose(2, 0, 1).copy()).unsqueeze(0)
    result: np.ndarray = F.interpolate(planes, (height, width), mode=interpolation, antialias=True)[
        0
    ].numpy()
    return result


@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize("size", [(1000, 2, 256), (5, 5, 9), (60, 1, 20)], ids=str)
def test_a_width_of_one_pixel(size: tuple[int, int, int], interpolation: str) -> None:
    """An image as narrow as that is Pillow's; torch's kernels for floats are wrong there."""
    height, width, wanted = size
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    pillows = Image.Resampling[interpolation.upper()]
    expected = np.asarray(Image.fromarray(pixels).resize((1, wanted), pillows))
    found = resized(pixels, 1, wanted, interpolation)
    assert np.abs(found.astype(int) - expected.astype(int)).max() <= 1


BOXES = [
    (0, 0, 90, 70), (3, 5, 80, 60), (10, 0, 48, 70), (10, 20, 30, 20), (40, 30, 1, 1),
    (0, 0, 90, 1), (89, 0, 1, 70), (9, 9, 48, 48),
]  # fmt: skip


@pytest.mark.parametrize("flip", [False, True], ids=["as it is", "mirrored"])
@pytest.mark.parametrize("box", BOXES, ids=str)
@pytest.mark.parametrize("interpolation", FILTERS)
def test_the_box_is_resized_and_mirrored(box: Box, flip: bool, interpolation: str) -> None:
    """Pixels are those of torch's antialiased interpolation of the box alone, mirrored after it."""
    pixels, (left, top, width, height) = noise(90, 70), box
    expected = torchs(pixels[top : top + height, left : left + width], SIDE, SIDE, interpolation)
    found = written(pixels, box, flip, interpolation=interpolation)
    assert np.array_equal(found, expected[:, :, ::-1] if flip else expected)


@pytest.mark.parametrize("flip", [False, True], ids=["as it is", "mirrored"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: np.full((2, 3, SIDE, SIDE), 77, np.uint8)[0],
        lambda: np.full((SIDE, SIDE, 2, 3), 77, np.uint8)[:, :, 0].transpose(2, 0, 1),
        lambda: np.full((3, 2 * SIDE, SIDE), 77, np.uint8)[:, ::-2],
    ],
    ids=["planes", "gaps between pixels", "rows backwards"],
)
def test_any_strides_do(make: Callable[[], np.ndarray], flip: bool) -> None:
    """Whatever the layout of the batch, the same pixels come there, and nothing else is touched."""
    out = make()
    pixels = noise(90, 70)
    assert out.base is not None
    others = int((out.base == 77).sum()) - out.size
    for box, size in ((BOXES[1], None), (BOXES[0], (SIDE, 60)), (BOXES[-1], None)):
        resize_into(pixels, box, out, flip, size)
        assert np.array_equal(out, written(pixels, box, flip, size))
    out[...] = 0
    assert int((out.base == 77).sum()) == others


def test_the_filter_stays_in_the_box() -> None:
    """Pixels outside of the box have no part in the result."""
    box = (10, 20, 60, 40)
    pixels = noise(90, 70)
    other = 255 - pixels
    other[20:60, 10:70] = pixels[20:60, 10:70]
    assert np.array_equal(written(pixels, box), written(other, box))


@pytest.mark.parametrize("box", [BOXES[0], BOXES[1]], ids=["whole", "part"])
def test_read_only_pixels_serve(box: Box) -> None:
    """What may only be read, as pixels in a cache, is resized as it is, without a warning."""
    pixels = noise(90, 70)
    expected = written(pixels.copy(), box)
    pixels.flags.writeable = False
    assert np.array_equal(written(pixels, box), expected)


def test_pixels_of_the_size_are_returned_as_they_are() -> None:
    """Nothing is copied where nothing changes."""
    pixels = noise(30, 20)
    assert resized(pixels, 30, 20) is pixels
    assert resized(pixels, 20, 30).shape == (30, 20, 3)


def threads_begun(act: Callable[[], object]) -> set[str]:
    """The threads that are there after a new one called ``act``, and were not there before."""
    seen = []

    def run() -> None:
        seen.append(set(os.listdir("/proc/self/task")))
        act()
        seen.append(set(os.listdir("/proc/self/task")))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return seen[1] - seen[0]


def test_no_team_of_threads_begins() -> None:
    """Resizing, cropping and mirroring keep to the calling thread."""
    large = noise(1000, 800)
    out = row(512)
    if not threads_begun(lambda: torch.flip(torch.from_numpy(large), (1,))):
        pytest.skip("torch has one thread here, or keeps to one")

    def act() -> None:
        for flip in (False, True):
            resize_into(large, (0, 0, 1000, 800), out, flip)
            resize_into(large, (0, 0, 1000, 800), out, flip, interpolation="bicubic")
            resize_into(large, (1, 1, 900, 700), out, flip)
            resize_into(large, (1, 1, 512, 512), out, flip)
            resize_into(large, (0, 0, 1000, 800), out, flip, (640, 512))

    assert not threads_begun(act)
