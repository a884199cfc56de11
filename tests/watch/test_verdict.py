"""One sentence from the figures."""

import dataclasses
from typing import Any

import pytest

from harness.watch.figures import Ledger, Window
from harness.watch.verdict import judge


def window(**figures: Any) -> Window:
    base = dataclasses.replace(Ledger().window(), steps=100, stall_basis="device", compute_fraction=0.9)
    return dataclasses.replace(base, **figures)


@pytest.mark.parametrize(
    ("figures", "autotuned", "bottleneck", "sentence"),
    [
        pytest.param(
            {"stall_fraction": 0.38}, False, "data",
            "The device waited for data in 38% of the time; faster loading could give up to 1.6x: "
            "try loader.autotune=true",
            id="device starved",
        ),
        pytest.param(
            {"stall_fraction": 0.5}, True, "data",
            "The device waited for data in 50% of the time; faster loading could give up to 2.0x, and the loader is tuned "
            "already: make loading cheaper (smaller files, less augmentation) or add cores",
            id="starved though tuned",
        ),
        pytest.param(
            {"stall_fraction": 0.5, "stall_basis": "host"}, False, "data",
            "Training waited for data in 50% of the time; with loading for free it would be about 2.0x, but both share "
            "these cores: try loader.autotune=true",
            id="cpu starved",
        ),
        pytest.param(
            {"stall_fraction": 0.06}, False, "balanced",
            "The device waited for data in 6% of the time: faster loading could give 1.06x at most",
            id="balanced",
        ),
        pytest.param(
            {"stall_fraction": 0.01}, False, "compute",
            "The device waited for data in 1% of the time; the network's own work sets the pace: "
            "try trainer.precision=bf16 trainer.channels_last=true",
            id="device busy",
        ),
        pytest.param(
            {"stall_fraction": 0.0, "stall_basis": "host"}, True, "compute",
            "Training waited for data in 0% of the time; the network's own work sets the pace: "
            "try a smaller model or image",
            id="cpu busy",
        ),
        pytest.param(
            {"stall_fraction": 0.01, "compute_fraction": 0.3}, False, "unknown",
            "The device waited for data in 1% of the time and computed in 30%; between two steps it waits for Python "
            "(logging, callbacks): try a larger loader.batch_size",
            id="host bound",
        ),
        pytest.param(
            {"stall_fraction": 0.9, "steps": 9}, False, "unknown",
            "9 steps are too few for a verdict: try trainer.max_steps=null for a full epoch",
            id="too short",
        ),
        pytest.param(
            {"stall_fraction": None, "steps": 0}, False, "unknown",
            "0 steps are too few for a verdict: try trainer.max_steps=null for a full epoch",
            id="no figures",
        ),
    ],
)  # fmt: skip
def test_the_sentence_has_the_evidence_and_the_next_step(
    figures: dict[str, Any], autotuned: bool, bottleneck: str, sentence: str
) -> None:
    """Each kind of bottleneck is named, with its figure and something to type."""
    verdict = judge(window(**figures), autotuned=autotuned)
    assert (verdict.bottleneck, verdict.sentence) == (bottleneck, sentence)


@pytest.mark.parametrize(("stall", "ceiling"), [(0.0, 1.0), (0.5, 2.0), (0.75, 4.0), (1.0, 1000.0)])
def test_the_ceiling_is_what_free_loading_would_give(stall: float, ceiling: float) -> None:
    """The ceiling is 1 / (1 - stall), finite also where the device did nothing but wait."""
    assert judge(window(stall_fraction=stall), autotuned=False).ceiling == pytest.approx(ceiling)


def test_without_figures_there_is_no_ceiling() -> None:
    """What is not known is absent."""
    assert judge(window(stall_fraction=None), autotuned=False).ceiling is None
