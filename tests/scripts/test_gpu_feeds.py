"""The feeds beside a GPU: which runs are made, and what is said of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts import gpu_feeds


def test_every_form_runs_on_ever_fewer_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many workers as cores, the most cores first, until the time is over; the fewest that feed the network are named."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    left, seen = iter([900.0] * 5 + [0.0]), []

    def train(overrides: Sequence[str], folder: Path, limit_s: float, cores: int | None) -> dict[str, Any]:
        seen.append((overrides[-2:], cores))
        rate = 1000.0 if cores is None else min(1000.0, cores * (333.0 if "threads" in overrides[-2] else 240.0))
        return {"images_per_s": rate}

    rows = gpu_feeds.cores(train, ["common"], ["files"], tmp_path, lambda: next(left))
    assert [(row["cores"], row["backend"]) for row in rows] == [
        (4, "threads"), (4, "processes"), (2, "threads"), (2, "processes"), (1, "threads"),
    ]  # fmt: skip
    assert seen[1] == (["loader.backend=threads", "loader.num_workers=4"], 4)
    assert gpu_feeds.fewest(rows) == "threads: 4 cores reach 0.99; processes: none of these reach 0.99"
