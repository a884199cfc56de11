"""Changes into a folder of its own before it trains, as Hydra applications do."""

import os
from pathlib import Path

import torch
from meters import digest
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

os.mkdir("run")
os.chdir("run")
print(len(Path(__file__).read_text()))
torch.manual_seed(3)
torch.set_num_threads(1)
samples = TensorDataset(torch.randn(320, 8), torch.randint(0, 3, (320,)))
net = nn.Linear(8, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in DataLoader(samples, 8, shuffle=True):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
print(digest(net))
