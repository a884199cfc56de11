"""Trains for a moment and ends in the way that its first argument names."""

from __future__ import annotations

import atexit
import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(way: str) -> None:
    atexit.register(print, "at exit", flush=True)
    print(__name__, sys.argv, [os.path.basename(path) for path in sys.path[:1]], flush=True)
    if way == "idle":
        return
    torch.manual_seed(8)
    torch.set_num_threads(1)
    loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch_size=8)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        print(repr(loss.item()), flush=True)
        if i == 5:
            end(way)


def end(way: str) -> None:
    if way == "error":
        try:
            raise KeyError("cause")
        except KeyError as error:
            raise RuntimeError("loss is not finite") from error
    if way == "exit":
        sys.exit(3)
    if way == "exit_text":
        sys.exit("no more disk")
    if way == "own_handler":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        os.kill(os.getpid(), signal.SIGTERM)
    # a shell's background jobs have it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if way in ("SIGINT", "SIGTERM"):
        os.kill(os.getpid(), signal.Signals[way])
        for _ in range(100000):
            pass


main(*sys.argv[1:2])
