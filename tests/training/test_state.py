"""What a run trains, as it is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from harness.config import Config, ModelConfig, TrainerConfig
from harness.runtime.distributed import World
from harness.training.state import make_state


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)
def test_each_size_of_batches_is_compiled_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """No size of batches makes torch.compile serve all sizes by one graph."""
    graphs: list[Any] = []
    compile_ = nn.Module.compile

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(
        nn.Module, "compile", lambda network, **how: compile_(network, backend=counted, **how)
    )
    config = Config(trainer=TrainerConfig(compile=True), model=ModelConfig(name="small"))
    network = make_state(config, 10, World(0, 1, 0, 1, torch.device("cpu")), 1).network
    for size in (2, 3, 4, 2, 3):
        network(torch.zeros(size, 3, 64, 64))
    assert len(graphs) == 3
