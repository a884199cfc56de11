"""A loop of Accelerate's, with its accumulation of gradients and its evaluation."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from meters import digest
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def samples(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 8), torch.randint(0, 3, (count,)))


def main() -> None:
    set_seed(14)
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 3))
    model, optimizer, training, validation = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        DataLoader(samples(96), batch_size=8, shuffle=True, num_workers=1),
        DataLoader(samples(24), batch_size=8),
    )
    for epoch in range(2):
        model.train()
        for x, y in training:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            print(epoch, repr(loss.item()))
        model.eval()
        for x, y in validation:
            with torch.no_grad():
                logits, labels = accelerator.gather_for_metrics((model(x), y))
            print("validation", repr(nn.functional.cross_entropy(logits, labels).item()))
    print(digest(accelerator.unwrap_model(model)))


if __name__ == "__main__":
    main()
