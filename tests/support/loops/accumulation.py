"""Adds up the gradients of four batches for one update, at module level without functions."""

import torch
from meters import digest
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
torch.set_num_threads(1)
EVERY = 4
samples = TensorDataset(torch.randn(120, 8), torch.randint(0, 3, (120,)))
held_out = TensorDataset(torch.randn(24, 8), torch.randint(0, 3, (24,)))
loader = DataLoader(samples, batch_size=4, shuffle=True)
net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
for _ in range(2):
    for i, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(net(x), y)
        (loss / EVERY).backward()
        print(repr(loss.item()))
        if i % EVERY == EVERY - 1:
            optimizer.step()
            optimizer.zero_grad()
        if i == 9:
            # in the midst of an epoch, and its loader is made each time
            net.eval()
            with torch.no_grad():
                for a, b in DataLoader(held_out, batch_size=8):
                    print(repr(nn.functional.cross_entropy(net(a), b).item()))
            net.train()
print(digest(net))
