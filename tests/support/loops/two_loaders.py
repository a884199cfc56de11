"""Takes a batch of each of two loaders for a step of each of two optimizers."""

from __future__ import annotations

import itertools

import torch
from meters import digest
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.manual_seed(4)
    torch.set_num_threads(1)
    labelled = DataLoader(
        TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,))), batch_size=8, shuffle=True
    )
    unlabelled = DataLoader(TensorDataset(torch.randn(40, 8)), batch_size=16, shuffle=True)
    body = nn.Linear(8, 16)
    head = nn.Linear(16, 3)
    of_body = torch.optim.SGD(body.parameters(), lr=0.05)
    of_head = torch.optim.Adam(head.parameters(), lr=0.05)
    for epoch in range(2):
        others = itertools.cycle(unlabelled)
        for (x, y), (u,) in zip(labelled, others, strict=False):
            loss = nn.functional.cross_entropy(head(body(x)), y)
            spread = head(body(u)).softmax(1).var()
            of_body.zero_grad()
            of_head.zero_grad()
            (loss + spread).backward()
            of_body.step()
            of_head.step()
            print(epoch, repr(loss.item()), repr(spread.item()))
    print(digest(body), digest(head))


main()
