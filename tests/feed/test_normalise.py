"""Normalize: bitwise the plain expression, on a CPU in memory that is used again when nothing holds
it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.feed import prefetcher
from harness.feed.base import BufferPool
from harness.feed.prefetcher import DataPrefetcher, Normalize
from harness.runtime import accelerator

CPU = torch.device("cpu")
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
SHAPES = [
    (4, 3, 8, 8),
    (5, 3, 7, 11),
    (90, 3, 33, 31),
    (2, 1, 9, 6),
    (3, 4, 5, 1),
    (2, 3, 1, 1),
    (1, 3, 6, 5),
    (1, 1, 1, 1),
]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "nchw": lambda images: images.contiguous(),
    "nhwc": lambda images: images.contiguous(memory_format=torch.channels_last),
    "sliced": lambda images: images.repeat(2, 1, 1, 2)[: len(images), :, :, : images.shape[3]],
    "transposed": lambda images: images.transpose(2, 3).contiguous().transpose(2, 3),
}


@pytest.fixture(autouse=True)
def _no_batch_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    # but one image of one pixel, whose strides are for torch to choose
    monkeypatch.setattr(prefetcher, "_SMALL", 5)


def uint8(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(
        0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def plain(images: Tensor, mean: Any, std: Any, dtype: torch.dtype, channels_last: bool) -> Tensor:
    """The expression whose result is promised."""
    middle, scale = (
        torch.tensor(values).view(1, -1, 1, 1)
        for values in ([255.0 * m for m in mean], [1 / (255.0 * s) for s in std])
    )
    laid_out = images.contiguous(
        memory_format=torch.channels_last if channels_last else torch.contiguous_format
    )
    return torch.sub(laid_out, middle).mul_(scale).to(dtype)


def bits(images: Tensor) -> Tensor:
    return images.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("channels_last", [False, True], ids=["to nchw", "to nhwc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_result_is_bitwise_the_plain_expression(
    shape: tuple[int, ...], layout: str, dtype: torch.dtype, channels_last: bool
) -> None:
    """Values, type and strides are those of torch's expression, for a whole batch and for a short
    last one.
    """
    mean, std = (MEAN[:1] * shape[1], STD[:1] * shape[1]) if shape[1] != 3 else (MEAN, STD)
    one = Normalize(CPU, mean, std, dtype, channels_last)
    for images in (
        LAYOUTS[layout](uint8(*shape)),
        LAYOUTS[layout](uint8(*shape)[: max(1, shape[0] // 2)]),
    ):
        before = images.clone()
        result = one(images)
        expected = plain(images, mean, std, dtype, channels_last)
        assert (result.dtype, result.shape, result.stride()) == (
            dtype,
            expected.shape,
            expected.stride(),
        )
        assert torch.equal(bits(result), bits(expected))
        assert torch.equal(images, before)


def test_an_empty_batch_stays_empty() -> None:
    """No image gives no image, with the network's type."""
    result = Normalize(CPU, MEAN, STD, torch.float16, True)(uint8(0, 3, 4, 4))
    assert (result.shape, result.dtype) == ((0, 3, 4, 4), torch.float16)


def test_a_small_batch_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the calls would cost more than they save there are none of them."""
    monkeypatch.setattr(prefetcher, "_SMALL", 1000)
    one = Normalize(CPU, MEAN, STD, torch.float32, True)
    monkeypatch.setattr(one, "_by_rows", None)
    images = uint8(4, 3, 8, 8)
    assert torch.equal(one(images), plain(images, MEAN, STD, torch.float32, True))


def test_a_larger_batch_gets_larger_memory() -> None:
    """Batches may grow; what was lent before stays as it is."""
    one = Normalize(CPU, MEAN, STD, torch.float32, False)
    small = uint8(2, 3, 4, 4)
    large = uint8(7, 3, 9, 9)
    first = one(small)
    second = one(large)
    third = one(small)
    for result, images in ((first, small), (second, large), (third, small)):
        assert torch.equal(result, plain(images, MEAN, STD, torch.float32, False))


def test_other_devices_keep_their_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a device whose work is done when a call returns goes by rows and uses memory again."""
    other = accelerator.Accelerator(CPU)
    other.kind = "mps"
    monkeypatch.setattr(accelerator, "get", lambda device: other)
    one = Normalize(CPU, MEAN, STD, torch.float32, True)
    monkeypatch.setattr(one, "_by_rows", None)
    images = uint8(4, 3, 8, 8)
    assert torch.equal(one(images), plain(images, MEAN, STD, torch.float32, True))


class Net(nn.Module):
    """A convolution, whose backward pass needs its input, and a head."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.conv(images).relu().mean((2, 3)))

    def gradients(self) -> list[Tensor]:
        found = [
            parameter.grad.clone() for parameter in self.parameters() if parameter.grad is not None
        ]
        self.zero_grad()
        return found


Batches = Callable[[bool], DataPrefetcher]


@pytest.fixture(params=[False, True], ids=["plain", "ahead"])
def batches(request: pytest.FixtureRequest) -> Iterator[Batches]:
    """Makes a prefetcher over nine different batches, with or without memory to use again."""
    host = [(uint8(4, 3, 8, 8, seed=k), torch.arange(4) % 2) for k in range(9)]
    made = []

    def make(reuse: bool) -> DataPrefetcher:
        made.append(
            DataPrefetcher(
                host,
                "cpu",
                mean=MEAN,
                std=STD,
                channels_last=True,
                ahead=request.param,
            )
        )
        if not reuse:
            made[-1]._transfer.normalize._pool = BufferPool(0, 1 << 20)
        return made[-1]

    yield make
    for one in made:
        one.close()


def listed(batches: DataPrefetcher) -> list[Tensor]:
    return [images for images, _ in list(batches)]


def viewed(batches: DataPrefetcher) -> list[Tensor]:
    return [images[1:, :, 2:, ::2] for images, _ in batches]


def as_arrays(batches: DataPrefetcher) -> list[Tensor]:
    arrays = [images.numpy()[0] for images, _ in batches]
    gc.collect()
    return [torch.from_numpy(array) for array in arrays]


def accumulated(batches: DataPrefetcher) -> list[Tensor]:
    network = Net()
    losses = [nn.functional.cross_entropy(network(images), labels) for images, labels in batches]
    torch.stack(losses).sum().backward()
    return network.gradients()


@pytest.mark.parametrize(
    "holding",
    [listed, viewed, as_arrays, accumulated],
    ids=lambda way: way.__name__,
)
def test_what_is_held_stays_as_it_is(
    batches: Batches, holding: Callable[[DataPrefetcher], list[Tensor]]
) -> None:
    """Who keeps a batch in any way, the autograd graph among them, finds in it what would be there
    without reuse.
    """
    held = holding(batches(True))
    expected = holding(batches(False))
    assert len(held) == len(expected) >= 4
    for one, other in zip(held, expected, strict=True):
        assert torch.equal(one, other)


def test_a_training_loop_uses_the_same_memory_again(batches: Batches) -> None:
    """A loop that drops its batches finds nine of them in
    three places, whatever else it allocates.
    """
    network = Net()
    places = set()
    others = []
    for images, _ in batches(True):
        network(images).sum().backward()
        places.add(images.data_ptr())
        others.append(torch.empty_like(images))
    assert len(places) <= 3
