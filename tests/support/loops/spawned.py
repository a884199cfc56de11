"""Two ranks that the script spawns itself, as pytorch/examples' --multiprocessing-distributed."""

from __future__ import annotations

import hashlib
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main_worker(rank: int, world_size: int, store: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
    data = TensorDataset(torch.randn(96, 8), torch.randint(0, 4, (96,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 4, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    if rank == 0:
        print(hashlib.sha256(weights).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main_worker, nprocs=2, args=(2, os.path.abspath(sys.argv[1])))
