"""The benchmark of whole runs: what it makes of its lines, and one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.bench_elastic import Workload, changing, run, table, trained


def line(strategy: str, number: int, seconds: float, **facts: Any) -> dict[str, Any]:
    own = {"workload": "jpeg_64", "epochs": 3, "strategy": strategy, "round": number}
    return {**own, "seconds": seconds, "tuning_s": 0.0, "chosen": None, **facts}


def test_strategies_are_compared_within_a_round() -> None:
    """A round without the default does not count; seconds and ratio are of pairs."""
    told = table([
        line("default", 0, 20.0), line("default", 1, 30.0),
        line("tuned", 0, 18.0, tuning_s=2.0, chosen="num_workers=4"),
        line("tuned", 1, 27.0, tuning_s=2.0), line("tuned", 2, 99.0),
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


def test_a_change_is_told_by_what_came_after_it() -> None:
    """By the images of the windows and not their number; the best fixed number of threads counts
    from a second later on.
    """
    windows = {
        "8 threads": [[10.0, 100.0, 10], [13.5, 400.0, 10], [15.0, 400.0, 10], [15.1, 1600.0, 1]],
        "tuned": [[10.0, 90.0, 10], [14.5, 100.0, 10], [15.0, 440.0, 30], [17.0, 440.0, 1]],
    }
    told = changing(
        [
            line(
                strategy,
                0,
                9.0,
                windows=found,
                changes=[{"before": 2, "threads": 8}] * (strategy == "tuned"),
            )
            | {"workload": "warms_5"}
            for strategy, found in windows.items()
        ]
    )
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in told.splitlines()[2:]]
    best = 11 / (10 / 400 + 1 / 1600)
    assert cells[0][3:5] == ["100", f"{21 / (20 / 400 + 1 / 1600):.0f}"]
    assert cells[1][3:] == [
        "90",
        f"{41 / (10 / 100 + 31 / 440):.0f}",
        f"{41 / (10 / 100 + 31 / 440) / best:.2f}",
        "2.0 s",
        "2 to 8",
    ]


def test_images_of_a_minute_count_pauses() -> None:
    """A window counts by the part of it that lies inside; an evaluation between windows counts."""
    windows = [[11.0, 64.0, 1], [14.0, 128.0, 2], [16.0, 64.0, 2]]
    # from 10 s on: 64 images, two seconds of pause, 128 in one second, 128 in two
    assert trained({"windows": windows}, 0, 5) == pytest.approx((64 + 128 + 64) / 5)
    assert trained({"windows": windows}, 3.5, 4) == pytest.approx(128)


@pytest.mark.slow
def test_a_step_that_sleeps_and_files_that_come_late(tmp_path: Path) -> None:
    """2,000 files of which two threads get one each in 5 ms take five seconds at least, though the
    step takes none.
    """
    late = Workload(
        "late",
        "",
        32,
        step_ms="1",
        read_ms="5",
        overrides=("data.generate.width=40", "data.generate.height=40"),
    )
    found = run(late, "default", 1, tmp_path)
    assert found["seconds"] > 5.0
    assert [steps for _, _, steps in found["windows"]] == [10, 10, 10, 1]
