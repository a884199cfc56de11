"""Erasing and mixing of normalized batches: torchvision's pixels, labels and draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pictures import numbered

pytest.importorskip("scipy", reason="needs scipy (uv sync --group dev)")
from scipy.stats import beta, binomtest, ks_1samp, ks_2samp
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from harness.config import AugmentConfig
from harness.data.augment import Mix, erased_boxes

CLASSES = 7
BOTH = AugmentConfig(mixup=0.4, cutmix=1.0)


@pytest.fixture(autouse=True)
def _seeded(one_thread: None) -> None:
    torch.manual_seed(0)


def made(config: AugmentConfig, seed: int = 0) -> Mix:
    """What ``config`` asks for, which is something."""
    found = Mix.from_config(config, CLASSES, seed)
    assert found is not None
    return found


def normalized(
    count: int, height: int = 12, width: int = 16, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Noise without a zero in it, and labels."""
    images = torch.rand(count, 3, height, width) + 0.5
    return images.to(dtype, memory_format=torch.channels_last), torch.randint(CLASSES, (count,))


def noted(config: AugmentConfig, batches: int) -> list[tuple[str, float]]:
    """The mixer and its drawn share in each of so many batches of one epoch."""
    mixing = made(config)
    return [mixing.choose(numbered(torch.tensor([2 * k, 2 * k + 1])))[:2] for k in range(batches)]


def test_nothing_wanted_is_nothing_done() -> None:
    """The default augmentation mixes nothing."""
    assert Mix.from_config(AugmentConfig(), CLASSES, 0) is None


def test_erased_is_zero_where_torchvision_erases() -> None:
    """An image loses one rectangle, to 0 as with torchvision's erase; labels stay."""
    images, labels = normalized(30)
    erased, same = made(AugmentConfig(random_erasing=1.0))(
        images, labels, numbered(torch.arange(30))
    )
    zero = torch.zeros(3, 1, 1)
    for image, result in zip(images, erased, strict=True):
        rows, columns = ((result == 0).all(dim=0).any(dim=k).nonzero() for k in (1, 0))
        i = int(rows.min())
        j = int(columns.min())
        h = int(rows.max()) + 1 - i
        w = int(columns.max()) + 1 - j
        assert torch.equal(result, functional.erase(image, i, j, h, w, zero))
    assert same is labels


USUAL = AugmentConfig()
# 8x8 of 32x32 pixels, as Cutout
SQUARE = AugmentConfig(erasing_scale=(1 / 16, 1 / 16), erasing_ratio=(1.0, 1.0))


@pytest.mark.parametrize(
    ("height", "width", "augment"),
    [(64, 64, USUAL), (32, 96, USUAL), (8, 8, USUAL), (32, 32, SQUARE)],
    ids=["square", "wide", "small", "cutout"],
)
def test_rectangles_have_torchvisions_distribution(
    height: int, width: int, augment: AugmentConfig
) -> None:
    """Height, width, top and left of the rectangles cannot be told from v2.RandomErasing's."""
    ours = erased_boxes(np.random.default_rng(0).random((2500, 40)), height, width, augment)
    theirs = v2.RandomErasing(1.0, augment.erasing_scale, augment.erasing_ratio)
    image = torch.empty(3, height, width)
    params = [theirs.make_params([image]) for _ in range(2500)]
    measured = {
        "h": ours[:, 2] - ours[:, 0],
        "w": ours[:, 3] - ours[:, 1],
        "i": ours[:, 0],
        "j": ours[:, 1],
    }
    for name, values in measured.items():
        assert (
            ks_2samp(values, [param[name] for param in params if param["v"] is not None]).pvalue
            > 0.001
        ), name


def test_where_no_rectangle_fits_nothing_is_erased() -> None:
    """On two by two pixels some draws give no rectangle that fits."""
    draws = np.full((1, 40), 0.999)
    assert erased_boxes(draws, 2, 2, USUAL).tolist() == [[0, 0, 0, 0]]
    draws[0, 4:6] = 0.0, 0.5
    assert erased_boxes(draws, 2, 2, USUAL).tolist() != [[0, 0, 0, 0]]


def test_as_many_are_erased_as_wanted() -> None:
    """The share of images that lose a rectangle is the probability that was set."""
    images, labels = normalized(4000, 8, 8)
    erased, _ = made(AugmentConfig(random_erasing=0.3))(
        images, labels, numbered(torch.arange(4000))
    )
    lost = int((erased == 0).flatten(1).any(dim=1).sum())
    assert binomtest(lost, 4000, 0.3).pvalue > 0.001


def test_mixup_is_torchvisions() -> None:
    """Images and labels are v2.MixUp's; the first image is mixed with the last."""
    images, labels = normalized(6)
    share = noted(AugmentConfig(mixup=0.4), 1)[0][1]
    mixed, soft = made(AugmentConfig(mixup=0.4))(images, labels, numbered(torch.arange(6)))
    params = {"lam": share, "labels": labels, "batch_size": 6}
    theirs = v2.MixUp(alpha=0.4, num_classes=CLASSES)
    torch.testing.assert_close(mixed, theirs.transform(images, params))
    torch.testing.assert_close(soft, theirs.transform(labels, params))


@pytest.mark.parametrize("first", range(8))
def test_cutmix_is_torchvisions(first: int) -> None:
    """Images and labels are v2.CutMix's, also for cut or empty rectangles."""
    images, labels = normalized(6)
    mixed, soft = made(AugmentConfig(cutmix=1.0))(
        images, labels, numbered(torch.arange(first, first + 6))
    )
    changed = (mixed != images).all(dim=1).any(dim=0)
    y, x = (changed.any(dim=k).nonzero() for k in (1, 0))
    box = (
        (int(x.min()), int(y.min()), int(x.max()) + 1, int(y.max()) + 1)
        if changed.any()
        else (0, 0, 0, 0)
    )
    share = 1 - (box[2] - box[0]) * (box[3] - box[1]) / (12 * 16)
    params = {"box": box, "lam_adjusted": share, "labels": labels, "batch_size": 6}
    theirs = v2.CutMix(num_classes=CLASSES)
    assert torch.equal(mixed, theirs.transform(images, params))
    torch.testing.assert_close(soft, theirs.transform(labels, params))


def test_cut_rectangles_have_torchvisions_distribution() -> None:
    """The share left to each image by CutMix cannot be told from v2.CutMix's."""
    theirs = v2.CutMix(num_classes=CLASSES)
    image = torch.ones(2, 3, 32, 48)
    shares = [theirs.make_params([image])["lam_adjusted"] for _ in range(800)]
    mixing = made(AugmentConfig(cutmix=1.0))
    labels = torch.tensor([0, 1])
    ours = [
        float(mixing(image, labels, numbered(torch.tensor([k, 9000])))[1][0, 0]) for k in range(800)
    ]
    assert ks_2samp(ours, shares).pvalue > 0.001


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_shares_have_the_beta_distribution(alpha: float) -> None:
    """Over the batches, the share of the image itself is Beta(alpha, alpha)."""
    shares = [share for _, share in noted(AugmentConfig(mixup=alpha), 1200)]
    assert ks_1samp(shares, beta(alpha, alpha).cdf).pvalue > 0.001


def test_with_both_each_batch_gets_one() -> None:
    """Mixup and CutMix take turns at random, half of the batches each."""
    names = [name for name, _ in noted(BOTH, 1000)]
    assert binomtest(names.count("mixup"), 1000).pvalue > 0.001


def test_mixing_depends_on_nothing_but_the_batch() -> None:
    """A batch is always mixed alike; another seed, epoch or first sample differs."""
    images, labels = normalized(6)
    given = (images.clone(), labels.clone())
    batch = numbered(torch.arange(6))
    config = AugmentConfig(mixup=0.4, random_erasing=0.5)
    first, soft = made(config)(images, labels, batch)
    assert torch.equal(made(config)(images, labels, batch)[0], first)
    for mixing, other in (
        (made(config, 1), batch),
        (made(config), batch._replace(epoch=1)),
        (made(config), batch._replace(indices=batch.indices + 1)),
    ):
        assert not torch.equal(mixing(images, labels, other)[1], soft)
    assert torch.equal(images, given[0]) and torch.equal(labels, given[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "config",
    [AugmentConfig(mixup=0.4, random_erasing=0.5), AugmentConfig(cutmix=1.0)],
    ids=["mixup", "cutmix"],
)
@pytest.mark.parametrize("count", [1, 5])
def test_type_and_layout_stay(count: int, config: AugmentConfig, dtype: torch.dtype) -> None:
    """Images keep type and layout; labels sum to 1; one image mixes with itself."""
    images, labels = normalized(count, dtype=dtype)
    mixed, soft = made(config)(images, labels, numbered(torch.arange(count)))
    assert mixed.dtype is dtype and mixed.is_contiguous(memory_format=torch.channels_last)
    assert soft.shape == (count, CLASSES) and soft.dtype is torch.float32
    torch.testing.assert_close(soft.sum(dim=1), torch.ones(count))
    if count == 1:
        assert torch.equal(soft, F.one_hot(labels, CLASSES).float())
