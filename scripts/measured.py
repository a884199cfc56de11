"""What every benchmark here says of itself: machine, versions, figures with their spread, as Markdown and as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.watch.host import environment


@dataclass(frozen=True, slots=True)
class Sample:
    """Median and quartiles of ``n`` measurements."""

    n: int
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        """The sample that ``values`` make; at least one."""
        low, median, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
        return cls(len(values), median, low, high)

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.low)} to {_short(self.high)})"


def machine() -> dict[str, Any]:
    """Hardware and versions, the GPU among them where torch can use one, and torch's threads."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return environment(gpu) | {"torch_threads": torch.get_num_threads()}


def machine_line(found: Mapping[str, Any]) -> str:
    """``machine()`` in one line; says so where there is no GPU."""
    cuda = f" (CUDA {found['cuda']}, driver {found.get('driver', 'none')})" if "cuda" in found else ""
    return (
        f"{found['cpu']}, {found['usable_cores']:g} of {found['cores']} cores, {found['torch_threads']} torch threads; "
        f"GPU: {found.get('device', 'none')}; Python {found['python']}, torch {found['torch']}{cuda}, "
        f"torchvision {found.get('torchvision')}; {found['platform']}"
    )


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table that also reads well as plain text."""
    cells = [[str(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` whole or not at all."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` whole or not at all, its folder too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _short(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
