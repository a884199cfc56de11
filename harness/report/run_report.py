"""Computes ``report.json`` for a run or a watched script, and the lines about its speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..clock.figures import Tag, as_report
from ..monitor.host import environment
from ..monitor.writer import plain
from .evidence import Evidence
from .statement import Statement


def report(
    evidence: Evidence,
    verdict: Statement,
    world_size: int,
    gpu: str | None,
    worker_s: float = 0.0,
    **own: Any,
) -> dict[str, Any]:
    """Returns a whole run's metrics by key, without unknown ones.

    Args:
        evidence: measurements from the whole run.
        verdict: the verdict on it.
        world_size: number of ranks.
        gpu: the GPU's name; None for other devices.
        worker_s: seconds across all workers, busy and idle; 0 if unknown.
        own: additional metrics for this kind of run, which come first or replace others.
    """
    sampled = evidence.sampled
    found = {
        "world_size": world_size,
        **as_report(evidence.window, world_size),
        "gpu_utilization": sampled.get(Tag.GPU_UTILIZATION),
        "sampled": sampled or None,
        "ranks": evidence.ranks or None,
        "loader": used(evidence.settings),
        "verdict": verdict,
        "environment": environment(gpu),
    }
    worked = evidence.stages
    if worked is not None and worked.samples:
        found["stages"] = [row for row in worked.rows() if row["wall_ms"]]
        found["workers"] = {"samples": worked.samples}
        if worker_s:
            found["workers"]["busy_fraction"] = min(1.0, worked.busy_s / worker_s)
    return {key: value for key, value in (own | found | own).items() if value is not None}


def sized(evidence: Evidence, ranks: int) -> dict[str, Any]:
    """Returns the metrics for ``ranks`` ranks' steps at one training image size."""
    window = evidence.window
    return {
        "size": evidence.size,
        "epochs": window.first_steps,
        "loader": str(evidence.settings),
        **as_report(window, ranks),
    }


def used(settings: Any) -> dict[str, Any]:
    """Returns a loader's settings as in ``report.json``."""
    # without workers, there are none to keep
    return {"persistent_workers": False, **plain(settings)}


def closing(report: Mapping[str, Any], unit: str) -> Iterator[str]:
    """Yields the lines about a run's speed; ``unit`` names the samples, such as images."""
    if step := report.get("step_ms"):
        yield (
            f"speed          {report['images_per_s']:.0f} {unit}/s while training, "
            f"median step {step.median:.1f} ms (p95 {step.p95:.1f}, max {step.max:.1f})"
        )
        yield f"data wait      {report['data_wait_fraction']:.1%} of the training time"
    if goodput := report.get("goodput"):
        parts = goodput["rest"][:3]
        rest = [f"{part['name'].replace('_', ' ')} {part['s']:.1f} s" for part in parts]
        yield (
            f"goodput        {goodput['fraction']:.0%} of {goodput['wall_s']:.1f} s in training "
            f"steps; {', '.join(rest)}"
        )
        if store := report.get("store"):
            wall_s = goodput["wall_s"]
            kept = store["scratch_bytes"] / max(1, store["bytes"] + store["scratch_bytes"])
            yield (
                f"store          {store['requests'] / wall_s:.0f} requests/s, "
                f"{store['bytes'] / wall_s / 1e6:.1f} MB/s; {kept:.0%} of the bytes from scratch"
            )
