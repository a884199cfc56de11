"""The benchmark of whole runs: what it makes of its lines, and one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.bench_elastic import Workload, run, table


def line(strategy: str, number: int, seconds: float, **facts: Any) -> dict[str, Any]:
    own = {"workload": "jpeg_64", "epochs": 3, "strategy": strategy, "round": number}
    return {**own, "seconds": seconds, "tuning_s": 0.0, "chosen": None, **facts}


def test_strategies_are_compared_within_a_round() -> None:
    """A round without the default does not count; seconds and ratio are of pairs."""
    told = table([
        line("default", 0, 20.0), line("default", 1, 30.0),
        line("tuned", 0, 18.0, tuning_s=2.0, chosen="num_workers=4"), line("tuned", 1, 27.0, tuning_s=2.0),
        line("tuned", 2, 99.0),
    ])  # fmt: skip
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in told.splitlines()[2:]]
    assert cells[0][:6] == ["jpeg_64", "3", "default", "2", "25.0", "+0.0 s [+0.0, +0.0]"]
    assert cells[1] == [
        "jpeg_64",
        "3",
        "tuned",
        "2",
        "27.0",
        "-2.5 s [-3.0, -2.0]",
        "0.90 [0.90, 0.90]",
        "2.0 s",
        "num_workers=4",
    ]


@pytest.mark.slow
def test_a_step_that_sleeps_and_files_that_come_late(tmp_path: Path) -> None:
    """2,000 files of which two threads get one each in 5 ms take five seconds at least, though the step takes none."""
    late = Workload("late", "", 32, step_ms=1, read_ms=5, overrides=("data.generate.width=40", "data.generate.height=40"))
    assert run(late, "default", 1, tmp_path)["seconds"] > 5.0
