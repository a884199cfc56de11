"""Augmentation of whole batches: torchvision's jitter; a function of (seed, epoch, index)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from pictures import numbered, pictures

pytest.importorskip("scipy", reason="needs scipy (uv sync --group dev)")
from scipy.stats import chisquare, ks_2samp
from torchvision.transforms import v2

from harness.config import AugmentConfig, Policies
from harness.data import augment
from harness.data.augment import HUE, BatchAugment, ColorJitter
from harness.runtime.seeding import BATCH, uniforms

EVERYTHING = AugmentConfig(rotate=40.0, color_jitter=(0.4, 0.5, 1.5, 0.3), rand_augment=2)
POLICIES = {auto.name: AugmentConfig(auto=auto) for auto in Policies if auto is not Policies.none}
NAMES = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")


pytestmark = pytest.mark.usefixtures("one_thread")


def made(config: AugmentConfig, seed: int = 0) -> BatchAugment:
    """What ``config`` asks for, which is something."""
    found = BatchAugment.from_config(config, seed)
    assert found is not None
    return found


STRENGTHS = {
    "all": (0.4, 0.5, 1.5, 0.3),
    "no hue": (0.4, 0.4, 0.4, 0.0),
    "contrast and hue": (0.0, 0.8, 0.0, 0.5),
    "hue": (0.0, 0.0, 0.0, 0.1),
    "saturation": (0.0, 0.0, 0.9, 0.0),
}


@pytest.mark.parametrize("strengths", STRENGTHS.values(), ids=STRENGTHS)
def test_jittered_pixels_are_torchvisions(strengths: tuple[float, float, float, float]) -> None:
    """With the order and the factors that an image draws, the pixels are v2.ColorJitter's.

    A turned hue may be off by one gray level, of which a later operation may make a few.
    """
    images = pictures(24, 20, 24)
    jitter = ColorJitter(strengths)
    draws = np.random.default_rng(0).random((24, jitter.draws))
    kinds, amounts = jitter.choose(draws)
    theirs = v2.ColorJitter(*strengths)
    expected = []
    for image, order, factors in zip(images, kinds, amounts, strict=True):
        params = dict.fromkeys(NAMES) | {
            NAMES[kind]: factor for kind, factor in zip(order, factors, strict=True)
        }
        expected.append(theirs.transform(image, params | {"fn_idx": torch.from_numpy(order)}))
    off = (jitter(images, draws).int() - torch.stack(expected).int()).abs()
    assert (off > 0).float().mean() <= (2e-4 if strengths[HUE] else 0.0)
    assert off.max() <= (4 if strengths[HUE] else 0)


def test_jitter_draws_as_torchvision() -> None:
    """Every order is equally likely; each factor has torchvision's distribution."""
    strengths = STRENGTHS["all"]
    kinds, amounts = ColorJitter(strengths).choose(uniforms(0, 0, np.arange(6000), 8, BATCH))
    orders = list(itertools.permutations(range(4)))
    assert chisquare([(kinds == order).all(axis=1).sum() for order in orders]).pvalue > 0.001
    torch.manual_seed(0)
    theirs = [v2.ColorJitter(*strengths).make_params([]) for _ in range(3000)]
    for kind, name in enumerate(NAMES):
        assert (
            ks_2samp(amounts[kinds == kind], [params[name] for params in theirs]).pvalue > 0.001
        ), name


def test_nothing_wanted_is_nothing_done() -> None:
    """The default augmentation has no part for whole batches."""
    assert BatchAugment.from_config(AugmentConfig(), 0) is None


def test_rotation_comes_before_a_policy_and_jitter() -> None:
    """Each part has draws of its own, in the order in which the parts are applied."""
    images = pictures(12, 16, 16)
    parts = made(EVERYTHING).parts
    expected = images
    draws = uniforms(0, 0, np.arange(12), sum(part.draws for part in parts), BATCH)
    for setting in ({"rotate": 40.0}, {"rand_augment": 2}, {"color_jitter": (0.4, 0.5, 1.5, 0.3)}):
        (part,) = made(AugmentConfig(**setting)).parts
        expected = part(expected, draws[:, : part.draws])
        draws = draws[:, part.draws :]
    assert torch.equal(made(EVERYTHING)(images, numbered(torch.arange(12))), expected)


@pytest.mark.parametrize("config", [EVERYTHING, *POLICIES.values()], ids=["all", *POLICIES])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("cached_bytes", [1, 5000, 1 << 30])
def test_an_image_depends_on_nothing_but_its_place(
    config: AugmentConfig,
    layout: torch.memory_format,
    cached_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the batch nor the CPU's chunk changes an image or its layout."""
    images = pictures(20, 24, 16, layout)
    indices = torch.arange(100, 120)
    whole = made(config)(images, numbered(indices))
    monkeypatch.setattr(augment, "_CACHED_BYTES", cached_bytes)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    parts = [made(config)(images[rows], numbered(indices[rows])) for rows in order.split(7)]
    assert torch.equal(torch.cat(parts), whole[order])
    assert all(part.is_contiguous(memory_format=layout) for part in (whole, *parts))
    assert not torch.equal(whole, images)


@pytest.mark.parametrize(
    "config",
    [EVERYTHING, AugmentConfig(color_jitter=(0.4, 0.5, 1.5, 0.3)), *POLICIES.values()],
    ids=["all", "jitter", *POLICIES],
)
def test_what_is_given_stays_as_it_is(config: AugmentConfig) -> None:
    """A batch may be augmented many times: its memory is not written to."""
    images = pictures(8, 16, 16)
    before = images.clone()
    made(config)(images, numbered(torch.arange(8)))[:] = 0
    assert torch.equal(images, before)


@pytest.mark.parametrize("change", ["seed", "epoch", "index"])
def test_seed_epoch_and_index_all_count(change: str) -> None:
    """Another seed, epoch or index changes most images; equal ones change none."""
    images = pictures(20, 16, 16)
    indices = torch.arange(20)
    first = made(EVERYTHING)(images, numbered(indices))
    again = made(EVERYTHING)(images, numbered(indices))
    other = made(EVERYTHING, seed=int(change == "seed"))(
        images, numbered(indices + 20 * (change == "index"), epoch=int(change == "epoch"))
    )
    assert torch.equal(first, again)
    assert (first != other).flatten(1).any(dim=1).sum() >= 15
