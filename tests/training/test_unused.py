"""Parameters without a gradient on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.config import Config, ConfigError
from harness.runtime.distributed import World
from harness.training.state import make_state
from harness.training.step import Step


class Forgot(nn.Module):
    """A layer is made, and not used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.head(images.mean((2, 3)))
        return found


@pytest.fixture(autouse=True)
def _group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/x", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_unused_parameters_are_named_and_the_setting_trains_them() -> None:
    """The line names them by name; the setting that it advises trains on."""
    config = Config()
    world = World(0, 2, 0, 2, torch.device("cpu"))
    batch = torch.zeros(2, 3, 8, 8), torch.tensor([0, 1])
    step = Step(make_state(config, 2, world, 4, network=Forgot()), 2)
    step(*batch)
    with pytest.raises(ConfigError, match=r"norm\.weight, norm\.bias") as caught:
        step(*batch)
    assert "dist.find_unused_parameters=true" in str(caught.value)
    config.dist.find_unused_parameters = True
    step = Step(make_state(config, 2, world, 4, network=Forgot()), 2)
    for _ in range(3):
        step(*batch)
    assert step.state.step == 3
