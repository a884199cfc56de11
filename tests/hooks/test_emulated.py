"""Somebody's loop on an emulated GPU in virtual time, and what the hooks say of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from emulated_run import SIZE, MadeFeed
from emulator import EmulatedDevice, VirtualClock, emulated
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from harness.clock.figures import Window
from harness.hooks import patches
from harness.hooks.loops import LoopTracker

Span = tuple[float, float]


class Stream(IterableDataset[Any]):
    """Batches of made-up workers, as a data set that makes its own."""

    def __init__(self, feed: MadeFeed) -> None:
        self.feed = feed

    def __iter__(self) -> Iterator[Any]:
        return iter(self.feed)


@dataclass
class Script:
    """A loop in the usual form; times in seconds.

    Attributes:
        loader_s: between two batches, where nothing holds the loader up.
        device_s, launch_s: of one batch's forward and backward.
        copy_s: of one batch, from page-locked memory if ``pinned``.
        python_s: between the update and the next batch.
        read: read the loss in each step, as many scripts do.
        scaled: the update waits for the gradients, as GradScaler's does.
        late: the labels are copied for the loss, after half of the work.
        derived: copies are of tensors that the loader did not give.
        parts: batches of an update.
        evaluate_every: steps, 0: never; of ``eval_s``.
        optimizers: that step one after the other.
    """

    loader_s: float = 5e-3
    device_s: float = 20e-3
    launch_s: float = 6e-3
    copy_s: float = 1e-3
    pinned: bool = True
    python_s: float = 0.05e-3
    read: bool = False
    scaled: bool = False
    late: bool = False
    derived: bool = False
    parts: int = 1
    evaluate_every: int = 0
    eval_s: float = 0.2
    optimizers: int = 1
    steps: int = 120
    waits: list[Span] = field(default_factory=list)
    copies: list[Span] = field(default_factory=list)
    evaluations: list[Span] = field(default_factory=list)

    def run(self) -> tuple[Window, dict[str, float]]:
        """Trains for two epochs; returns what the hooks say, and the truth."""
        per_s = SIZE * 20 / self.copy_s
        own = EmulatedDevice(
            VirtualClock(wake_s=0.05e-3), pinned_per_s=per_s, pageable_per_s=per_s,
            launch_s=20e-6, record_s=2e-6, wake_s=0.05e-3,
        )  # fmt: skip
        loops = LoopTracker()
        loops.on_window = lambda clock: clock.close_window()  # type: ignore[assignment,method-assign]
        with emulated(own), _copies(own, self), patches.installed(loops):
            spans = self._train(own)
            loops.end(completed=True)
            assert loops.clock
            return loops.clock.total(), self._truth(own, spans)

    def _train(self, own: EmulatedDevice) -> list[Span]:
        weight = nn.Parameter(torch.zeros(1))
        optimizers = [torch.optim.SGD([weight], lr=0.1) for _ in range(self.optimizers)]
        feed = MadeFeed(own, self.loader_s, workers=1, in_flight=4, batches=self.steps * self.parts,
                        pinned=self.pinned)  # fmt: skip
        loader = DataLoader(Stream(feed), batch_size=None)
        val = DataLoader(Stream(MadeFeed(own, 2e-3, batches=3)), batch_size=None)
        spans = []
        for _ in range(3):
            begin_s = 0.0
            for batch, images in enumerate(self._noted(own, loader), 1):
                x, y = (part[:] if self.derived else part for part in images)
                x.to("cuda")
                if self.late:
                    own.launch(self.device_s / 2, self.launch_s / 2, 30)
                y.to("cuda")
                for optimizer in optimizers:
                    parts = self.optimizers * (1 + self.late)
                    own.launch(self.device_s / parts, self.launch_s / parts, 60)
                    weight.grad = torch.ones(1)
                    if self.scaled:
                        own.synchronize()
                    if batch % self.parts == 0:
                        optimizer.step()
                if self.read:
                    own.synchronize()
                own.host(self.python_s)
                begin_s = begin_s or own.stream().until_s
                if self.evaluate_every and batch % self.evaluate_every == 0:
                    own.synchronize()
                    began_s = own.now()
                    for _ in val:
                        own.host(self.eval_s)
                    self.evaluations.append((began_s, own.now()))
            own.synchronize()
            spans.append((begin_s, own.stream().until_s))
        # the first epoch tells which loader trains
        return spans[1:]

    def _noted(self, own: EmulatedDevice, loader: Any) -> Iterator[Any]:
        batches = iter(loader)
        while True:
            began_s = own.now()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.waits.append((began_s, own.now()))
            yield batch

    def _truth(self, own: EmulatedDevice, spans: list[Span]) -> dict[str, float]:
        """The shares of the time in which kernels ran, or a copy did, or the host waited."""
        step_s = 1e-5
        found = {"compute": 0.0, "exposed_copy": 0.0, "starved": 0.0, "host": 0.0}
        lists = {"compute": own.busy_s, "exposed_copy": self.copies, "starved": self.waits}
        total = 0
        for begin_s, end_s in spans:
            cells = torch.zeros(int((end_s - begin_s) / step_s), dtype=torch.int64)
            for code, name in ((3, "starved"), (2, "exposed_copy"), (1, "compute")):
                for began, ended in lists[name]:
                    low, high = (max(0, int((at - begin_s) / step_s)) for at in (began, ended))
                    cells[low:high] = code
            for began, ended in self.evaluations:
                low, high = (max(0, int((at - begin_s) / step_s)) for at in (began, ended))
                cells[low:high] = 9
            for code, name in enumerate(("host", "compute", "exposed_copy", "starved")):
                found[name] += int((cells == code).sum())
            total += int((cells != 9).sum())
        return {name: count / total for name, count in found.items()}


@contextlib.contextmanager
def _copies(own: EmulatedDevice, script: Script) -> Iterator[None]:
    """Has ``.to("cuda")`` copy to the emulated GPU."""
    to = torch.Tensor.to

    def copied(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
        if args != ("cuda",):
            return to(tensor, *args, **named)
        began_s = max(own.now(), own.stream().until_s)
        made = own.copy(tensor)
        script.copies.append((began_s, own.stream().until_s))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", copied)
        yield


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(Script(), id="device-bound"),
        pytest.param(Script(loader_s=30e-3), id="slow loader"),
        pytest.param(Script(loader_s=30e-3, read=True), id="slow loader, loss read"),
        pytest.param(Script(copy_s=12e-3, pinned=False, read=True), id="pageable copies"),
        pytest.param(Script(copy_s=12e-3), id="long copies"),
        pytest.param(Script(late=True), id="labels in the loss"),
        pytest.param(Script(late=True, pinned=False), id="labels in the loss, pageable"),
        pytest.param(Script(late=True, derived=True, copy_s=4e-3), id="tensors of the script's"),
        pytest.param(Script(python_s=15e-3, read=True), id="python between steps"),
        pytest.param(Script(loader_s=15e-3, parts=4), id="accumulation"),
        pytest.param(Script(loader_s=15e-3, optimizers=2, read=True), id="two optimizers"),
        pytest.param(Script(loader_s=24e-3, evaluate_every=20), id="evaluation amid an epoch"),
        pytest.param(Script(device_s=3e-3, loader_s=4e-3), id="launches"),
        pytest.param(
            Script(device_s=3e-3, loader_s=4e-3, pinned=False), id="launches, pageable copies"
        ),
        pytest.param(Script(device_s=3e-3, loader_s=4e-3, read=True), id="launches, loss read"),
    ],
)
def test_shares_are_those_of_the_device(script: Script) -> None:
    """Every share of the time is within 2 points of what the device did."""
    total, truth = script.run()
    assert total.stall_basis == "device"
    # but for what rounding leaves of a part
    found = {name: share for name, share in total.shares.items() if share > 1e-9 or name in truth}
    # kernels wait for their launches within a block
    found["host"] += found.pop("launch", 0.0)
    assert found == pytest.approx(truth, abs=0.02), (found, truth)


def test_no_step_is_held_back_where_the_loader_is_slow() -> None:
    """A few steps compute for 20 of a loader's 30 ms; behind a hold some would be quick."""
    total, _ = Script(loader_s=30e-3, scaled=True, steps=15).run()
    assert total.shares["compute"] == pytest.approx(20 / 30, abs=0.01)
