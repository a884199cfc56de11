"""Contents with a right digest that no run saves are refused by name."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from harness.config import Config, Precision, to_plain
from harness.runtime.distributed import World
from harness.runtime.errors import CheckpointError
from harness.training.checkpoint_read import Saved
from harness.training.state import TrainState, make_state

ALONE = World(0, 1, 0, 1, torch.device("cpu"))
CLASSES = ("ant", "bee")
# What a run adds to its state, besides its settings.
FACTS: dict[str, Any] = {"classes": list(CLASSES), "ranks": 1, "length": 100, "stop": 96}
Contents = dict[str, Any]


@cache
def _trained(optimizer: str, precision: Precision) -> tuple[TrainState, Contents]:
    config = Config()
    config.model.name = "small"
    config.optim.name = optimizer
    config.trainer.precision = precision
    state = make_state(config, len(CLASSES), ALONE, 10)
    update(state)
    saved = copy.deepcopy(state.to_dict(FACTS | {"settings": to_plain(config)}))
    # What is loaded must not be what is there already.
    update(state)
    return state, saved


def update(state: TrainState) -> None:
    """One update."""
    state.network(torch.rand(2, 3, 16, 16)).sum().backward()
    state.optimizer.step()
    state.schedule.step()
    state.optimizer.zero_grad()
    state.step += 1


def trained(optimizer: str, precision: Precision = Precision.fp32) -> tuple[TrainState, Contents]:
    """A state after two updates, to be left alone, and what it saved after one."""
    state, saved = _trained(optimizer, precision)
    return state, copy.deepcopy(saved)


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def put(path: str, value: Any) -> Callable[[Contents], None]:
    """Lets ``value`` be, or make, what a checkpoint holds at ``path``."""
    above = [int(key) if key.lstrip("-").isdigit() else key for key in path.split("/")]
    last = above.pop()

    def change(saved: Contents) -> None:
        place: Any = saved
        for key in above:
            place = place[key]
        place[last] = value(place[last]) if callable(value) else value

    return change


WEIGHT = "model/0.weight"
EVERYWHERE = (
    "model",
    "optimizer",
    "schedule",
    "settings",
    "random",
    "classes",
    "epoch",
    "step",
)
ODD = {
    **{
        f"{part}={value!r}": put(part, value)
        for part in EVERYWHERE
        for value in (None, 5.5, [5], {"x": 1})
        if (part, value) != ("classes", {"x": 1})
    },
    **{f"{part}={{}}": put(part, {}) for part in ("model", "optimizer", "schedule", "random")},
    **{
        f"{count}={value!r}": put(count, value)
        for count in ("epoch", "step")
        for value in ("x", -5, True, 10**400, math.nan)
    },
    "classes=5": put("classes", 5),
    "no weights": put(WEIGHT, 5),
    "sparse weights": put(WEIGHT, lambda w: w.to_sparse()),
    "meta weights": put(WEIGHT, lambda w: w.to("meta")),
    "complex weights": put(WEIGHT, lambda w: w.to(torch.complex64)),
    "integer weights": put(WEIGHT, torch.Tensor.char),
    "expanded weights": put(WEIGHT, lambda w: torch.zeros(1).expand(w.shape)),
    "optimizer state x": put("optimizer/state", "x"),
    "optimizer state of a parameter": put("optimizer/state/0", "x"),
    "no groups": put("optimizer/param_groups", 5),
    "odd groups": put("optimizer/param_groups/0", "x"),
    "odd numbers": put("optimizer/param_groups/0/params/0", 3),
    "odd number": put("optimizer/param_groups/0/params/0", "x"),
    "schedule of texts": put("schedule/last_epoch", "x"),
    "schedule before the start": put("schedule/last_epoch", -7),
    "settings of numbers": put("settings/trainer", 5),
    "torch state of another size": put("random/torch", lambda s: s[:-1]),
    "torch state of another kind": put("random/torch", lambda s: s.float()),
    "numpy state of another size": put("random/numpy/keys", lambda s: s[:-1]),
    "numpy position": put("random/numpy/position", 10**6),
    "numpy kind": put("random/numpy/kind", "x"),
    "python state of another size": put("random/python", (3, (1, 2), None)),
    "python version": put("random/python", (9, (1, 2), None)),
}
SCALER = {
    "none": put("scaler", None),
    "empty": put("scaler", {}),
    "text": put("scaler/scale", "x"),
    "half an interval": put("scaler/growth_interval", 5.5),
    "tracker of 64 bits": put("scaler/_growth_tracker", 2**40),
    "a scale alone": put("scaler", lambda s: {"scale": s["scale"]}),
    "scale is not finite": put("scaler/scale", math.inf),
}
MOMENTUM = {
    "text": "x",
    "none": None,
    "other shape": lambda m: m.flatten()[:1],
    "sparse": lambda m: m.to_sparse(),
    "meta": lambda m: m.to("meta"),
    "complex": lambda m: m.to(torch.complex64),
    "integers": torch.Tensor.int,
    "expanded": lambda m: torch.zeros(1).expand(m.shape),
}


def refused(state: TrainState, saved: Contents) -> str:
    """Returns the line by which ``saved`` is refused."""
    with pytest.raises(CheckpointError) as caught:
        state.load(Saved("step-3.pt", saved))
    text = str(caught.value)
    assert text.startswith("step-3.pt: ") and text.isprintable() and len(text) < 500
    return text


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("change", ODD.values(), ids=ODD.keys())
def test_odd_contents_are_refused(change: Callable[[Contents], None]) -> None:
    """One line names the file and the way out."""
    state, saved = trained("sgd")
    change(saved)
    refused(state, saved)


@pytest.mark.parametrize("change", SCALER.values(), ids=SCALER.keys())
def test_an_odd_loss_scale_is_refused(change: Callable[[Contents], None]) -> None:
    """Where the precision is fp16, as it was."""
    state, saved = trained("sgd", Precision.fp16)
    change(saved)
    refused(state, saved)


@pytest.mark.parametrize("value", MOMENTUM.values(), ids=MOMENTUM.keys())
@pytest.mark.parametrize(
    ("optimizer", "key"),
    [("sgd", "momentum_buffer"), ("adamw", "exp_avg"), ("adamw", "exp_avg_sq")],
)
def test_odd_momentum_is_refused(optimizer: str, key: str, value: Any) -> None:
    """What would end the first update, or be misread, is found before it."""
    state, saved = trained(optimizer)
    put(f"optimizer/state/1/{key}", value)(saved)
    refused(state, saved)


def test_a_lost_momentum_is_refused() -> None:
    """A parameter whose state lacks what the others' have would end the first update."""
    state, saved = trained("adamw")
    del saved["optimizer"]["state"][2]["exp_avg"]
    refused(state, saved)


@pytest.mark.parametrize(("key", "like"), [("step", "exp_avg"), ("exp_avg", "step")])
def test_a_shape_that_another_part_has_is_refused(key: str, like: str) -> None:
    """The fused kernels would read beyond a single number."""
    state, saved = trained("adamw")
    held = saved["optimizer"]["state"][1]
    held[key] = held[like]
    refused(state, saved)


@pytest.mark.parametrize("parameter", [0, 2])
def test_a_momentum_of_some_parameters_is_refused(parameter: int) -> None:
    """An empty state is none that a run saves."""
    state, saved = trained("sgd")
    held = saved["optimizer"]["state"]
    held[parameter] = {}
    refused(state, saved)


@pytest.mark.parametrize("lost", [(0,), (2,), (0, 1, 2, 3)], ids=str)
def test_parameters_without_a_momentum_begin_with_zeros(lost: tuple[int, ...]) -> None:
    """Those that had no gradient, or all after a run without momentum: updates go on."""
    state, saved = trained("sgd")
    _trained.cache_clear()
    held = saved["optimizer"]["state"]
    for number in lost:
        del held[number]
    state.load(Saved("step-3.pt", saved))
    kept = state.optimizer.state_dict()["state"]
    assert [number for number in kept if not kept[number]["momentum_buffer"].any()] == [*lost]
    update(state)


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_what_a_run_saves_is_taken_over(optimizer: str, precision: Precision) -> None:
    """A fresh state takes all of it, whatever the optimizer and the precision."""
    _, saved = trained(optimizer, precision)
    _trained.cache_clear()
    fresh, _ = trained(optimizer, precision)
    fresh.load(Saved("step-3.pt", saved))
    assert same(fresh.to_dict(FACTS | {"settings": saved["settings"]}), saved)


def test_weights_that_are_not_finite_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """They are resumed, with a warning that names the first tensor."""
    state, saved = trained("sgd")
    _trained.cache_clear()
    saved["model"]["0.weight"][0] = math.nan
    state.load(Saved("step-3.pt", saved))
    (warned,) = caplog.messages
    assert warned.startswith("step-3.pt: model.0.weight ") and "NaN" in warned


@pytest.mark.parametrize(
    "odd",
    [
        {"classes": 5},
        {"classes": [5]},
        {"epoch": "x"},
        {"epoch": -5},
        {"step": 1.5},
        {"step": None},
    ],
    ids=str,
)
def test_what_evaluation_reads_is_checked(odd: Contents) -> None:
    """Without a state to fill, counts and classes are looked at, and nothing else."""
    with pytest.raises(CheckpointError, match="^x.pt: cannot be used: "):
        Saved("x.pt", {"model": None} | odd)
    Saved("x.pt", {"model": None, "epoch": 3, "step": 4, "classes": ["a"]})
