"""What would feed somebody's loop better, and by how much."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from harness.clock.figures import Ledger, Tag, Window
from harness.clock.stages import StageCost, StageTotals
from harness.feed.base import FeedSettings
from harness.hooks.loops import WatchedLoader
from harness.hooks.session import LoaderCall, better, in_script
from harness.report.evidence import Evidence
from harness.report.verdict import judge

# samples/s of one worker, where a batch of 8 takes 80 ms and its step 20
RATE = 100.0


def evidence(workers: int = 1, made: float = 1.0, **sampled: float) -> Evidence:
    """A loop on a processor that is hardly used; a sample takes 10 ms, of waiting."""
    window: Window = dataclasses.replace(
        Ledger().window(),
        steps=200,
        images=1600,
        elapsed_s=16.0,
        images_per_s=RATE,
        stall_basis="host",
        stall_fraction=0.75,
        shares={"compute": 0.25, "starved": 0.75},
        wait_parts={"make": made, "transport": 1 - made},
    )
    load = StageCost(10.0, 0.1)
    return Evidence(
        window=window,
        stages=StageTotals(1000, 10.0, {"read": load}),
        settings=FeedSettings(8, workers, False, 2, False, 0.0, ""),
        cores=8.0,
        device="cpu",
        sampled={Tag.CPU_CORES: 0.1, **sampled},
        autotuned=False,
    )


def loader(found: Evidence, **followed: Any) -> WatchedLoader:
    return WatchedLoader("train.py:7", found.settings, **followed)


def call(found: Evidence, **followed: Any) -> LoaderCall | None:
    return better(judge(found), loader(found, **followed))


def test_the_call_is_what_the_verdict_asks_for() -> None:
    """As many workers as the verdict says, and the speed of the steps alone."""
    found = evidence()
    asked = call(found)
    assert asked is not None
    assert asked.arguments["num_workers"] == judge(found).change["loader.num_workers"]
    assert asked.gain == pytest.approx(4.0)


def test_handing_batches_over_takes_as_long_as_before() -> None:
    """What was waited for batches that were made is not gained."""
    asked = call(evidence(made=0.9))
    assert asked is not None
    assert asked.gain == pytest.approx(1 / (1 - 0.75 * 0.9))


@pytest.mark.parametrize(
    "sampled",
    [
        {Tag.MEMORY_STALL_FRACTION: 0.5},
        {Tag.THROTTLED_FRACTION: 0.9, Tag.CPU_CORES: 8.0},
    ],
    ids=["memory", "quota"],
)
def test_a_lack_of_the_machine_is_no_reason_for_more_workers(sampled: dict[str, float]) -> None:
    """Where memory or processors are missing, nothing else is told than the verdict does."""
    found = dataclasses.replace(
        evidence(workers=2),
        stages=StageTotals(1000, 10.0, {"decode": StageCost(10.0, 9.9)}),
    )
    found = dataclasses.replace(found, sampled={**found.sampled, **sampled})
    assert judge(found).kind in ("memory", "quota")
    assert call(found) is None


def test_persistent_workers_where_there_are_several_passes() -> None:
    """A loop of several passes keeps its workers."""
    asked = call(evidence(), passes=2)
    assert asked is not None and asked.arguments["persistent_workers"] is True


@pytest.mark.parametrize("stage", ["read", "crop"])
@pytest.mark.parametrize("streams", [True, False])
def test_a_stream_gets_more_workers_only_with_the_condition(streams: bool, stage: str) -> None:
    """Workers that do not split an iterable data set repeat it; others have no condition."""
    found = dataclasses.replace(
        evidence(1), stages=StageTotals(1000, 10.0, {stage: StageCost(10.0, 0.1)})
    )
    asked = call(found, streams=streams)
    assert asked is not None and asked.arguments["num_workers"] > 1
    words = in_script(judge(found).change, loader(found, streams=streams))
    for text in (str(asked), words):
        assert ("get_worker_info()" in text) is streams


def test_a_stream_is_not_told_to_use_the_tuner_that_refuses_it() -> None:
    """wellfed.tune takes map-style data sets alone; fewer workers need no condition."""
    for change in ({"loader.autotune": True}, {"loader.num_workers": 1}):
        words = in_script(change, loader(evidence(2), streams=True))
        assert "wellfed.tune" not in words and "get_worker_info" not in words


def test_workers_that_stay() -> None:
    """The time of their starts is gained, but not that of making a first batch."""
    window = dataclasses.replace(evidence().window, first_steps=9, first_step_s=16.0)
    # a batch takes 0.08 s
    found = dataclasses.replace(evidence(), window=window, starts=10, started_s=24.8)
    asked = call(found)
    assert judge(found).kind == "starts"
    assert asked is not None and asked.arguments == {"persistent_workers": True}
    assert asked.gain == pytest.approx(1 / (1 - 24.0 / 32.0))
