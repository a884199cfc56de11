"""``tune`` in a loop of one's own."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import samples
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, default_collate

from harness.config import ConfigError, TunerConfig, TunerName
from harness.runtime.errors import BadSample
from harness.tuning.library import tune

QUICK = TunerConfig(budget_s=2.0, max_workers=2)


class Pairs(Dataset[Any]):
    """Numbers and their double; sample ``bad`` raises."""

    def __init__(self, length: int = 400, bad: int | None = None) -> None:
        self.length, self.bad = length, bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.bad:
            raise KeyError("no such number")
        return {"x": torch.full((4,), index / 400), "y": torch.full((1,), index / 200)}


class PairsAtOnce(Pairs):
    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        return [self[index] for index in indices]


def test_any_loop_can_tune_its_loader() -> None:
    """The answer is what DataLoader takes, and nothing that the step changed, and no random number,
    is used up.
    """
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    seen: list[int] = []

    def step(batch: dict[str, torch.Tensor]) -> None:
        seen.append(len(batch["x"]))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
        schedule.step()

    before = copy.deepcopy((model.state_dict(), schedule.state_dict()))
    random = torch.get_rng_state()
    report = tune(
        PairsAtOnce(),
        step,
        batch_size=16,
        state=(model, optimizer, schedule),
        start_method="forkserver",
        config=QUICK,
    )
    assert len(seen) > 5 and set(seen) == {16}
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before[0].items())
    assert schedule.state_dict() == before[1] and not optimizer.state_dict()["state"]
    assert torch.equal(torch.get_rng_state(), random)
    loader = DataLoader(Pairs(), shuffle=True, **report.loader_arguments)
    assert (loader.num_workers, loader.batch_size) == (report.settings.num_workers, 16)
    assert report.demand is not None and not samples.left_behind()


def test_a_device_of_another_type_is_refused() -> None:
    """Steps whose end nothing tells have no speed: none is measured."""
    with pytest.raises(ConfigError, match="device=xpu"):
        tune(Pairs(), lambda batch: None, batch_size=16, device="xpu", config=QUICK)


def test_an_error_of_the_data_set_is_told_as_it_is() -> None:
    """With the type and the text that the data set gave it."""
    with pytest.raises(BadSample, match="KeyError: 'no such number'"):
        tune(
            Pairs(20, bad=7), lambda _: None, batch_size=4, start_method="forkserver", config=QUICK
        )
    assert not samples.left_behind()


def test_a_batch_without_samples_is_refused() -> None:
    """With what may be chosen."""
    with pytest.raises(ValueError, match="batch_size=0: choose 1 to 400"):
        tune(Pairs(), lambda _: None, batch_size=0, config=QUICK)


@pytest.mark.parametrize("workers", [0, 2])
def test_memory_that_runs_out_is_no_sample_s_fault(workers: int) -> None:
    """In a worker or in this process, the setting is refused."""
    grid = TunerConfig(name=TunerName.grid, budget_s=0.01)
    report = tune(
        Greedy(), lambda _: None, batch_size=4, num_workers=workers, start_method="forkserver",
        config=grid,
    )  # fmt: skip
    assert {trial.refused for trial in report.trials} == {"MemoryError: no room"}


class Greedy(Pairs):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        raise MemoryError("no room")


def test_what_cannot_be_put_back_is_refused() -> None:
    """Before anything is measured."""
    with pytest.raises(TypeError, match="dict has no state_dict"):
        tune(Pairs(), lambda _: None, batch_size=4, state=({},), config=QUICK)


def as_packed(rows: list[dict[str, torch.Tensor]]) -> PackedSequence:
    return pack_sequence([row["x"].flatten() for row in rows])


def as_defaults(rows: list[dict[str, torch.Tensor]]) -> defaultdict[str, torch.Tensor]:
    return defaultdict(torch.Tensor, default_collate(rows))


def as_tuple(rows: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    whole = default_collate(rows)
    return whole["x"], whole["y"]


@pytest.mark.parametrize(
    ("collate", "kind", "workers"),
    [
        (as_tuple, tuple, 0),
        (as_tuple, tuple, 1),
        # whose type wants a function first
        (as_defaults, defaultdict, 0),
        # whose parts are checked
        (as_packed, PackedSequence, 0),
    ],
)
def test_batches_are_those_of_the_callers_collate(collate: Any, kind: type, workers: int) -> None:
    """The step gets what its own loader would give it, a copy for each step."""
    seen: list[Any] = []
    tune(
        Pairs(), seen.append, batch_size=8, collate_fn=collate,
        num_workers=workers, start_method="forkserver", config=QUICK,
    )  # fmt: skip
    assert {type(batch) for batch in seen} == {kind}
    first, second = (
        [x for x in tree_leaves(batch) if isinstance(x, torch.Tensor)] for batch in seen[:2]
    )
    assert first[0].data_ptr() != second[0].data_ptr()
