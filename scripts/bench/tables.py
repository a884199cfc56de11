"""Formats the results of benchmarks: machine, versions, figures with their spread."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.monitor.host import environment
from harness.runtime import accelerator

ROOT = Path(__file__).resolve().parents[2]
PAGES = Path(__file__).with_name("results")

# one JSON line of the results
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """Median and quartiles of ``n`` measurements."""

    n: int
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        """Returns the sample of one or more ``values``."""
        low, median, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
        return cls(len(values), median, low, high)

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.low)} to {_short(self.high)})"


@dataclass(slots=True)
class Results:
    """The lines of the results file; a line cut off by an interrupt is dropped."""

    path: Path
    lines: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path.exists():
            whole = self.path.read_text(encoding="utf-8").rpartition("\n")[0]
            self.lines = [json.loads(line) for line in whole.splitlines()]
            self.path.write_text(whole + "\n" * bool(whole), encoding="utf-8")

    def add(self, **line: Any) -> None:
        """Appends one line."""
        self.lines.append(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def has(self, **facts: Any) -> bool:
        """Returns whether there is a line with these values."""
        return any(facts.items() <= line.items() for line in self.lines)


def tell(text: str) -> None:
    """Prints ``text`` to stderr."""
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """Returns hardware, versions and the number of torch threads, with the GPU if available."""
    gpu = accelerator.get("cuda").name if accelerator.count() else None
    return environment(gpu) | {"torch_threads": torch.get_num_threads()}


def machine_line(found: Mapping[str, Any]) -> str:
    """Returns ``machine()`` as one line; states if there is no GPU."""
    cuda = ""
    if "cuda" in found:
        cuda = f" (CUDA {found['cuda']}, driver {found.get('driver', 'none')})"
    return (
        f"{found['cpu']}, {found['usable_cores']:g} of {found['cores']} cores, "
        f"{found['torch_threads']} torch threads; GPU: {found.get('device', 'none')}; Python "
        f"{found['python']}, torch {found['torch']}{cuda}, torchvision {found.get('torchvision')}; "
        f"{found['platform']}"
    )


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Returns a Markdown table that reads well as plain text, or "" without rows.

    The first row's keys are the columns.
    """
    if not rows:
        return ""
    lines = [
        list(rows[0]),
        *([str(cell).replace("|", "/") for cell in row.values()] for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    ]
    return "\n".join(
        [text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]]
    )


def write(path: Path, value: Mapping[str, Any] | str) -> None:
    """Writes a text, or figures as JSON, atomically."""
    text = value if isinstance(value, str) else json.dumps(plain(value), indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def parser(text: str, page: Path | None = None, *, json: bool = True) -> argparse.ArgumentParser:
    """Returns a benchmark's parser with --json, and with --write if there is a page."""
    made = argparse.ArgumentParser(
        description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    if json:
        made.add_argument("--json", type=Path, help="write all figures to this file")
    if page is not None:
        made.add_argument("--write", action="store_true", help=f"write results/{page.name}")
    return made


def listed(
    parser: argparse.ArgumentParser, option: str, given: str | None, known: Sequence[str]
) -> tuple[str, ...]:
    """Returns the comma-separated names ``given`` to an option, or all ``known``."""
    names = tuple(known) if given is None else tuple(given.split(","))
    if unknown := set(names) - set(known):
        parser.error(f"{option}: unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    return names


def plain(value: Any) -> Any:
    """Returns ``value`` as plain JSON values, samples as objects."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _short(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
