"""Figures in, one sentence and a ceiling out. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.watch.figures import Window

_MIN_STEPS = 10  # fewer say nothing about a run
_STARVED = 0.10  # MLPerf Storage asks for an accelerator utilisation of 0.90
_FED = 0.02  # what a stall below this would give back cannot be told from noise
_BUSY = 0.70  # below, with the data there, the device waits for the host itself


@dataclass(frozen=True, slots=True)
class Verdict:
    """What bounds a run."""

    bottleneck: Literal["balanced", "data", "compute", "unknown"]  # balanced: some waiting, under 10 %
    ceiling: float | None  # speed-up if loading were free, 1 / (1 - stall_fraction); None where the stall is not known
    sentence: str  # the evidence, and what to try next as an override that can be typed


def judge(figures: Window, *, autotuned: bool) -> Verdict:
    """What bounds the steps in ``figures``, and what to try: the loader's search only where it is not ``autotuned``."""
    stall = figures.stall_fraction
    if stall is None or figures.steps < _MIN_STEPS:
        few = f"{figures.steps} steps are too few for a verdict: try trainer.max_steps=null for a full epoch"
        return Verdict("unknown", None, few)
    ceiling = 1 / max(1 - stall, 1e-3)
    on_device = figures.stall_basis == "device"
    evidence = f"{'The device' if on_device else 'Training'} waited for data in {stall:.0%} of the time"
    if stall > _STARVED:
        return Verdict("data", ceiling, f"{evidence}; {_cure(ceiling, on_device, autotuned)}")
    if stall > _FED:
        return Verdict("balanced", ceiling, f"{evidence}: faster loading could give {ceiling:.2f}x at most")
    if on_device and figures.compute_fraction is not None and figures.compute_fraction < _BUSY:
        evidence += f" and computed in {figures.compute_fraction:.0%}; between two steps it waits for Python"
        return Verdict("unknown", ceiling, f"{evidence} (logging, callbacks): try a larger loader.batch_size")
    way = "try trainer.precision=bf16 trainer.channels_last=true" if on_device else "try a smaller model or image"
    return Verdict("compute", ceiling, f"{evidence}; the network's own work sets the pace: {way}")


def _cure(ceiling: float, on_device: bool, autotuned: bool) -> str:
    gain = f"faster loading could give up to {ceiling:.1f}x"
    if not on_device:
        gain = f"with loading for free it would be about {ceiling:.1f}x, but both share these cores"
    if not autotuned:
        return f"{gain}: try loader.autotune=true"
    return f"{gain}, and the loader is tuned already: make loading cheaper (smaller files, less augmentation) or add cores"
