"""An ImageFolder with this project's decoding: the same draws, nearly the same pixels."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as T
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from harness.hooks.faster import faster, trial

NORMALIZE = T.Normalize((0.5, 0.4, 0.3), (0.2, 0.2, 0.2))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photograph-like JPEGs of several sizes, one grey, and a PNG."""
    place = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for number, (width, height) in enumerate([(160, 120), (90, 200), (64, 64), (300, 70)]):
        noise = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
        image = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
        folder = place / f"class_{number % 2}"
        folder.mkdir(exist_ok=True)
        image.save(folder / f"{number}.jpg", quality=90)
        image.convert("L").save(folder / f"grey_{number}.jpg", quality=90)
        image.save(folder / f"{number}.png")
    return place


@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(
            T.Compose([T.RandomResizedCrop(48), T.RandomHorizontalFlip(), T.ToTensor(), NORMALIZE]),
            id="training",
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
    """After each sample the generator is where it was; pixels differ by under a grey level."""
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
        scale = 255 * (0.2 if NORMALIZE in transform.transforms else 1.0)
        assert scale * float((one - other).abs().mean()) < 1.0


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
    with pytest.raises(ValueError, match="with its own loader"):
        faster(ImageFolder(str(root), transform, loader=Image.open))


def test_a_trial_draws_nothing(root: Path) -> None:
    """The generator is as it was; a data set that cannot be served has no trial."""
    transform = T.Compose([T.RandomResizedCrop(48), T.ToTensor()])
    state = torch.get_rng_state()
    found = trial(ImageFolder(str(root), transform))
    assert torch.equal(torch.get_rng_state(), state)
    assert found and found.share > 0 and found.difference < 1.0
    assert found.steps == ("RandomResizedCrop",)
    assert trial(ImageFolder(str(root), T.ToTensor())) is None
