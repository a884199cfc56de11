"""Data sets of a user's own that go wrong in different ways, for the jobs of a sweep."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import Dataset

_SIDE = 16
Sets = tuple[Dataset[Any], Dataset[Any]]


class Gray(Dataset[Any]):
    """``length`` gray images in two classes; ``trouble`` befalls whoever loads sample 5."""

    classes = ("a", "b")

    def __init__(self, length: int, trouble: Callable[[], object] | None = None) -> None:
        self.labels = np.arange(length) % 2
        self.trouble = trouble

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if self.trouble is not None and i == 5:
            self.trouble()
        return torch.full((3, _SIDE, _SIDE), i % 2, dtype=torch.float32), i % 2


def throw() -> NoReturn:
    raise ValueError("broken sample")


def wait() -> None:
    threading.Event().wait()


def good(data: Any, seed: int) -> Sets:
    return Gray(32), Gray(8)


def raises(data: Any, seed: int) -> Sets:
    return Gray(32, throw), Gray(8)


def hangs(data: Any, seed: int) -> Sets:
    return Gray(32, wait), Gray(8)


def exits(data: Any, seed: int) -> NoReturn:
    sys.exit(3)


def killed(data: Any, seed: int) -> Sets:
    os.kill(os.getpid(), signal.SIGKILL)
    return good(data, seed)


# names of their own, for a sweep
fine = also_good = as_good = good
