"""Reduces ``metrics.jsonl`` to chart points, and keeps every spike."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ...clock.figures import FIGURES, STEP_FIGURES, Metric, Tag
from ...runtime.files import number, read_lines

SPREAD = ("median", "p95", "max")
# parts of a step
PARTS = ("compute", "prepare", "starved", "exposed_copy", "host")
CHARTED = [figure for figure in FIGURES if figure.chart]
TYPICAL = "time/step_ms/median"
LONGEST = "time/step_ms/max"


def _drawn(figure: Metric) -> str:
    """Returns the tag that a metric's chart draws."""
    return f"{figure.tag}/median" if figure.unit == "ms" else figure.tag


TAGS = sorted(
    {
        *(f"time/step_ms/{of}" for of in SPREAD),
        *(f"time/{part}_ms/{of}" for part in PARTS for of in ("median", "max")),
        *map(_drawn, CHARTED),
    }
)


@dataclass(slots=True)
class Windows:
    """The logged windows of steps.

    Attributes:
        columns: one entry per window, by ``step``, ``epoch`` and tag, with the user's tags last;
            None if missing.
        last: the last window's line.
        damaged: number of unreadable lines, except for a last one that is still being written.
    """

    columns: dict[str, list[Any]] = field(
        default_factory=lambda: {name: [] for name in ("step", "epoch", *TAGS)}
    )
    last: Mapping[str, Any] = field(default_factory=dict)
    damaged: int = 0


def read_windows(path: Path) -> Windows:
    """Returns the windows in the file ``path``.

    Raises:
        OSError: it cannot be read.
    """
    windows = Windows()
    for text in read_lines(path):
        try:
            line = json.loads(text)
            needed = number(line.get("step")), number(line.get(TYPICAL))
        except (ValueError, AttributeError, RecursionError):
            windows.damaged += text.endswith(b"\n")
            continue
        # other lines come from evaluations
        if None not in needed:
            for name in line:
                if name.startswith("user/"):
                    before = [None] * len(windows.columns["step"])
                    windows.columns.setdefault(name, before)
            for name, column in windows.columns.items():
                column.append(number(line.get(name)))
            windows.last = line
    return windows


def course(windows: Windows, buckets: int) -> dict[str, Any] | None:
    """Returns the windows in at most ``buckets`` groups of neighbors, for JSON; None if empty.

    - ``columns``: for every tag, the ``mean`` of each group; also its ``low`` and ``high`` if
      groups have more than one window.
    - ``spikes``: outlier steps, the longest in each group, the longest first, each with its group
      ``at`` and its ``cause``, the part that took more than half of it.
    - ``spike_count``: the number of windows with a spike.
    """
    steps = windows.columns["step"]
    if not steps:
        return None
    groups = min(len(steps), buckets)
    edges = [group * len(steps) // groups for group in range(groups + 1)]
    columns = {}
    kinds: dict[str, Any] = {"mean": fmean}
    if groups < len(steps):
        # a group's lowest and highest keep every spike
        kinds |= {"low": min, "high": max}
    for tag in [*windows.columns][2:]:
        figures = windows.columns[tag]
        known = [[ms for ms in figures[a:b] if ms is not None] for a, b in pairwise(edges)]
        if any(known):
            # four digits are more than a chart shows
            columns[tag] = {
                kind: [float(f"{of(group):.4g}") if group else None for group in known]
                for kind, of in kinds.items()
            }

    begins = [0, *steps]
    # the longest spike comes first, so each group marks its longest one
    found = spikes(windows)
    marked: dict[int, dict[str, Any]] = {}
    for index in found:
        group = bisect_right(edges, index) - 1
        ms = windows.columns[LONGEST][index]
        spike = {"after": begins[index], "step": steps[index], "ms": ms, "at": group}
        parts = {part: windows.columns[f"time/{part}_ms/max"][index] or 0.0 for part in PARTS}
        cause = max(PARTS, key=lambda part: parts[part])
        if parts[cause] > ms / 2:
            spike["cause"] = cause
        marked.setdefault(group, spike)
    ends = [edge - 1 for edge in edges[1:]]
    return {
        "steps": [steps[end] for end in ends],
        "epochs": [windows.columns["epoch"][end] for end in ends],
        "windows": len(steps),
        "columns": columns,
        "spikes": [*marked.values()],
        "spike_count": len(found),
    }


def latest(windows: Windows) -> dict[str, Any]:
    """Returns the last window under a report's keys, unchecked, for a run without a report."""
    last = windows.last
    parts = {part: number(last.get(f"time/{part}_ms/median")) or 0.0 for part in PARTS}
    whole = sum(parts.values())
    told = {
        "steps": last.get("step"),
        "gpu_utilization": last.get(Tag.GPU_UTILIZATION),
        "shares": {part: ms / whole for part, ms in parts.items() if ms > 0},
    }
    for name, figure in STEP_FIGURES.items():
        told[name] = last.get(figure.tag)
        if f"{figure.tag}/max" in last:
            told[name] = {of: last.get(f"{figure.tag}/{of}") for of in SPREAD}
    return told if last else {}


def declared() -> dict[str, Any]:
    """Returns the charts and rows for the metrics on the page."""
    charts: dict[str, Any] = {}
    for figure in CHARTED:
        empty = {"title": figure.chart, "unit": figure.unit, "series": []}
        line = {"tag": _drawn(figure), "name": figure.label or figure.text}
        charts.setdefault(figure.chart, empty)["series"].append(line)
    rows = [
        {"name": name, "unit": figure.unit, "text": figure.text}
        for name, figure in STEP_FIGURES.items()
    ]
    return {"charts": [*charts.values()], "figures": rows}


def spikes(windows: Windows) -> list[int]:
    """Returns the windows whose longest step is an outlier: longest first, then earliest."""
    longest = windows.columns[LONGEST]
    known = [ms for ms in longest if ms is not None]
    if not known:
        return []
    # three times a typical step, and twice the usual longest step of a window
    typical = median(windows.columns[TYPICAL])
    least = max(3.0 * typical, 2.0 * median(known))
    over = [index for index, ms in enumerate(longest) if ms is not None and ms > least]
    return sorted(over, key=lambda index: -longest[index])
