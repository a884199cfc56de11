"""Trains a Lightning module with Lightning's Trainer; ``callback`` adds the callback of ours."""

from __future__ import annotations

import os
import signal
import sys

import lightning as L
import torch
from meters import digest
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        print(repr(loss.item()), flush=True)
        if index == 5 and "error" in sys.argv:
            raise RuntimeError("loss is not finite")
        if index == 5 and "SIGTERM" in sys.argv:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        x, y = batch
        print("validation", repr(nn.functional.cross_entropy(self.net(x), y).item()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def samples(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 8), torch.randint(0, 3, (count,)))


def main() -> None:
    L.seed_everything(12, verbose=False)
    torch.set_num_threads(1)
    training = DataLoader(samples(96), batch_size=8, shuffle=True)
    validation = DataLoader(samples(24), batch_size=8)
    callbacks = []
    if "callback" in sys.argv:
        from harness.hooks.lightning import WellfedCallback

        callbacks.append(WellfedCallback("report"))
    model = Classifier()
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(model, training, validation)
    print(digest(model))


if __name__ == "__main__":
    main()
