"""Quotas and memory that must be waited for, in made-up control groups and a real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.monitor import host
from scripts.bench.watch import control_groups

PRESSURE = (
    "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 avg60=0.00 "
    "avg300=0.00 total=7\n"
)


@pytest.mark.parametrize(
    ("stat", "counts"),
    [
        pytest.param("nr_periods 40\nnr_throttled 10\nthrottled_time 5\n", (40, 10), id="v1"),
        pytest.param(
            "usage_usec 9\nuser_usec 8\nnr_periods 40\nnr_throttled 10\nthrottled_usec 5\n",
            (40, 10),
            id="v2",
        ),
        pytest.param("usage_usec 9\nuser_usec 8\n", None, id="v2 without the controller"),
        pytest.param(None, None, id="no file"),
    ],
)
def test_both_versions_count_throttled_periods(
    tmp_path: Path, stat: str | None, counts: tuple[int, int] | None
) -> None:
    """A group that does not count its periods is left out."""
    if stat is not None:
        (tmp_path / "cpu.stat").write_text(stat)
    assert host.throttled(tmp_path) == counts


def test_the_first_file_that_is_there_says_how_long_memory_was_waited_for(tmp_path: Path) -> None:
    """The innermost group's, and nothing where none tells."""
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    assert host.memory_stalled([inner, outer]) == ()
    outer.write_text(PRESSURE.format(2_000_000))
    assert host.memory_stalled([inner, outer]) == (2.0,)
    inner.write_text(PRESSURE.format(3_500_000))
    assert host.memory_stalled([inner, outer]) == (3.5,)


def test_a_real_quota_throttles() -> None:
    """A process that has a fiftieth of a processor is stopped in most of its periods."""
    burn = "import os\nwhile sum(os.times()[:2]) < 0.03: pass"
    with control_groups.quota(0.02) as group:
        subprocess.run(
            control_groups.within(group, sys.executable, "-IS", "-c", burn), check=True, timeout=60
        )
        counted = host.throttled(group)
    assert counted is not None
    periods, stopped = counted
    assert periods >= 10
    assert stopped / periods > 0.5
