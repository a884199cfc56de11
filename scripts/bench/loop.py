"""Measures the harness's overhead over a hand-written PyTorch loop on the same cached batches.

Two identical networks train on the same batches, one through ``harness.training.engine.Engine`` as
``train.py`` wires it (clock, TensorBoard, ``metrics.jsonl``, host sampler), one in a hand-written
loop that only reads its loss as often as the harness does. Their epochs alternate, and so does
the order. As a control, the hand-written loop also runs against a copy of itself; that ratio's
deviation from 1 is the noise of this machine. At the end the weights are compared, to confirm that
both did the same work.

    uv run python -m scripts.bench.loop
"""

from __future__ import annotations

import gc
import io
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from harness.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LoaderConfig,
    ModelConfig,
    ScheduleConfig,
    ScheduleName,
    TrainerConfig,
    WatchConfig,
)
from harness.data.datasets import FakeDataset, Splits
from harness.feed.base import Backend, FeedSettings, HostBatch
from harness.feed.feeds import Feeds
from harness.feed.order import Order
from harness.monitor import monitor
from harness.runtime import distributed, folder, limits, seeding
from harness.runtime.distributed import World
from harness.training import models
from harness.training.engine import Engine
from harness.training.state import make_state
from harness.training.step import Step
from scripts.bench.paired import Estimate
from scripts.bench.tables import Sample, machine, machine_line, markdown, parser, write

CLASSES = 10
# harness / hand-written: the interval must not be entirely below
FLOOR = 0.98

Epoch = Callable[[], object]


class CachedFeed(Backend):
    """A feed with preloaded batches."""

    def __init__(self, batches: Sequence[HostBatch], settings: FeedSettings) -> None:
        super().__init__(Order(len(batches) * settings.batch_size, settings.batch_size), settings)
        self.batches = batches
        self.coming: Iterator[HostBatch] = iter(())

    def begin(self, epoch: int, first: int = 0) -> None:
        """As in ``Backend``."""
        self.coming = iter(self.batches[first:])

    def take(self, poll_s: float) -> HostBatch:
        """As in ``Backend``."""
        return next(self.coming)


class HandWritten:
    """A careful hand-written loop: the least code around the same training."""

    def __init__(self, config: Config, batches: Sequence[HostBatch], device: torch.device) -> None:
        seeding.seed_everything(config.seed)
        self.network = models.build(config.model, CLASSES, image_size=config.data.image_size).to(
            device
        )
        weights = [p for p in self.network.parameters() if p.ndim >= 2]
        others = [p for p in self.network.parameters() if p.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"params": weights},
            {"params": others, "weight_decay": 0.0},
        ]
        o = config.optim
        self.optimizer = torch.optim.SGD(
            groups,
            lr=o.lr,
            momentum=o.momentum,
            weight_decay=o.weight_decay,
            nesterov=o.nesterov,
            fused=True,
        )
        self.mean = torch.tensor([255 * m for m in config.data.mean], device=device).view(
            1, 3, 1, 1
        )
        self.scale = torch.tensor([1 / (255 * s) for s in config.data.std], device=device).view(
            1, 3, 1, 1
        )
        self.batches = batches
        self.device = device
        self.window = config.watch.window_steps

    def epoch(self) -> None:
        """Trains on every batch once."""
        self.network.train()
        for done, batch in enumerate(self.batches, 1):
            images = batch.images.to(self.device, non_blocking=True).sub(self.mean).mul_(self.scale)
            labels = batch.labels.to(self.device, non_blocking=True)
            loss = F.cross_entropy(self.network(images), labels)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if done % self.window == 0 or done == len(self.batches):
                loss.item()


@contextmanager
def harness_engine(
    config: Config, batches: Sequence[HostBatch], world: World, place: Path
) -> Iterator[Engine]:
    """Yields an engine on cached batches, built and monitored as in ``train.py``."""
    with folder.logging_to(place):
        seeding.seed_everything(config.seed)
        splits = Splits(FakeDataset(1, 1), FakeDataset(1, 1), (), "fake", "")
        settings = Feeds(splits, config, world).settings(limits.measure())
        state = make_state(config, CLASSES, world, len(batches))
        with monitor.watched(config, world, place, time.perf_counter()) as watch:
            feed = CachedFeed(batches, settings)
            val_feed = CachedFeed(batches[:1], settings)
            step = Step(state)
            engine = Engine(
                step,
                lambda size: feed,
                val_feed,
                watch,
                place,
                tuple(map(str, range(CLASSES))),
            )
            try:
                yield engine
            finally:
                engine.close()


def in_turns(
    pairs: int, harness: Epoch, loops: Sequence[Epoch], device: torch.device
) -> dict[str, list[float]]:
    """Returns the seconds of each epoch of the four sides, run in alternating pairs."""
    sides = dict(
        zip(("harness", "hand_written", "control_a", "control_b"), (harness, *loops), strict=True)
    )
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    # warm-up: kernel selection, memory allocation
    for run in sides.values():
        run()
    for pair in range(pairs):
        if pair % 10 == 9:
            print(f"pair {pair + 1} of {pairs}", file=sys.stderr)
        for couple in (("harness", "hand_written"), ("control_a", "control_b")):
            for name in couple if pair % 2 == 0 else reversed(couple):
                # or one side would collect another's garbage
                gc.collect()
                begin = time.perf_counter()
                sides[name]()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    """Returns the largest absolute difference of weights and buffers; 0.0: bitwise identical."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def compare(config: Config, steps: int, pairs: int) -> dict[str, Any]:
    """Runs the comparison; returns all results."""
    with distributed.joined(0, config) as world, tempfile.TemporaryDirectory() as place:
        batches = make_batches(
            steps, config.loader.batch_size, config.data.image_size, pin=world.device.type == "cuda"
        )
        loops = [HandWritten(config, batches, world.device) for _ in range(3)]
        with harness_engine(config, batches, world, Path(place)) as engine:
            # fit() would add evaluation and checkpoint; the claim is only about the epoch
            epoch = lambda: engine._train_epoch(engine.state.epoch)
            # progress lines are written but discarded
            with redirect_stdout(io.StringIO()):
                seconds = in_turns(pairs, epoch, [loop.epoch for loop in loops], world.device)
            difference = largest_difference(engine.state.network, loops[0].network)
        found = machine()
    return {
        "machine": found,
        "device": str(world.device),
        "ratio": Estimate.ratio(seconds["hand_written"], seconds["harness"]),
        "control": Estimate.ratio(seconds["control_b"], seconds["control_a"]),
        "step_ms": {
            name: Sample.of([1e3 * s / steps for s in took]) for name, took in seconds.items()
        },
        "largest_weight_difference": difference,
        "epoch_seconds": seconds,
    }


def make_batches(count: int, batch_size: int, image_size: int, pin: bool) -> list[HostBatch]:
    """Returns ``count`` different batches of noise, pinned if ``pin``."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        images = torch.randint(
            256, (batch_size, 3, image_size, image_size), dtype=torch.uint8, generator=generator
        )
        labels = torch.randint(CLASSES, (batch_size,), generator=generator)
        batches.append(
            HostBatch(images.pin_memory() if pin else images, labels, torch.arange(batch_size))
        )
    return batches


def show(found: Mapping[str, Any], config: Config, steps: int) -> str:
    """Returns the comparison as text: two tables, the method, and the result of the claim."""
    batch_size = config.loader.batch_size
    held = verdict(found["ratio"])
    weights = "bitwise identical on both sides"
    if apart := found["largest_weight_difference"]:
        weights = f"differ by up to {apart:.3g}"
    # one table of steps, one of ratios
    epochs = [
        {
            "epochs of": side.replace("_", " "),
            "step ms": ms,
            "images/s": f"{1e3 * batch_size / ms.median:.0f}",
            "n": ms.n,
        }
        for side, ms in found["step_ms"].items()
    ]
    ratios = [
        {"images/s of": what, "paired ratio": f"{found[key]:.4f}", "n": epochs[0]["n"]}
        for what, key in (
            ("harness / hand written", "ratio"),
            ("hand written / itself (control)", "control"),
        )
    ]
    return f"""{machine_line(found["machine"])}
{config.model.name}, {config.data.image_size} px, batch {batch_size}, fp32 on {found["device"]};
epochs of {steps} steps in turns, loss read every {config.watch.window_steps} steps

{markdown(epochs)}

{markdown(ratios)}

Steps: median (quartiles). Ratios: median of the pairs [95 % interval, of order statistics].
Weights after all epochs: {weights}.
Claim: the interval of harness / hand written is not entirely below {FLOOR}: {held}."""


def verdict(ratio: Estimate) -> str:
    """Returns the interval's verdict on the claim."""
    if ratio.low >= FLOOR:
        return "holds, the whole interval is above"
    if ratio.high < FLOOR:
        return "FAILS, the whole interval is below"
    return "not refuted, but the interval reaches below"


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("Compare the harness's epoch with a hand-written loop on equal batches.")
    add = options.add_argument
    add("--pairs", type=int, default=40, help="pairs of epochs; at least 30 for published numbers")
    add("--steps", type=int, default=50, help="steps in an epoch")
    add("--window", type=int, default=10, help="steps between two readings of the loss")
    add("--model", default="small", help="model.name as in train.py")
    add("--image-size", type=int, default=32, help="side of an image in pixels")
    add("--batch-size", type=int, default=64, help="images in a batch")
    add("--device", default="auto", help="as in train.py: auto, cpu or cuda")
    a = options.parse_args(argv)
    config = Config(
        device=a.device,
        data=DataConfig(image_size=a.image_size),
        loader=LoaderConfig(batch_size=a.batch_size),
        model=ModelConfig(name=a.model),
        schedule=ScheduleConfig(name=ScheduleName.constant),
        trainer=TrainerConfig(epochs=a.pairs + 1),
        checkpoint=CheckpointConfig(enabled=False),
        watch=WatchConfig(window_steps=a.window),
    )
    found = compare(config, a.steps, a.pairs)
    print(show(found, config, a.steps))
    if a.json:
        write(a.json, {"arguments": {**vars(a), "json": str(a.json)}, **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
