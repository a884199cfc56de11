"""One training on CUDA, in the way of the loop that is named; batches come slower than it steps."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

BATCHES = 16
EPOCHS = 2
# 100 ms of a GPU's processors, or so: launches of a slow host are short beside them
CYCLES = 180_000_000
criterion = nn.CrossEntropyLoss()
device = torch.device("cuda")


class Busy(torch.autograd.Function):
    """Keeps the device busy as long in the forward pass as in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch.cuda._sleep(CYCLES)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        torch.cuda._sleep(CYCLES)
        return grad.clone()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Busy.apply(self.first(x)))


class Slow(Dataset[Any]):
    """Samples that take so long each."""

    def __init__(self, seconds: float, count: int) -> None:
        self.seconds = seconds
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.seconds)
        return torch.zeros(8), index % 3


def named(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    return {
        "image": torch.stack([image for image, _ in samples]),
        "label": torch.tensor([label for _, label in samples]),
    }


def load(**how: Any) -> DataLoader[Any]:
    """Returns a loader whose batches take half as long again as the device's work on one.

    Prints the seconds of that work.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # the first launch loads the kernel
    torch.cuda._sleep(CYCLES)
    start.record()
    torch.cuda._sleep(CYCLES)
    end.record()
    end.synchronize()
    # two sleeps a batch, in milliseconds
    work_s = 2e-3 * start.elapsed_time(end)
    print(work_s)
    samples = Slow(1.5 * work_s / 4, 4 * BATCHES)
    return DataLoader(samples, 4, num_workers=1, pin_memory=True, **how)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = Net().to(device)
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def moved_first() -> None:
    net, optimizer = made()
    loader = load()
    for _ in range(EPOCHS):
        for x, y in loader:
            x = x.to(device, non_blocking=True)
            y = y.to(device, non_blocking=True)
            optimizer.zero_grad()
            criterion(net(x), y).backward()
            optimizer.step()


def labels_in_the_loss() -> None:
    net, optimizer = made()
    loader = load()
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(net(x.cuda()), y.cuda())
            loss.backward()
            optimizer.step()


def amp() -> None:
    net, optimizer = made()
    loader = load()
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(EPOCHS):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = criterion(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def moved(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in batch.items()}


def dictionary() -> None:
    net, optimizer = made()
    loader = load(collate_fn=named)
    for _ in range(EPOCHS):
        for batch in loader:
            batch = moved(batch)
            optimizer.zero_grad()
            criterion(net(batch["image"]), batch["label"]).backward()
            optimizer.step()


def accumulation() -> None:
    net, optimizer = made()
    loader = load()
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(loader):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            loss = criterion(net(x), y) / 2
            loss.backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()


def closure() -> None:
    net, optimizer = made()
    loader = load()
    for _ in range(EPOCHS):
        total = 0.0
        for x, y in loader:
            x, y = x.to(device), y.to(device)

            def compute(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = criterion(net(x), y)
                loss.backward()
                return loss

            total += optimizer.step(compute).item()  # type: ignore[arg-type, attr-defined]


def lightning() -> None:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            x, y = batch
            loss: Tensor = criterion(self.net(x), y)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    L.Trainer(
        max_epochs=EPOCHS, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), load())  # fmt: skip


def accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    net, optimizer, loader = accelerator.prepare(*made(), load())
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(criterion(net(x), y))
            optimizer.step()


WAYS: tuple[Callable[[], None], ...] = (
    moved_first, labels_in_the_loss, amp, dictionary, accumulation, closure, lightning, accelerate,
)  # fmt: skip

if __name__ == "__main__":
    {way.__name__: way for way in WAYS}[sys.argv[1]]()
