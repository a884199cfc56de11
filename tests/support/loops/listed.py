"""Trains on batches that were put into a list first."""

import torch
from meters import digest
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
torch.set_num_threads(1)
samples = TensorDataset(torch.randn(320, 8), torch.randint(0, 3, (320,)))
batches = list(DataLoader(samples, 8, shuffle=True))
net = nn.Linear(8, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(10):
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
print(digest(net))
