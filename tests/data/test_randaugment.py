"""RandAugment on batches: torchvision's pixels and distribution of choices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pictures import pictures

pytest.importorskip("scipy", reason="needs scipy (uv sync)")
from scipy.stats import chisquare
from torch import Tensor
from torchvision.transforms import v2

from harness.data import augment as module
from harness.data.augment import Op, RandAugment
from harness.runtime.seeding import BATCH, uniforms

pytestmark = pytest.mark.usefixtures("one_thread")


def torchvisions(images: Tensor, draws: np.ndarray, magnitude: int) -> Tensor:
    """What torchvision's RandAugment makes of each image when it draws as ``draws`` say."""
    # the place of an operation; for a signed one then below a half for the negative direction
    told: list[float] = []
    theirs = v2.RandAugment(draws.shape[1] // 2, magnitude)
    done = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("randint", "rand"):
            patch.setattr(torch, name, lambda *_, **__: torch.tensor(told.pop(0)))
        for image, own in zip(images, draws, strict=True):
            for what, direction in own.reshape(-1, 2):
                op = Op(int(14 * what))
                told += [op.value, direction] if Op.ShearX <= op <= Op.Sharpness else [op.value]
            done.append(theirs(image))
            assert not told
    return torch.stack(done)


EACH = np.stack(
    (np.repeat((np.arange(14) + 0.5) / 14, 2), np.tile((0.25, 0.75), 14)), axis=1
)  # both ways


@pytest.mark.parametrize("magnitude", range(31))
def test_every_operation_is_torchvisions(magnitude: int) -> None:
    """All 14 operations in both directions equal torchvision's bit for bit."""
    order = np.random.default_rng(magnitude).permutation(len(EACH))
    for height, width, layout in (
        (8, 8, torch.contiguous_format),
        (33, 20, torch.channels_last),
        (32, 32, torch.channels_last),
    ):
        images = pictures(len(EACH), height, width, layout)
        assert torch.equal(
            RandAugment(1, magnitude)(images, EACH[order]),
            torchvisions(images, EACH[order], magnitude),
        )


def test_three_operations_follow_each_other() -> None:
    """Several operations are done in the order drawn, each on what the one before it made."""
    images = pictures(40, 24, 24)
    draws = np.random.default_rng(0).random((40, 6))
    assert torch.equal(RandAugment(3, 9)(images, draws), torchvisions(images, draws, 9))


def test_the_operations_are_torchvisions() -> None:
    """Their names and order are those that torchvision draws from."""
    assert [op.name for op in Op] == list(v2.RandAugment._AUGMENTATION_SPACE)


def test_the_choices_are_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations and directions are equally likely, in both places."""
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    monkeypatch.setattr(
        module.RandAugment,
        "_operate",
        lambda self, images, ops, signs: seen.append((ops, signs)),
    )
    augment = RandAugment(2, 9)
    augment(
        torch.zeros(14_000, 3, 1, 1, dtype=torch.uint8),
        uniforms(0, 0, np.arange(14_000), augment.draws, BATCH),
    )
    assert len(seen) == 2
    for ops, signs in seen:
        assert chisquare(np.bincount(ops, minlength=14)).pvalue > 0.001
        assert chisquare([(signs > 0).sum(), (signs < 0).sum()]).pvalue > 0.001
