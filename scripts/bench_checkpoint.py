"""Measures what a save in the background costs training.

How long it blocks a step, and how long steps take beside it.

"copy" is ``copy_`` of every tensor into new memory, the least that a save which lets training go on
can do. The training step is a small convolutional network on torch's threads; steps beside a save
and steps without one alternate by save.

    uv run scripts/bench_checkpoint.py
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from harness.config import Config
from harness.feed.order import Order
from harness.runtime.distributed import World
from harness.training.checkpoint_write import CheckpointWriter
from scripts.measured import Sample, machine, machine_line, markdown, parser, write
from scripts.paired import Estimate

TENSORS = 200
MOST_STEPS = 100


def make_state(megabytes: int) -> dict[str, Any]:
    """A network's and its momentum's tensors, of ``megabytes`` together."""
    each = megabytes * 250_000 // (2 * TENSORS)
    return {
        part: {f"layer{i}": torch.randn(each) for i in range(TENSORS)}
        for part in ("model", "momentum")
    }


def copied(state: dict[str, dict[str, Tensor]]) -> list[Tensor]:
    """Every tensor, in new memory."""
    return [
        torch.empty_like(tensor).copy_(tensor)
        for part in state.values()
        for tensor in part.values()
    ]


def make_step() -> Callable[[], None]:
    """A training step of some 30 ms a core."""
    network = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(10),
    )
    images = torch.randn(16, 3, 64, 64)
    network(images)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        network(images).square().mean().backward()
        optimizer.step()

    return step


def timed_ms(work: Callable[[], object]) -> float:
    """How long ``work`` takes; its result is dropped within that time."""
    began_s = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began_s)


def compare(megabytes: int, pairs: int, folder: Path) -> dict[str, Any]:
    """A row of the table: ``pairs`` saves of a state of ``megabytes``."""
    state = make_state(megabytes)
    step = make_step()
    run: Any = SimpleNamespace(
        step=0,
        epoch=0,
        pending=False,
        config=Config(),
        world=World(0, 1, 0, 1, torch.device("cpu")),
        to_dict=lambda facts: {**facts, **state, "step": run.step, "epoch": 0},
    )
    saves = CheckpointWriter(run, Order(10, 10), folder / str(megabytes), ())
    ms: dict[str, list[float]] = {
        name: [] for name in ("copy", "save", "written", "step", "step beside")
    }
    for _ in range(5):
        step()
    for pair in range(pairs):
        run.step += 1
        # the copy comes before the save and after it in turns
        if pair % 2:
            ms["copy"].append(timed_ms(lambda: copied(state)))
        began_s = time.perf_counter()
        ms["save"].append(timed_ms(saves.save))
        # steps while the save is under way, one at least
        beside: list[float] = []
        while (saves._last is not None and not saves._last.done()) or not beside:
            beside.append(timed_ms(step))
        saves.check(waits=True)
        ms["written"].append(1e3 * (time.perf_counter() - began_s))
        ms["step beside"].append(sum(beside) / len(beside))
        # as many steps without a save
        alone = [timed_ms(step) for _ in beside[:MOST_STEPS]]
        ms["step"].append(sum(alone) / len(alone))
        if not pair % 2:
            ms["copy"].append(timed_ms(lambda: copied(state)))
    saves.close()
    row: dict[str, Any] = {"MB": megabytes} | {
        f"{name}, ms": Sample.of(values) for name, values in ms.items()
    }
    for after, before in (("save", "copy"), ("step beside", "step")):
        row[f"{after} / {before}"] = f"{Estimate.ratio(ms[after], ms[before]):.2f}"
    return row


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("Measure what saving in the background costs the training step.")
    add = options.add_argument
    add("--megabytes", type=int, nargs="+", default=[100, 1000], help="sizes of a state")
    add("-n", type=int, default=10, help="pairs of each size")
    add("--folder", type=Path, help="where checkpoints go; by default a temporary folder")
    a = options.parse_args(argv)
    found = machine()
    print(machine_line(found))
    print(
        f"n={a.n} in turns; median (quartiles) of saves, ratio of pairs [95 %]; steps are the mean "
        "beside one save\n"
    )
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        rows = [compare(megabytes, a.n, Path(folder)) for megabytes in a.megabytes]
    print(markdown(rows))
    if a.json:
        write(a.json, {"machine": found, "n": a.n, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
