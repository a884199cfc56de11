"""Policies on batches: the pixels and the choices of torchvision's and timm's."""

from __future__ import annotations

import importlib.util
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import pictures

pytest.importorskip("scipy", reason="needs scipy (uv sync --group dev)")
from PIL import Image
from scipy.stats import chi2_contingency, ks_2samp
from torch import Tensor
from torchvision.transforms import v2

from harness.config import AugmentConfig, Policies
from harness.data.augment import BatchAugment, Op, Policy, blur
from harness.runtime.seeding import BATCH, uniforms

pytestmark = pytest.mark.usefixtures("one_thread")

DRAWN = 10_000
SIZES = [
    (8, 8, torch.contiguous_format),
    (33, 20, torch.channels_last),
    (32, 32, torch.channels_last),
]
THEIRS: dict[Policies, Callable[[], Any]] = {
    Policies.rand: lambda: v2.RandAugment(2, 9),
    Policies.trivial: v2.TrivialAugmentWide,
    Policies.auto: v2.AutoAugment,
}


def made(auto: Policies = Policies.none, times: int = 0, magnitude: int = 9) -> Policy:
    """The policy of these settings."""
    policy = Policy.from_config(
        AugmentConfig(auto=auto, rand_augment=times, rand_augment_magnitude=magnitude)
    )
    assert policy is not None
    return policy


def is_signed(op: int) -> bool:
    return Op.ShearX <= op <= Op.Sharpness


def told_to(theirs: Any, images: Tensor, told: list[list[float]]) -> Tensor:
    """What torchvision's policy makes of each image when it draws what it is told, no more."""
    left: list[float] = []
    done = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("randint", "rand"):
            patch.setattr(torch, name, lambda *_, **__: torch.tensor(left.pop(0)))
        for image, own in zip(images, told, strict=True):
            left += own
            done.append(theirs(image))
            assert not left
    return torch.stack(done)


def rand_told(draws: np.ndarray) -> list[list[float]]:
    """RandAugment: the operation, and below a half its other direction, for each image."""
    told: list[list[float]] = []
    for own in draws:
        told.append([])
        for row, chance in own.reshape(-1, 2):
            op = int(14 * row)
            told[-1] += [op, chance] if is_signed(op) else [op]
    return told


EACH = np.stack(
    (np.repeat((np.arange(14) + 0.5) / 14, 2), np.tile((0.25, 0.75), 14)), axis=1
)  # both ways


@pytest.mark.parametrize("magnitude", range(31))
def test_every_operation_of_rand_is_torchvisions(magnitude: int) -> None:
    """All 14 operations in both directions equal torchvision's bit for bit."""
    draws = EACH[np.random.default_rng(magnitude).permutation(len(EACH))]
    for size in SIZES:
        images = pictures(len(EACH), *size)
        expected = told_to(v2.RandAugment(1, magnitude), images, rand_told(draws))
        assert torch.equal(made(times=1, magnitude=magnitude)(images, draws), expected)


def test_three_operations_follow_each_other() -> None:
    """Several operations are done in the order drawn, each on what the one before it made."""
    images = pictures(40, 24, 24)
    draws = np.random.default_rng(0).random((40, 6))
    expected = told_to(v2.RandAugment(3, 9), images, rand_told(draws))
    assert torch.equal(made(times=3)(images, draws), expected)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_operation_of_trivial_is_torchvisions(size: tuple[int, int, Any]) -> None:
    """All operations at all 31 magnitudes in both directions equal torchvision's bit for bit."""
    draws = []
    told = []
    for op in range(14):
        for bin in range(31):
            for chance in (0.25, 0.75):
                draws.append(((31 * op + bin + 0.5) / (14 * 31), chance))
                told.append(
                    [op, bin, chance][: 1 + (Op.ShearX <= op <= Op.Solarize) + is_signed(op)]
                )
    images = pictures(len(draws), *size)
    expected = told_to(v2.TrivialAugmentWide(), images, told)
    assert torch.equal(made(Policies.trivial)(images, np.array(draws)), expected)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_pair_of_auto_is_torchvisions(size: tuple[int, int, Any]) -> None:
    """All 25 pairs, done or not, in both directions, equal torchvision's bit for bit."""
    draws = np.random.default_rng(0).random((500, 3))
    draws[:, 0] = (np.arange(500) % 25 + 0.5) / 25
    theirs = v2.AutoAugment()
    told: list[list[float]] = []
    for row, *chances in draws:
        told.append([int(25 * row)])
        for chance, (name, share, _) in zip(chances, theirs._policies[int(25 * row)], strict=True):
            told[-1] += [chance]
            if chance < share and name != "Invert" and is_signed(Op[name]):
                told[-1] += [chance / share]
    images = pictures(len(draws), *size)
    expected = told_to(theirs, images, told)
    assert torch.equal(made(Policies.auto)(images, draws), expected)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rotated_pixels_are_torchvisions(size: tuple[int, int, Any]) -> None:
    """Each image is turned by its own angle, bit for bit as by torchvision, in the same layout."""
    images = pictures(200, *size)
    draws = np.random.default_rng(0).random((200, 2))
    expected = [
        v2.functional.rotate(image, angle)
        for image, angle in zip(images, (360 * draws[:, 1] - 180).tolist(), strict=True)
    ]
    augment = BatchAugment.from_config(AugmentConfig(rotate=180.0), 0)
    assert augment is not None
    turned = augment.parts[0](images, draws)
    assert torch.equal(turned, torch.stack(expected))
    assert turned.is_contiguous(memory_format=size[2])


def test_the_operations_are_torchvisions() -> None:
    """The first are named and ordered as those that torchvision draws from."""
    assert [op.name for op in Op][:14] == list(v2.RandAugment._AUGMENTATION_SPACE)


@pytest.fixture(scope="module")
def timm() -> types.ModuleType:
    """The policies of timm, without timm, which takes seconds to import."""
    package = importlib.util.find_spec("timm")
    if package is None or package.origin is None:
        pytest.skip("needs timm (uv sync --extra timm)")
    file = Path(package.origin).parent / "data" / "auto_augment.py"
    spec = importlib.util.spec_from_file_location("timms_policies", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_three_is_timms_on_pil_images(
    size: tuple[int, int, Any], timm: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Solarized pixels are equal, gray ones equal or one level less; of a thousand blurred values
    fewer than one is a level off.
    """
    images = pictures(90, *size)
    draws = np.random.default_rng(0).random((90, 2))
    draws[:, 0] = (np.arange(90) % 3 + 0.5) / 3
    told: list[float] = []
    monkeypatch.setattr(random, "choice", lambda of: of[told.pop(0)])
    monkeypatch.setattr(random, "uniform", lambda low, high: low + (high - low) * told.pop(0))
    theirs = timm.AutoAugment(timm.auto_augment_policy("3a"))
    expected = []
    for image, (row, chance) in zip(images, draws.tolist(), strict=True):
        told += [int(3 * row), chance][: 1 + (row > 2 / 3)]
        done = theirs(Image.fromarray(image.permute(1, 2, 0).numpy()))
        expected.append(torch.from_numpy(np.array(done)).permute(2, 0, 1))
    off = made(Policies.three)(images, draws).int() - torch.stack(expected).int()
    assert not off[::3].any()
    assert off[1::3].min() >= -1 and off[1::3].max() <= 0
    assert off[2::3].abs().max() <= 1 and (off[2::3] != 0).float().mean() < 1e-3


def test_a_blur_of_two_is_the_widest() -> None:
    """An even picture stays as it is at both ends of the range."""
    images = torch.full((2, 3, 9, 7), 200, dtype=torch.uint8)
    assert torch.equal(blur(images, np.array([0.1, 2.0])), images)


def count(auto: Policies) -> int:
    """The images of ``DRAWN`` draws: RandAugment has two for each."""
    return DRAWN // (1 + (auto is Policies.rand))


def magnitude(op: Op, amount: float) -> float:
    """An amount as torchvision has it: bits that stay, and 0 for what has none."""
    if op in (Op.AutoContrast, Op.Equalize, Op.Gray):
        return 0.0
    return 8.0 - round(amount) if op is Op.Posterize else round(amount, 3)


def ours(auto: Policies, seed: int) -> list[list[tuple[str, float]]]:
    """The operations, and their amounts, of images of 331 x 331 pixels."""
    policy = made(auto)
    draws = uniforms(seed, 0, np.arange(count(auto)), policy.draws, BATCH)
    chosen = (each.reshape(len(draws), -1).tolist() for each in policy.choose(draws, 331, 331))
    return [
        [(Op(op).name, magnitude(Op(op), amount)) for op, amount in zip(*image, strict=True) if op]
        for image in zip(*chosen, strict=True)
    ]


def torchvisions(auto: Policies, seed: int) -> list[list[tuple[str, float]]]:
    """The same of torchvision's policy as it is."""
    theirs = THEIRS[auto]()
    image = torch.empty(1, 3, 331, 331, dtype=torch.uint8)
    done: list[tuple[str, float]] = []

    def note(image: Tensor, name: str, amount: float, **_: Any) -> Tensor:
        if name != "Identity":
            # to invert is to solarize from black on
            done.append(("Solarize" if name == "Invert" else name, round(amount, 3)))
        return image

    theirs._apply_image_or_video_transform = note
    torch.manual_seed(seed)
    found = []
    for _ in range(count(auto)):
        done.clear()
        theirs(image)
        found.append([*done])
    return found


def p_values(one: list[Any], other: list[Any]) -> dict[str, float]:
    """Chi-squared tests of whether both have the same distribution."""
    views: dict[str, Callable[[list[tuple[str, float]]], list[Any]]] = {
        "operations": lambda image: [[name for name, _ in image]],
        "magnitudes": lambda image: [(name, abs(amount)) for name, amount in image],
        "directions": lambda image: [
            (name, amount < 0) for name, amount in image if is_signed(Op[name])
        ],
    }
    values = {}
    for view, of in views.items():
        sides = [[str(each) for image in side for each in of(image)] for side in (one, other)]
        kinds = {kind: place for place, kind in enumerate(sorted({*sides[0], *sides[1]}))}
        table = np.array(
            [np.bincount([kinds[each] for each in side], minlength=len(kinds)) for side in sides]
        )
        # those that are too rare for the test, together
        rare = table.sum(axis=0) < 10
        table = np.column_stack((table[:, ~rare], table[:, rare].sum(axis=1)))
        values[view] = float(chi2_contingency(table[:, table.sum(axis=0) > 0]).pvalue)
    return values


@pytest.mark.parametrize("auto", THEIRS, ids=lambda auto: auto.name)
def test_a_policy_draws_as_torchvisions(auto: Policies) -> None:
    """Operations, magnitudes and directions have its distribution, as its own other draws have."""
    reference = torchvisions(auto, 0)
    for name, other in {"ours": ours(auto, 0), "theirs": torchvisions(auto, 1)}.items():
        values = p_values(reference, other)
        assert min(values.values()) >= 0.001, name


def test_three_draws_as_timms(timm: types.ModuleType) -> None:
    """Each of the three is equally likely; a blur's width has timm's distribution."""
    theirs = timm.AutoAugment(timm.auto_augment_policy("3a"))
    sigmas: list[float] = []
    # in the place of an image
    image = types.SimpleNamespace(filter=lambda kind: sigmas.append(kind.radius))
    for place, row in enumerate(theirs.policy[:2]):
        row[0].aug_fn = lambda image, *_, place=place, **__: place
    tables = []
    blurs = []
    for seed in range(2):
        random.seed(seed)
        sigmas.clear()
        found = [theirs(image) for _ in range(DRAWN)]
        tables.append([found.count(0), found.count(1), found.count(None)])
        blurs.append([*sigmas])
    chosen = [image[0] for image in ours(Policies.three, 0)]
    names = [name for name, _ in chosen]
    tables.append([names.count(name) for name in ("Solarize", "Gray", "Blur")])
    blurs.append([amount for name, amount in chosen if name == "Blur"])
    for other in (1, 2):
        assert chi2_contingency([tables[0], tables[other]]).pvalue >= 0.001
        assert ks_2samp(blurs[0], blurs[other]).pvalue >= 0.001
