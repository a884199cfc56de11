"""Timed steps: what they measure under a fake clock, and that nothing stays of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from samples import settings
from torch import Tensor, nn

from harness.clock.clock import StepClock
from harness.config import AugmentConfig, Config, Precision
from harness.feed.base import HostBatch
from harness.feed.prefetcher import DataPrefetcher
from harness.runtime import accelerator, signals
from harness.runtime.distributed import World
from harness.runtime.errors import Interrupted, LoaderError
from harness.runtime.seeding import random_state
from harness.training.state import make_state
from harness.training.step import Step, device_batches
from harness.tuning.snapshot import Snapshot
from harness.tuning.training_steps import TrainingBenchmark

DEVICE = torch.device("cpu")
CPU = World(0, 1, 0, 1, DEVICE)


pytestmark = pytest.mark.usefixtures("one_thread")


class Hand:
    """A clock that a test sets, or that moves by ``tick`` whenever it is read."""

    def __init__(self, tick: float = 0.0) -> None:
        self.time = 0.0
        self.tick = tick

    def __call__(self) -> float:
        self.time += self.tick
        return self.time


class Endless:
    """A feed of one batch for ever; ``before`` is told the number of each batch."""

    made_on_device = False
    meter = None
    settings = settings(batch_size=4)

    def __init__(self, batch: HostBatch, before: Callable[[int], object] = lambda k: None) -> None:
        self.batch = batch
        self.before = before
        self.ended = 0
        self.closed = 0

    def __iter__(self) -> Iterator[HostBatch]:
        k = 0
        try:
            while True:
                self.before(k)
                yield self.batch
                k += 1
        finally:
            self.ended += 1

    def close(self) -> None:
        self.closed += 1


class TimedStep:
    """Stands in for a ``Step``: notes its batches and takes ``seconds``, at first ``first_s``."""

    def __init__(self, hand: Hand, seconds: float, config: Config, world: World) -> None:
        self.world = world
        self.hand = hand
        self.seconds = seconds
        self.first_s = seconds
        self.config = config
        self.parts: list[tuple[int, int]] = []
        self.images: list[Tensor] = []

    def __call__(self, images: Tensor, labels: Tensor, *, part: int = 0, parts: int = 1) -> None:
        self.hand.time += self.seconds if self.parts else self.first_s
        self.parts.append((part, parts))
        self.images.append(images)

    def batches(self, feed: Iterable[HostBatch], clock: StepClock | None = None) -> DataPrefetcher:
        return device_batches(feed, self.config, DEVICE, clock)

    def forget(self) -> None:
        pass


def on_hand(step: Any, hand: Hand) -> TrainingBenchmark:
    """Trials of ``step`` on a fake clock."""
    trials = TrainingBenchmark(step)
    trials._now = hand
    return trials


class Counting(nn.Module):
    """Counts its calls in a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return images


def batch(size: int = 4, seed: int = 0) -> HostBatch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (size, 3, 8, 8), dtype=torch.uint8, generator=generator)
    return HostBatch(images, torch.randint(0, 5, (size,), generator=generator), torch.arange(size))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        Counting(),
        nn.Conv2d(3, 8, 3, 2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(72, 5),
    )


def make(config: Config, classes: int | None = None) -> Step:
    """A step over a small network with dropout and norm, the same each time."""
    model = network()
    return Step(make_state(config, 0, CPU, 50, network=model), classes)


def train(step: Step, config: Config, updates: int) -> None:
    """Plain training on as many batches as that takes, whose figures are read."""
    parts = config.trainer.accumulate_steps
    feed = [batch(seed=k) for k in range(updates * parts)]
    for k, (images, labels) in enumerate(device_batches(feed, config, DEVICE)):
        step(images, labels, part=k % parts, parts=parts)
    step.read()


def try_out(trials: TrainingBenchmark) -> None:
    """Some of every trial, and whatever else draws random numbers."""
    trials.demand(batch(), 0.2)
    trials.deliver(Endless(batch(seed=9)), 1, 0.2)
    random.random(), np.random.rand()


def plain(value: Any) -> Any:
    """``value`` with its tensors as numbers, ready to be compared."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.stride(), value.tolist()
    if isinstance(value, dict):
        return [(key, plain(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def everything(step: Step) -> dict[str, Any]:
    """All that a step may change, by name."""
    state = step.state
    schedule = state.schedule
    held = {
        "weights": dict(state.network.named_parameters()),
        "buffers": dict(state.network.named_buffers()),
        "gradients": [parameter.grad for parameter in state.network.parameters()],
        "modes": [module.training for module in state.network.modules()],
        "optimizer": state.optimizer.state_dict(),
        "schedule": [schedule.last_epoch, schedule.base_lrs, schedule.share(schedule.last_epoch)],
        "scaler": state.scaler.state_dict(),
        "counts": [state.epoch, state.step],
        "figures": [step._losses, step._found_inf, step._streak],
        "random": random_state(DEVICE),
    }
    return {name: plain(value) for name, value in held.items()}


def addresses(step: Step) -> list[int]:
    """Where each tensor of the state lies."""
    state = step.state
    tensors = [*state.network.parameters(), *state.network.buffers()]
    tensors += [
        value
        for values in state.optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    ]
    return [tensor.data_ptr() for tensor in tensors]


def settled(name: str = "sgd", precision: str = "fp32", parts: int = 1) -> Config:
    config = Config()
    config.optim.name = name
    config.trainer.precision = Precision[precision]
    config.optim.lr = 0.01
    config.trainer.accumulate_steps = parts
    # the rate changes with each update
    config.schedule.warmup_epochs = 1
    return config


CASES = pytest.mark.parametrize(
    ("config", "before"),
    [
        pytest.param(settled(), 0, id="sgd fresh"),
        pytest.param(settled(), 3, id="sgd after 3 updates"),
        pytest.param(settled("adamw"), 0, id="adamw fresh"),
        pytest.param(settled("adamw"), 3, id="adamw after 3 updates"),
        pytest.param(settled(precision="bf16"), 3, id="bf16"),
        pytest.param(settled("adamw", precision="fp16"), 0, id="fp16 fresh"),
        pytest.param(settled(precision="fp16"), 3, id="fp16 after 3 updates"),
        pytest.param(settled("adamw", parts=2), 3, id="two batches an update"),
    ],
)


@CASES
def test_all_is_as_before(config: Config, before: int) -> None:
    """After the block every value is as it was, in the tensor that held it."""
    step = make(config)
    train(step, config, before)
    # a norm that does not learn
    step.state.network[2].eval()
    trials = on_hand(step, Hand(0.02))
    was = everything(step)
    where = addresses(step)
    with trials.preserved_state():
        try_out(trials)
        changed = {name for name, value in everything(step).items() if value != was[name]}
    assert changed >= {"buffers", "modes", "optimizer", "schedule", "counts", "random"}
    assert everything(step) == was
    assert addresses(step) == where


def test_all_is_as_before_after_an_error() -> None:
    """An error half-way through an update ends the block like anything else."""
    config = settled(parts=2)
    step = make(config)
    train(step, config, 1)
    was = everything(step)
    trials = on_hand(step, Hand(0.02))
    with pytest.raises(LoaderError, match="third"), trials.preserved_state():
        trials.deliver(Endless(batch(), broken_at(3)), 0, 9.0)
    assert everything(step) == was


def test_weights_stand_still() -> None:
    """In the block the learning rate is 0, so that no batch can make NaNs."""
    step = make(settled("adamw"))
    weights = [parameter.detach().clone() for parameter in step.state.network.parameters()]
    trials = on_hand(step, Hand(0.02))
    with trials.preserved_state():
        try_out(trials)
        assert step.state.step > 5
        assert [group["lr"] for group in step.state.optimizer.param_groups] == [0.0, 0.0]
        assert all(
            torch.equal(a, b) for a, b in zip(weights, step.state.network.parameters(), strict=True)
        )


def timed(
    seconds: float, *, parts: int = 1, world: World = CPU
) -> tuple[TrainingBenchmark, TimedStep, Hand]:
    """Trials of a step that takes ``seconds`` of a fake clock."""
    hand = Hand()
    config = settled(parts=parts)
    config.data.image_size = 8
    step = TimedStep(hand, seconds, config, world)
    return on_hand(step, hand), step, hand


@pytest.mark.parametrize(
    ("seconds", "limit_s", "warm_up", "groups", "steps"),
    [
        pytest.param(2**-7, 8.0, 5, 20, 3, id="short: groups of 25 ms"),
        pytest.param(2**-4, 8.0, 5, 20, 1, id="a step is a group"),
        pytest.param(2**-4, 1.0, 5, 12, 1, id="the limit ends it"),
        pytest.param(0.75, 1.0, 2, 2, 1, id="long: two at least"),
        pytest.param(2.0, 1.0, 1, 1, 1, id="longer than the limit: the second step alone"),
    ],
)
def test_demand_is_groups_of_steps(
    seconds: float, limit_s: float, warm_up: int, groups: int, steps: int
) -> None:
    """Demand leaves the warm-up out, makes groups long enough to time, and stops in time."""
    trials, step, _ = timed(seconds)
    run = trials.demand(batch(), limit_s)
    assert run.images == (4 * steps,) * groups
    assert run.seconds == (seconds * steps,) * groups
    assert len(step.parts) == warm_up + groups * steps


def test_compiling_does_not_spend_the_limit() -> None:
    """The first step's time counts neither as the step's nor against the limit."""
    trials, step, hand = timed(2**-4)
    step.first_s = 60.0
    assert len(trials.demand(batch(), 8.0).seconds) == 20
    assert hand.time == 60 + 24 * 2**-4


@pytest.mark.parametrize(("parts", "steps"), [(3, 6), (4, 8), (6, 6), (7, 6)])
def test_groups_hold_whole_updates(parts: int, steps: int) -> None:
    """Each group has as many updates as the next, unless an update exceeds 25 ms."""
    trials, step, _ = timed(2**-8, parts=parts)
    run = trials.demand(batch(), 8.0)
    assert set(run.images) == {4 * steps}
    assert step.parts[:5] == [(0, 1)] * 5
    assert step.parts[5 : 5 + parts] == [(part, parts) for part in range(parts)]


def test_a_batch_reaches_the_step_as_in_training() -> None:
    """Demand's images are normalized, cast and laid out for each step, as the engine's."""
    trials, step, _ = timed(2**-4)
    trials._step.config.trainer.precision = Precision.bf16
    trials._step.config.trainer.channels_last = True
    trials.demand(batch(), 1.0)
    expected = next(device_batches([batch()], trials._step.config, DEVICE))[0]
    assert torch.equal(step.images[0], expected) and step.images[0].dtype == torch.bfloat16
    assert step.images[0].is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(images, expected) for images in step.images)
    assert len({images.data_ptr() for images in step.images}) == len(step.images)


def test_augmentation_is_part_of_a_trial() -> None:
    """Images of demand and of a feed are augmented and mixed as in training."""
    config = settled()
    config.augment = AugmentConfig(color_jitter=(0.4, 0.4, 0.4, 0.1), mixup=0.8)
    step = make(config, classes=5)
    expected = next(step.batches([batch()]))[0]
    seen = []
    step.state.network.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    trials = on_hand(step, Hand(0.02))
    with trials.preserved_state():
        trials.demand(batch(), 0.5)
        trials.deliver(Endless(batch()), 1, 0.5)
    assert len(seen) > 10
    assert all(torch.equal(images, expected) for images in seen)
    assert not torch.equal(expected, next(device_batches([batch()], config, DEVICE))[0])


def slow_feed(hand: Hand, seconds: float, first_s: float = 16.0) -> Endless:
    """A feed whose first batch takes ``first_s`` and every other one ``seconds``."""

    def before(k: int) -> None:
        hand.time += seconds if k else first_s

    return Endless(batch(), before)


@pytest.mark.parametrize(
    ("skip", "limit_s", "left_out", "measured"),
    [
        pytest.param(3, 6.0, 4, 12, id="skip"),
        pytest.param(0, 6.0, 1, 12, id="nothing to skip but the first"),
        pytest.param(99, 6.0, 5, 12, id="a third of the time"),
        pytest.param(9, 0.25, 2, 2, id="two at least"),
    ],
)
def test_deliver_is_steps_on_the_feed(
    skip: int, limit_s: float, left_out: int, measured: int
) -> None:
    """Deliver leaves out the first batches, then tells each step's time and wait."""
    trials, step, hand = timed(0.125)
    run = trials.deliver(slow_feed(hand, 0.375), skip, limit_s)
    assert run.images == (4,) * measured
    assert run.seconds == (0.5,) * measured
    assert run.stall_fraction == 0.75
    assert len(step.parts) == left_out + measured


def test_the_device_is_waited_for_at_the_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps do not wait for the device; its last work belongs to the last step."""
    trials, step, hand = timed(0.125)
    at: list[int] = []

    def wait(own: accelerator.Accelerator) -> None:
        at.append(len(step.parts))
        hand.time += 4.0

    monkeypatch.setattr(accelerator.Accelerator, "synchronize", wait)
    run = trials.deliver(slow_feed(hand, 0.375), 3, 2.0)
    # behind the first batch, the skipped ones and the measured ones
    assert at == [1, 3, 7]
    assert run.seconds == (0.5, 0.5, 0.5, 4.5)


def test_parts_go_on_over_the_feed() -> None:
    """With two batches an update every second step makes one."""
    trials, step, hand = timed(0.125, parts=2)
    trials.deliver(slow_feed(hand, 0.375), 0, 2.0)
    assert step.parts == [(0, 2), (1, 2), (0, 2), (1, 2), (0, 2)]


def test_a_signal_ends_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single rank looks for signals at each step."""
    monkeypatch.setattr(signals, "_received", [(15, 0.0)])
    trials, step, _ = timed(0.125)
    for run in (
        lambda: trials.demand(batch(), 1.0),
        lambda: trials.deliver(Endless(batch()), 0, 1.0),
    ):
        with pytest.raises(Interrupted, match="stopped by SIGTERM"):
            run()
    assert len(step.parts) == 2


def broken_at(number: int) -> Callable[[int], None]:
    def before(k: int) -> None:
        if k == number:
            raise LoaderError("the third")

    return before


def test_the_pass_ends_and_the_feed_stays_open() -> None:
    """Deliver ends its pass, after an error too; the feed is its owner's to close."""
    trials, _, _ = timed(0.125)
    feed = Endless(batch())
    trials.deliver(feed, 0, 1.0)
    broken = Endless(batch(), broken_at(3))
    with pytest.raises(LoaderError, match="the third"):
        trials.deliver(broken, 0, 9.0)
    assert (feed.ended, feed.closed, broken.ended, broken.closed) == (1, 0, 1, 0)


class Two(World):
    """The first of two ranks; the other's feed fails after ``other_fails`` agreements."""

    told: list[Any]
    other_fails: int

    def largest(self, *values: float) -> list[float]:
        ends, block = values
        self.told.append((ends, block))
        return [max(ends, len(self.told) > self.other_fails), block]

    def agreed(self, value: Any) -> Any:
        return value


def two(other_fails: int = 99) -> Two:
    world = Two(0, 2, 0, 2, DEVICE)
    for name, value in {"told": [], "other_fails": other_fails}.items():
        object.__setattr__(world, name, value)
    return world


def test_ranks_agree_now_and_then() -> None:
    """Blocks between agreements at most double, up to 0.2 s, within the skip."""
    world = two()
    trials, step, hand = timed(2**-6, world=world)
    run = trials.deliver(slow_feed(hand, 2**-6), 5, 1.0)
    assert [block for ends, block in world.told if not ends] == [1, 1, 2, 2, 1, 2, 4, 6, 6, 6, 6, 6]
    assert len(step.parts) == 1 + 5 + len(run.seconds)
    assert sum(run.seconds) >= 1.0


def test_a_rank_whose_feed_fails_steps_on_until_all_stop() -> None:
    """The failed rank makes the agreed steps on zeros, and raises after them."""
    world = two()
    trials, step, _ = timed(2**-4, world=world)
    with pytest.raises(LoaderError, match="the third"):
        trials.deliver(Endless(batch(), broken_at(2)), 0, 9.0)
    # the first batch, a block of one, a block of two whose first has no batch
    assert len(step.parts) == 1 + 1 + 2
    zeros = next(
        device_batches(
            [batch()._replace(images=torch.zeros(4, 3, 8, 8, dtype=torch.uint8))],
            trials._step.config,
            DEVICE,
        )
    )
    assert [torch.equal(images, zeros[0]) for images in step.images] == [False, False, True, True]


def test_a_rank_returns_where_another_ones_feed_fails() -> None:
    """The other ranks give what there was until the ranks agreed to stop."""
    trials, _, hand = timed(0.125, world=two(other_fails=4))
    run = trials.deliver(slow_feed(hand, 0.375), 0, 9.0)
    # fewer than the two that are the least otherwise
    assert run.seconds == (0.5,)


def test_gradients_that_were_there_come_back() -> None:
    """Gradients at the start of the block are back at its end."""
    config = settled(parts=2)
    step = make(config)
    images, labels = next(device_batches([batch()], config, DEVICE))
    step(images, labels, part=0, parts=2)
    step.read()
    was = everything(step)
    where = [parameter.grad for parameter in step.state.network.parameters()]
    trials = on_hand(step, Hand(0.02))
    with trials.preserved_state():
        try_out(trials)
    assert everything(step) == was
    assert all(
        p.grad is grad for p, grad in zip(step.state.network.parameters(), where, strict=True)
    )


def test_a_scaler_whose_update_was_cut_off_goes_on() -> None:
    """Out of memory between ``unscale_`` and ``update``: the next update begins anew."""
    network = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):
        snapshot = Snapshot((network, optimizer, scaler), torch.device("cpu"))
        scaler.scale(network(torch.ones(4, 3)).sum()).backward()
        # refuses a second call before an update
        scaler.unscale_(optimizer)
        snapshot.restore()
