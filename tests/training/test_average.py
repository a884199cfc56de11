"""The average of the weights: torch's own, without what was skipped."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.config import Config, ConfigError, Precision, to_plain
from harness.runtime.distributed import World
from harness.runtime.errors import CheckpointError
from harness.training import weights
from harness.training.average import Average
from harness.training.checkpoint_read import Saved
from harness.training.optimizer import lr_factor
from harness.training.state import TrainState, make_state
from harness.training.step import Step
from harness.tuning.training_steps import TrainingBenchmark

CPU = World(0, 1, 0, 1, torch.device("cpu"))
FACTS: dict[str, Any] = {"classes": ["a"], "ranks": 1, "length": 100, "stop": 96}
pytestmark = pytest.mark.usefixtures("one_thread")


def network() -> nn.Module:
    """Odd sizes, norms, channels last, and integer buffers; the same each time."""
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Conv2d(3, 7, 3, 2), nn.BatchNorm2d(7), nn.ReLU(), nn.Flatten(), nn.Linear(175, 5)
    )
    return made.to(memory_format=torch.channels_last)


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of noise, the same each time."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        images = torch.randn(9, 3, 12, 12, generator=generator)
        yield images, torch.randint(0, 5, (9,), generator=generator)


def settled(**optim: Any) -> Config:
    config = Config()
    config.optim.ema_decay = 0.9
    config.optim.lr = 0.05
    for name, value in optim.items():
        setattr(config.optim, name, value)
    return config


def make(config: Config) -> Step:
    """A step over a fresh network."""
    return Step(make_state(config, 0, CPU, 50, network=network()), 5)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether both have the same keys and bits."""
    return one.keys() == other.keys() and all(
        value.numpy().tobytes() == other[key].numpy().tobytes() for key, value in one.items()
    )


def averaged(step: Step) -> dict[str, Tensor]:
    assert step.state.average is not None
    return copy.deepcopy(step.state.average.state_dict())


@pytest.mark.parametrize(
    ("bad", "stop"), [((), None), ((), 7), ((0, 1), 1), ((0, 5), 7), ((7, 14), None)], ids=str
)
def test_it_is_torchs_in_a_loop_written_out(bad: tuple[int, ...], stop: int | None) -> None:
    """Bitwise, integer buffers and count too; skipped updates change nothing, nor does a resume."""
    step = make(settled())
    for number, (images, labels) in enumerate(batches(15)):
        if number == stop:
            saved = copy.deepcopy(step.state.to_dict(FACTS | {"settings": to_plain(settled())}))
            step = make(settled())
            step.state.load(Saved("step-7.pt", saved))
        if number in bad:
            labels = torch.full((9,), math.nan).unsqueeze(1).expand(9, 5)
        before = averaged(step)
        step(images, labels)
        assert same(before, averaged(step)) is (number in bad)
        if number % 5 == 4:
            step.read()

    model = network()
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.ndim >= 2]},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        0.05, momentum=0.9, weight_decay=1e-4, fused=True,
    )  # fmt: skip
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for number, (images, labels) in enumerate(batches(15)):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * lr_factor(number, settled().schedule, 10, 50)
        loss = F.cross_entropy(model(images), labels)
        if number not in bad:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
    assert same(step.state.network.state_dict(), model.state_dict())
    assert same(averaged(step), average.state_dict())


def test_statistics_that_a_skipped_step_spoilt_stay_out() -> None:
    """Images of NaN make the norms' statistics NaN; the average has the ones before."""
    step = make(settled())
    (images, labels), (more, more_labels) = batches(2)
    step(images, labels)
    before = averaged(step)
    step(more * math.nan, more_labels)
    assert same(averaged(step), before)
    assert step.state.network[1].running_mean.isnan().all()


def test_a_scaled_loss_that_overflows_leaves_it() -> None:
    """In fp16 the scaler's own skipped updates are left out, and the others taken in."""
    config = settled()
    config.trainer.precision = Precision.fp16
    step = make(config)
    for factor, count in ((1.0, 1), (math.inf, 1), (1.0, 2)):
        step(next(batches(1))[0] * factor, next(batches(1))[1])
        assert averaged(step)["n_averaged"] == count


def test_trials_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are only timed do not change it."""
    step = make(settled())
    step(*next(batches(1)))
    before = averaged(step)
    with TrainingBenchmark(step).preserved_state():
        step(*next(batches(1)))
    assert same(averaged(step), before)


class NoWait(TorchDispatchMode):
    """Refuses what makes the host wait for a device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert "_local_scalar_dense" not in str(func)
        return func(*args, **(kwargs or {}))


def test_the_host_does_not_wait_for_it() -> None:
    """Nothing is read from the device, from the first update on."""
    average = Average(network(), 0.5)
    found_inf = torch.zeros(())
    with NoWait():
        for _ in range(2):
            average.update(network(), found_inf)
    with pytest.raises(AssertionError), NoWait():
        found_inf.item()


def taken(state: TrainState) -> dict[str, torch.Tensor]:
    """What a network takes of a checkpoint."""
    return weights.find(state.to_dict({}), state.network, "x")[0]


def test_it_is_what_is_evaluated_and_loaded() -> None:
    """Evaluation and what loads a network take the average; without one they take the weights."""
    step = make(settled())
    for batch in batches(3):
        step(*batch)
    assert step.state.average is not None
    assert step.state.evaluated is step.state.average.module
    held = taken(step.state)
    assert same(held, step.state.average.module.state_dict())
    plain = make(settled(ema_decay=None)).state
    assert plain.evaluated is plain.network
    assert same(taken(plain), plain.network.state_dict())


@pytest.mark.parametrize("ours", [True, False])
def test_a_run_may_begin_or_end_to_average(ours: bool) -> None:
    """Without an average in the checkpoint it begins with the weights there; else it is left."""
    step = make(settled(ema_decay=None if ours else 0.9))
    step(*next(batches(1)))
    saved = step.state.to_dict(FACTS | {"settings": to_plain(settled())})
    fresh = make(settled(ema_decay=0.9 if ours else None)).state
    fresh.load(Saved("x", saved))
    assert same(fresh.evaluated.state_dict(), step.state.network.state_dict())


def broken(change: Callable[[dict[str, Any]], None]) -> tuple[TrainState, dict[str, Any]]:
    """A fresh state, and a checkpoint whose average is ``change``d."""
    step = make(settled())
    step(*next(batches(1)))
    saved = copy.deepcopy(step.state.to_dict(FACTS | {"settings": to_plain(settled())}))
    change(saved)
    return make(settled()).state, saved


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: s.update(ema=5), "n_averaged is missing"),
        (lambda s: s["ema"].update(n_averaged=1), "n_averaged is not a dense CPU tensor"),
        (lambda s: s["ema"].pop("n_averaged"), "n_averaged is missing"),
        (lambda s: s["ema"].pop("module.0.weight"), "module.0.weight is missing"),
    ],
    ids=["number", "count", "no count", "no weight"],
)
def test_an_odd_average_is_refused(change: Callable[[dict[str, Any]], None], text: str) -> None:
    """Before anything is taken over."""
    state, saved = broken(change)
    before = copy.deepcopy(state.network.state_dict())
    with pytest.raises(CheckpointError, match=text):
        state.load(Saved("x.pt", saved))
    assert same(state.network.state_dict(), before)


def test_a_network_that_cannot_be_copied_is_named() -> None:
    """One line with setting, network and reason."""
    model = network()
    model.register_buffer("kept", model[0].weight * 2, persistent=False)
    with pytest.raises(ConfigError, match=r"optim.ema_decay=0.9: model.name=small cannot be"):
        make_state(settled(), 0, CPU, 50, network=model)


@pytest.mark.parametrize(("decay", "told"), [(0.9, False), (0.9999, True)])
def test_an_average_over_too_few_steps_is_told(
    decay: float, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The console has a decay that suits the run's steps."""
    config = settled(ema_decay=decay)
    config.trainer.epochs = 2
    make_state(config, 0, CPU, 50, network=network())
    assert ("optim.ema_decay=0.95" in capsys.readouterr().out) is told
