"""The kind of a run's bottleneck and what should change, from figures."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable
from typing import get_args

import pytest
import samples
from evidences import (
    CASES,
    CROWDED,
    DECODING,
    READING,
    Case,
    evidence,
    full_cores,
    on_cpu,
    rank,
    spread,
    totals,
)

from harness.clock.figures import Ledger, RankFigures, Tag
from harness.config import Config, walk
from harness.report.evidence import Bottleneck, Evidence
from harness.report.statement import as_overrides, stated
from harness.report.verdict import Verdict, judge

EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@EACH
def test_figures_give_a_kind_and_a_change(case: Case) -> None:
    """Each kind of bottleneck is found, with the settings that should help."""
    verdict = judge(case.evidence)
    assert (verdict.kind, verdict.change) == (case.kind, case.change)


def test_every_kind_has_a_case() -> None:
    """The cases leave no kind of bottleneck out."""
    assert {case.kind for case in CASES.values()} == set(get_args(Bottleneck))


def test_every_change_can_be_typed(composed: Callable[..., Config]) -> None:
    """A run takes its settings, which then have the new values."""
    changes = {as_overrides(case.change): case.change for case in CASES.values()}
    for line, change in changes.items():
        config = composed(*line.split())
        found = {path: getattr(value, "name", value) for path, value, _ in walk(config)}
        assert {name: found[name] for name in change} == change


def kind(given: Evidence) -> str:
    return judge(given).kind


@pytest.mark.parametrize(
    ("given", "bottleneck"),
    [
        pytest.param(evidence(0.019), "compute", id="fed"),
        pytest.param(evidence(0.021), "balanced", id="a little starved"),
        pytest.param(evidence(0.01, host=0.049), "compute", id="prompt"),
        pytest.param(evidence(0.01, host=0.051), "balanced", id="a little late"),
        pytest.param(evidence(0.099), "balanced", id="nearly a tenth"),
        pytest.param(evidence(0.101, stages=DECODING), "workers", id="a tenth"),
        pytest.param(evidence(0.05, 0.03, 0.03, stages=DECODING), "workers", id="a tenth in all"),
        pytest.param(evidence(0.0, 0.06, 0.05), "copy", id="copies before Python"),
        pytest.param(evidence(0.0, 0.05, 0.06), "host", id="Python before copies"),
        pytest.param(
            evidence(0.4, stages=DECODING, window={"wait_parts": {"make": 0.3, "transport": 0.7}}),
            "workers",
            id="late for want of processors",
        ),
        pytest.param(full_cores(decode_ms=2.9), "decode", id="processors full of samples"),
        pytest.param(full_cores(decode_ms=1.6), "transport", id="processors full of other work"),
        pytest.param(on_cpu(0.0, sampled={Tag.THROTTLED_FRACTION: 0.26}), "quota", id="throttled"),
        pytest.param(
            on_cpu(0.0, sampled={Tag.THROTTLED_FRACTION: 0.24}), "compute", id="hardly throttled"
        ),
        pytest.param(
            evidence(0.0, sampled={Tag.THROTTLED_FRACTION: 0.9}),
            "compute",
            id="a throttled host of a busy device",
        ),
        pytest.param(
            evidence(0.4, stages=READING, sampled={Tag.THROTTLED_FRACTION: 0.4}),
            "storage",
            id="readers that are throttled at times",
        ),
        pytest.param(
            evidence(0.4, stages=READING, sampled={Tag.THROTTLED_FRACTION: 0.6}),
            "quota",
            id="throttled readers",
        ),
        pytest.param(on_cpu(0.0, sampled={Tag.MEMORY_STALL_FRACTION: 0.11}), "memory", id="memory"),
        pytest.param(
            on_cpu(0.0, sampled={Tag.MEMORY_STALL_FRACTION: 0.09}),
            "compute",
            id="hardly short of memory",
        ),
        pytest.param(
            evidence(0.0, sampled={Tag.MEMORY_STALL_FRACTION: 0.9}),
            "compute",
            id="a short host of a busy device",
        ),
        pytest.param(on_cpu(0.0, sampled={Tag.MAJOR_FAULTS_PER_S: 1100.0}), "memory", id="faults"),
        pytest.param(
            on_cpu(0.0, sampled={Tag.MAJOR_FAULTS_PER_S: 900.0}), "compute", id="few faults"
        ),
        pytest.param(
            on_cpu(0.0, sampled={Tag.MAJOR_FAULTS_PER_S: 9e3, Tag.MEMORY_STALL_FRACTION: 0.0}),
            "compute",
            id="faults without pressure",
        ),
        pytest.param(
            evidence(0.4, stages=READING, sampled={Tag.MAJOR_FAULTS_PER_S: 9e3}),
            "storage",
            id="mapped files fault where read",
        ),
        pytest.param(
            evidence(0.0, sampled=CROWDED), "compute", id="a crowded host of a busy device"
        ),
        pytest.param(
            evidence(0.4, stages=DECODING, sampled=CROWDED),
            "neighbors",
            id="a crowded host of a device that waits",
        ),
        pytest.param(
            evidence(0.4, stages=READING, sampled=CROWDED), "storage", id="crowded readers"
        ),
        pytest.param(
            evidence(0.4, stages={"read": (3.0, 0.6), "decode": (0.5, 0.3)}, sampled=CROWDED),
            "neighbors",
            id="readers that wait for a processor each time",
        ),
        pytest.param(
            on_cpu(0.4, stages=DECODING, sampled=CROWDED | {Tag.OTHERS_CPU_CORES: 0.05}),
            "decode",
            id="own crowd",
        ),
        pytest.param(
            on_cpu(0.0, sampled=CROWDED | {Tag.THROTTLED_FRACTION: 0.9}),
            "quota",
            id="crowded, but throttled",
        ),
        pytest.param(
            evidence(0.0, sampled={Tag.GPU_OTHERS_UTILIZATION: 0.19}),
            "compute",
            id="hardly anybody on the GPU",
        ),
        pytest.param(
            evidence(0.4, stages=READING, sampled={Tag.GPU_OTHERS_UTILIZATION: 0.9}),
            "storage",
            id="a shared GPU that waits",
        ),
        pytest.param(
            on_cpu(0.0, ranks=(rank(0, 1.0), rank(1, 5.1))), "rank", id="a rank a tenth behind"
        ),
        pytest.param(
            on_cpu(0.0, ranks=(rank(0, 1.0), rank(1, 4.9))), "compute", id="a rank a little behind"
        ),
        pytest.param(
            on_cpu(0.0, ranks=(rank(0, 30.0), rank(1, 30.0))), "compute", id="ranks that wait alike"
        ),
    ],
)
def test_thresholds_hold_from_both_sides(given: Evidence, bottleneck: str) -> None:
    """A little less, or a little more, is another verdict."""
    assert kind(given) == bottleneck


@pytest.mark.parametrize(
    ("ranks", "part"),
    [
        pytest.param((rank(0, 1.0), rank(1, 1.0, host_ms=9.0)), "host", id="host"),
        pytest.param((rank(0, 1.0), rank(1, 1.0, forward_ms=19.0)), "forward", id="forward"),
        pytest.param(
            (rank(0, 1.0, host_ms=19.0), rank(1, 9.0, host_ms=None)),
            "stalled",
            id="one cannot tell",
        ),
    ],
)
def test_a_straggler_is_named_with_what_keeps_it(ranks: tuple[RankFigures, ...], part: str) -> None:
    """The cause is what that rank has more of than the others; what one rank cannot tell counts for
    none.
    """
    verdict = judge(on_cpu(0.0, ranks=ranks))
    late = verdict.shares.late
    assert verdict.kind == "rank" and late is not None and (late.rank, late.part) == (1, part)


def test_copies_to_any_type_of_device_want_page_locked_memory() -> None:
    """Where its own clock tells that it waits for copies, not where it is called cuda."""
    found = evidence(0.1, 0.3, stages=DECODING, settings=samples.settings(2), device="xpu")
    assert judge(found).change == {"loader.pin_memory": True}


def test_the_ceiling_is_what_free_loading_would_give() -> None:
    """The ceiling is 1 / (1 - stall), finite also where the device did nothing but wait."""
    ceilings = [judge(evidence(stall)).ceiling for stall in (0.0, 0.5, 0.75, 1.0)]
    assert ceilings == pytest.approx([1.0, 2.0, 4.0, 1000.0])


def test_without_figures_there_is_no_ceiling() -> None:
    """What is not known is absent."""
    for window, why in (({"stall_fraction": None}, "no stall"), ({"steps": 0}, "few steps")):
        verdict = judge(evidence(window=window))
        assert (verdict.kind, verdict.why, verdict.ceiling) == ("unknown", why, None)
        assert not verdict.change and not stated(verdict).evidence


@pytest.mark.parametrize(
    ("sampled", "workers", "bottleneck"),
    [
        pytest.param(
            {Tag.CPU_CORES: 1.0, Tag.CPU_FRACTION: 0.5}, 2, "storage", id="idle processors"
        ),
        pytest.param(
            {Tag.CPU_CORES: 1.9, Tag.CPU_FRACTION: 0.5}, 2, "decode", id="own processors full"
        ),
        pytest.param(
            {Tag.CPU_CORES: 1.0, Tag.CPU_FRACTION: 0.95}, 2, "decode", id="the machine full"
        ),
        pytest.param({Tag.CPU_CORES: 1.0, Tag.THROTTLED_FRACTION: 0.3}, 2, "quota", id="throttled"),
        pytest.param({}, 1, "storage", id="unknown"),
    ],
)
def test_a_data_set_without_stages_waits_unless_processors_were_scarce(
    sampled: dict[str, float], workers: int, bottleneck: str
) -> None:
    """Eight milliseconds with two of a processor are reading where there were idle ones, and else
    may be work.
    """
    slow = {"sample": (8.0, 2.0)}
    assert (
        kind(
            on_cpu(
                0.6,
                stages=slow,
                sampled=sampled,
                settings=samples.settings(workers),
                autotuned=True,
            )
        )
        == bottleneck
    )


def drawn(rng: random.Random) -> Evidence:
    """Evidence of any kind, with figures that contradict each other
    and figures that are missing.
    """
    maybe = lambda value: None if rng.random() < 0.2 else value
    share = lambda: rng.choice([0.0, 1.0, rng.random(), 10 ** rng.uniform(-4, 0)])
    names = ("read", "decode", "crop", "sample", "own", "collate", "share")
    stages = {
        name: (10 ** rng.uniform(-4, 3) * rng.choice([0, 1]), 10 ** rng.uniform(-4, 3))
        for name in rng.sample(names, rng.randrange(7))
    }
    shares = {
        name: share()
        for name in rng.sample(["compute", "starved", "exposed_copy", "host"], rng.randrange(5))
    }
    parts = {
        name: share() for name in rng.sample(["make", "transport", "pin", "move"], rng.randrange(5))
    }
    window = dataclasses.replace(
        Ledger().window(),
        steps=rng.randrange(100),
        images=rng.randrange(1000),
        elapsed_s=rng.choice([0.0, rng.random() * 100]),
        images_per_s=maybe(rng.choice([0.0, 10 ** rng.uniform(-2, 5)])),
        stall_fraction=maybe(share()),
        stall_basis=rng.choice(["host", "device"]),
        shares=shares,
        wait_parts=parts,
        host_parts_s={
            name: rng.random() for name in rng.sample(["gc", "logging", "hooks"], rng.randrange(4))
        },
        **{
            f"{name}_ms": maybe(spread(rng.random() * 10))
            for name in ("launch", "gap", "compute", "step")
        },
    )
    return Evidence(
        window=window,
        stages=maybe(totals(stages)._replace(samples=rng.choice([0, 1000]))),
        settings=samples.settings(rng.choice([0, 1, 8, 64]), batch_size=rng.choice([1, 256])),
        cores=rng.choice([0.1, 2.0, 64.0]),
        device=rng.choice(["cpu", "cuda", "mps"]),
        sampled={tag: 10 ** rng.uniform(-3, 9) for tag in Tag if rng.random() < 0.3},
        autotuned=rng.random() < 0.5,
        ranks=tuple(
            RankFigures(
                rank=i,
                step_ms=share(),
                stalled_ms=share(),
                host_ms=maybe(share()),
                forward_ms=maybe(share()),
            )
            for i in range(rng.randrange(4))
        ),
    )


@pytest.mark.parametrize("seed", range(10))
def test_any_figures_give_a_verdict(seed: int) -> None:
    """Whatever is missing or makes no sense: no error, no inf or nan in the text, a ceiling of 1 or
    more, a known kind.
    """
    rng = random.Random(seed)
    for _ in range(300):
        given = drawn(rng)
        verdict: Verdict = judge(given)
        assert verdict.kind in get_args(Bottleneck), given
        assert verdict.ceiling is None or 1 <= verdict.ceiling <= 1000, given
        told = stated(verdict)
        assert not re.search(r"\b(nan|inf|None)\b", " ".join([told.sentence, *told.evidence])), (
            given
        )
