"""One update: the same as a plain loop's, and skipped where it would do harm."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.config import AugmentConfig, Config, ConfigError, Precision
from harness.data.augment import BatchAugment, Mix
from harness.feed.base import HostBatch
from harness.runtime.accelerator import Accelerator
from harness.runtime.distributed import World
from harness.training.state import make_state
from harness.training.step import Step, device_batches

CPU = World(0, 1, 0, 1, torch.device("cpu"))


def network() -> nn.Module:
    """A small convolutional network, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def batches(n: int, size: int = 16) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of noise, the same each time."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(n):
        yield (
            torch.randn(size, 3, 12, 12, generator=generator),
            torch.randint(0, 5, (size,), generator=generator),
        )


def make(config: Config, model: nn.Module | None = None, classes: int | None = 5) -> Step:
    """A step over a fresh network."""
    model = model or network()
    return Step(make_state(config, 0, CPU, 50, network=model), classes)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("mixed", [False, True], ids=["labels", "mixed labels"])
def test_weighted_classes_have_a_mean_over_images(
    smoothing: float, parts: int, mixed: bool
) -> None:
    """An update equals that of a loop written out: each image's loss by its weight, over images. So
    parts of a batch, as ranks have them too, give the same update as the whole.
    """
    weights = [1.0, 2.0, 0.5, 3.0, 1.0]
    config = Config()
    config.optim.weight_decay = 0.0
    config.optim.label_smoothing = smoothing
    model = nn.Sequential(nn.Flatten(), nn.Linear(432, 5))
    plain = copy.deepcopy(model)
    step = Step(make_state(config, 0, CPU, 50, network=model), 5, weights)
    optimizer = torch.optim.SGD(plain.parameters(), lr=step.state.optimizer.param_groups[0]["lr"])
    images, labels = next(batches(1))
    shares = F.one_hot(labels, 5).float()
    given = shares if mixed else labels
    pieces = zip(images.chunk(parts), given.chunk(parts), strict=True)
    for part, (image, label) in enumerate(pieces):
        step(image, label, part=part, parts=parts)
    smoothed = (1 - smoothing) * shares + smoothing / 5
    losses = -(torch.tensor(weights) * smoothed * plain(images).log_softmax(1)).sum(1)
    losses.mean().backward()
    optimizer.step()
    assert step.read().loss == pytest.approx(losses.mean().item(), rel=1e-5)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


class Odd(nn.Module):
    """A network whose outputs change as it trains."""

    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.network = network()
        self.change = change

    def forward(self, images: torch.Tensor) -> Any:
        """Gives what the change makes of the network's output."""
        return self.change(self.network(images))


@pytest.mark.parametrize(
    ("change", "given"),
    [
        (lambda logits: (logits, None), "tuple"),
        (lambda logits: logits.mean(), r"torch.float32 \[\]"),
        (lambda logits: logits[:-1], r"torch.float32 \[15, 5\]"),
        (lambda logits: logits[:, 1:], r"torch.float32 \[16, 4\]"),
        (lambda logits: logits * 1j, r"torch.complex64 \[16, 5\]"),
        (torch.Tensor.to_sparse, r"torch.float32 \[16, 5\]"),
        (torch.Tensor.detach, r"torch.float32 \[16, 5\]"),
    ],
    ids=[
        "heads",
        "a number",
        "an image too few",
        "a class too few",
        "complex",
        "sparse",
        "detached",
    ],
)
def test_outputs_that_cannot_be_trained_on(change: Callable[..., Any], given: str) -> None:
    """They are refused in one line, which names the network."""
    step = make(Config(), Odd(change))
    with pytest.raises(
        ConfigError, match=f"^model.name=small: the network returns {given} for 16 ima"
    ):
        step(*next(batches(1)))


def test_two_hundred_losses_are_those_of_the_examples_loop() -> None:
    """200 losses and the weights after them equal those of pytorch/examples' loop."""
    config = Config()
    config.optim.decay_norm_and_bias = True
    config.schedule.name = type(config.schedule.name).step
    config.schedule.step_epochs = 2
    step = make(config)
    ours = []
    for images, labels in batches(200):
        step(images, labels)
        ours.append(step.read().loss)

    model = network()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, fused=True
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    theirs = []
    model.train()
    for i, (images, target) in enumerate(batches(200)):
        output = model(images)
        loss = criterion(output, target)
        theirs.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 50 == 49:
            scheduler.step()
    assert ours == theirs
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.parameters(), step.state.network.parameters(), strict=True)
    )


def test_clipping_limits_the_update() -> None:
    """With a tiny clip_norm, one update moves weights by at most lr * clip_norm."""
    config = Config()
    config.optim.clip_norm = 1e-3
    config.optim.weight_decay = 0.0
    step = make(config)
    before = [p.detach().clone() for p in step.state.network.parameters()]
    step(*next(batches(1)))
    moved = torch.sqrt(
        sum(
            ((a - b.detach()) ** 2).sum()
            for a, b in zip(before, step.state.network.parameters(), strict=True)
        )
    )
    assert 0 < float(moved) <= 0.1 * 1e-3 * 1.001


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16], ids=lambda p: p.name)
def test_a_nonfinite_loss_changes_nothing(precision: Precision) -> None:
    """A batch of NaN changes neither weights nor momentum, is counted, and training goes on."""
    config = Config()
    config.trainer.precision = precision
    step = make(config, nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 12, 5)))
    (images, labels), (more, more_labels) = batches(2)
    step(images, labels)
    before = [p.detach().clone() for p in step.state.network.parameters()]
    momentum = [s["momentum_buffer"].clone() for s in step.state.optimizer.state.values()]
    step.read()
    for _ in range(3):
        step(images * float("nan"), labels)
    figures = step.read()
    assert (figures.skipped, figures.worst_streak, figures.loss) == (3, 3, None)
    assert all(
        torch.equal(a, b) for a, b in zip(before, step.state.network.parameters(), strict=True)
    )
    assert all(
        torch.equal(a, s["momentum_buffer"])
        for a, s in zip(momentum, step.state.optimizer.state.values(), strict=True)
    )
    step(more, more_labels)
    figures = step.read()
    assert figures.skipped == 0
    assert figures.loss is not None
    assert not torch.equal(before[0], next(step.state.network.parameters()))


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_nonfinite_loss_changes_nothing_where_kernels_heed_no_found_inf(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of Apple's GPUs by torch 2.13: the update is left out before them."""
    monkeypatch.setattr(Accelerator, "skips_updates", False, raising=False)
    config = Config()
    config.optim.name = name
    step = make(config)
    optimizer = step.state.optimizer
    optimizer.register_step_pre_hook(lambda *_: setattr(optimizer, "found_inf", None))
    images, labels = next(batches(1))
    step(images, labels)
    before = copy.deepcopy([*step.state.network.parameters()])
    step(images * float("nan"), labels)
    assert all(map(torch.equal, before, step.state.network.parameters()))
    assert step.read().skipped == 1
    step(images, labels)
    assert not torch.equal(before[0], next(step.state.network.parameters()))


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_first_update_that_is_skipped_does_no_harm(name: str) -> None:
    """After a skipped first update the next is a fresh run's (torch leaves buffers unfilled)."""
    config = Config()
    config.optim.name = name
    config.optim.lr = 0.01
    plain = lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 12, 5))
    skipped = make(config, plain())
    fresh = make(config, plain())
    skipped.state.network.load_state_dict(fresh.state.network.state_dict())
    images, labels = next(batches(1))
    skipped(images * float("inf"), labels)
    for group in skipped.state.optimizer.param_groups:
        group["lr"] = 0.01
    skipped(images, labels)
    fresh(images, labels)
    for a, b in zip(
        skipped.state.network.parameters(), fresh.state.network.parameters(), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_a_streak_goes_on_over_readings() -> None:
    """Skipped updates in a row are counted across windows."""
    step = make(Config(), nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 12, 5)))
    images, labels = next(batches(1))
    for expected in (2, 4):
        step(images * float("inf"), labels)
        step(images * float("inf"), labels)
        assert step.read().worst_streak == expected


def test_fp16_scales_and_backs_off() -> None:
    """In fp16 an overflow halves the scale and skips the update."""
    config = Config()
    config.trainer.precision = Precision.fp16
    step = make(config, nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 12, 5)))
    images, labels = next(batches(1))
    step(images, labels)
    before = step.state.scaler.get_scale()
    step(images * float("inf"), labels)
    assert step.state.scaler.get_scale() == before / 2
    assert step.read().skipped >= 1


@pytest.mark.parametrize("precision", list(Precision), ids=lambda p: p.name)
def test_every_precision_learns(precision: Precision) -> None:
    """The loss on one batch falls in every precision."""
    config = Config()
    config.trainer.precision = precision
    step = make(config)
    images, labels = next(batches(1))
    losses = []
    for _ in range(15):
        step(images.to(memory_format=torch.channels_last), labels)
        losses.append(step.read().loss or 0.0)
    assert losses[-1] < 0.8 * losses[0]


def test_the_forward_time_is_that_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median pass times the passes of an update; unknown before, and where it was forgotten."""
    # passes of 90, 2 and 1 seconds
    ticks = iter([0.0, 90.0, 100.0, 102.0, 110.0, 111.0])
    monkeypatch.setattr(
        "harness.training.step.time", SimpleNamespace(perf_counter=lambda: next(ticks))
    )
    config = Config()
    config.trainer.accumulate_steps = 2
    world = World(0, 2, 0, 2, CPU.device)
    monkeypatch.setattr("harness.training.step.DistributedDataParallel", lambda net, **_: net)
    step = Step(make_state(config, 1, world, 5, network=nn.Linear(1, 1)))
    assert step.forward_ms is None
    for _ in range(3):
        step.state.network(torch.zeros(1, 1))
    assert step.forward_ms == 4000.0
    step.forget()
    assert step.forward_ms is None


def host_batch() -> HostBatch:
    """Eight images of noise, as a feed gives them."""
    images = torch.randint(
        0, 256, (8, 3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
    )
    return HostBatch(
        images.contiguous(memory_format=torch.channels_last),
        torch.arange(8) % 5,
        torch.arange(8),
        epoch=3,
    )


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("precision", list(Precision), ids=lambda p: p.name)
def test_batches_are_augmented_then_normalized_then_mixed(
    precision: Precision, channels_last: bool
) -> None:
    """The step's batches are augmented, normalized and mixed, in the network's type and layout."""
    config = Config(seed=4)
    config.trainer.precision = precision
    config.trainer.channels_last = channels_last
    config.augment = AugmentConfig(
        color_jitter=(0.4, 0.4, 0.4, 0.1), rand_augment=2, random_erasing=0.5, mixup=0.2, cutmix=1.0
    )
    augment = BatchAugment.from_config(config.augment, 4)
    mix = Mix.from_config(config.augment, 5, 4)
    assert augment is not None and mix is not None
    host = host_batch()
    colored = host._replace(images=augment(host.images, host))
    expected, expected_labels = mix(*next(device_batches([colored], config, CPU.device)), host)
    images, labels = next(make(config).batches([host]))
    assert torch.equal(images, expected) and torch.equal(labels, expected_labels)
    assert images.is_contiguous(
        memory_format=torch.channels_last if channels_last else torch.contiguous_format
    )
    step = make(config)
    step(images, labels)
    assert step.read().loss is not None


def test_by_default_batches_are_only_normalized() -> None:
    """Without augmentation the step takes the bits that evaluation takes, and whole labels."""
    images, labels = next(make(Config()).batches([host_batch()]))
    expected, whole = next(device_batches([host_batch()], Config(), CPU.device))
    assert (
        torch.equal(images, expected) and torch.equal(labels, whole) and labels.dtype is torch.int64
    )


def test_what_is_skipped_is_what_torchs_scaler_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a loss scale, gradients and skipped updates are those of torch's at scale 1."""
    images, labels = next(batches(1))
    found = []
    for scaled in (False, True):
        torch.manual_seed(0)
        step = make(Config(), nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 12, 5)))
        if scaled:
            scaler = step.state.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
            monkeypatch.setattr(scaler, "update", functools.partial(scaler.update, 1.0))
        for factor in (1.0, float("inf"), 1.0):
            step(images * factor, labels)
        weights = [p.detach().clone() for p in step.state.network.parameters()]
        found.append((weights, step.read().skipped))
    assert found[0][1] == found[1][1] == 1
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))


@pytest.mark.parametrize("side", [2, 12], ids=["one value", "several values"])
def test_a_last_batch_of_one_image_is_refused_before_training(side: int) -> None:
    """A norm that would have one value per channel is told at the start; nothing else changes."""
    config = Config()
    config.loader.drop_last, config.loader.batch_size = False, 8
    config.data.image_size = side + 1
    model = nn.Sequential(network()[:3], nn.Dropout(), nn.Flatten(), nn.LazyLinear(5))
    model(torch.zeros(2, 3, side + 1, side + 1))
    step = make(config, model)
    before = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    if side == 2:
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            step.check_last_batch(17)
    else:
        step.check_last_batch(17)
    step.check_last_batch(16)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
