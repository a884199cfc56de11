"""Trains on a loader of the kind that its argument names."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from typing import Any

import torch
from meters import digest
from torch import Tensor, nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    get_worker_info,
)
from torchvision.transforms import Compose

Sample = tuple[Tensor, int]


class Blurred:
    """A transform that draws random numbers."""

    def __call__(self, image: Tensor) -> Tensor:
        return image + 0.1 * torch.randn(())


class Points(Dataset[Sample]):
    def __init__(self, length: int = 48) -> None:
        self.data = torch.randn(length, 6, generator=torch.Generator().manual_seed(9))
        self.augmentation = Compose([Blurred()])

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Sample:
        return self.augmentation(self.data[index]), index % 3


class Hidden(Points):
    """Its transform is in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [self.augmentation]
        del self.augmentation

    def __getitem__(self, index: int) -> Sample:
        return self.parts[0](self.data[index]), index % 3


class Batched(Points):
    def __getitems__(self, indices: list[int]) -> list[Sample]:
        return [self[index] for index in indices]


class Whole(Points):
    """A sample is a batch."""

    def __getitem__(self, index: int) -> Any:
        return self.augmentation(self.data[index % 40 :][:4]), torch.arange(4) % 3


class Stream(IterableDataset[Sample]):
    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        points = Points()
        yield from (points[i] for i in range(first, len(points), step))


class Broken(Points):
    def __getitem__(self, index: int) -> Sample:
        if index == 40:
            raise ValueError(f"sample {index} cannot be read")
        return super().__getitem__(index)


def started(method: str) -> dict[str, Any]:
    return {"num_workers": 2, "multiprocessing_context": method}


LOADERS = {
    "workers": (Points, {"num_workers": 2, "shuffle": True}),
    "no_workers": (Points, {"shuffle": True}),
    "hidden": (Hidden, {"num_workers": 2}),
    "hidden_alone": (Hidden, {}),
    "subset": (lambda: Subset(ConcatDataset([Points(), Points()]), range(48)), {"num_workers": 1}),
    "getitems": (Batched, {"num_workers": 2}),
    "whole": (Whole, {"num_workers": 1, "batch_size": None}),
    "stream": (Stream, {"num_workers": 2}),
    "stream_alone": (Stream, {}),
    "persistent": (Points, {"num_workers": 2, "persistent_workers": True}),
    "pinned": (Points, {"num_workers": 1, "pin_memory": True}),
    "error": (Broken, {"num_workers": 2}),
    "error_alone": (Broken, {}),
    "spawn": (Points, started("spawn")),
    "forkserver": (Points, {**started("forkserver"), "persistent_workers": True}),
    "context": (
        Points,
        {"num_workers": 1, "multiprocessing_context": multiprocessing.get_context("spawn")},
    ),
}


def main() -> None:
    torch.manual_seed(7)
    torch.set_num_threads(1)
    kind, named = LOADERS[sys.argv[1]]
    loader: DataLoader[Any] = DataLoader(kind(), **{"batch_size": 4, **named})
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(repr(loss.item()), flush=True)
    print(digest(model))


if __name__ == "__main__":
    main()
