"""Bottlenecks that are planted into somebody's script are told by name."""

from __future__ import annotations

import dataclasses

import pytest

from scripts.bench_watched import CASES, SUPPORT, WATCH, Case, judged

# steps of an epoch
QUICK = {"slow_disk": 15}


def marked(case: Case) -> object:
    marks = []
    if case.plant in QUICK:
        case = dataclasses.replace(case, flags=(f"--steps={QUICK[case.plant]}",))
    else:
        marks.append(pytest.mark.slow)
    return pytest.param(case, id=case.plant, marks=marks)


# by the wall clock: another program on the machine may spoil a run
@pytest.mark.flaky(reruns=2)
@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_the_report_names_what_was_planted(case: Case) -> None:
    """The class is right, and the sentence has what it rests on."""
    alone = (str(SUPPORT / "watch_alone.py"),)
    report = judged(case, WATCH if case.around == "neighbours" else alone)
    assert case.right(report["verdict"]), report["verdict"]
    if case.plant == "slow_disk":
        # a change of the loader comes with it, in the words of the script
        change = report["change"]
        assert change["arguments"] == {"num_workers": 8, "persistent_workers": True}
        assert change["gain"] == pytest.approx(4, rel=0.2)
