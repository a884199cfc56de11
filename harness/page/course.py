"""The course of a run from its ``metrics.jsonl``: as many points as a chart can show, with no spike
lost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from harness.page.shape import number
from harness.runtime.files import open_regular, parsed
from harness.watch.figures import FIGURES, STEP_FIGURES, Figure, Tag

SPREAD = ("median", "p95", "max")
PARTS = ("compute", "prepare", "starved", "exposed_copy", "host")  # of a step
CHARTED = tuple(figure for figure in FIGURES if figure.chart)


def _columns(figure: Figure) -> list[str]:
    """Returns the tags of a figure in ``metrics.jsonl``, the one that a chart draws first."""
    return [f"{figure.tag}/{of}" for of in SPREAD] if figure.unit == "ms" else [figure.tag]


TAGS = tuple(
    dict.fromkeys(tag for figure in (*STEP_FIGURES.values(), *CHARTED) for tag in _columns(figure))
)
_DRAWN = {
    *(f"time/step_ms/{of}" for of in SPREAD),
    *(f"time/{part}_ms/median" for part in PARTS),
    *(_columns(figure)[0] for figure in CHARTED),
}

_OF_TYPICAL = 3.0  # a spike is a step that is so many times the typical one
_OF_USUAL = 2.0  # and so many times the longest that windows usually have

Figures = list[float | None]


@dataclass(slots=True)
class Windows:
    """The logged windows of steps, one entry per window in every list.

    Attributes:
        steps: the step after which it was logged.
        epochs: the epoch it lies in; None where the line does not say.
        figures: by tag.
        damaged: lines that could not be read, but for a last one that is still being written.
    """

    steps: list[int] = field(default_factory=list)
    epochs: Figures = field(default_factory=list)
    figures: dict[str, Figures] = field(default_factory=lambda: {tag: [] for tag in TAGS})
    damaged: int = 0


def read_windows(path: Path) -> Windows:
    """The windows that the file ``path`` has, in the order of their steps.

    Raises:
        OSError: it cannot be read.
    """
    lines: list[tuple[int, Figures]] = []
    windows = Windows()
    with open(open_regular(path), "rb") as file:
        for text in file:
            try:
                line = parsed(text)
                step = line["step"]
            except (ValueError, KeyError, TypeError):
                windows.damaged += text.endswith(b"\n")
                continue
            if number(step) is not None and number(line.get("time/step_ms/median")) is not None:
                lines.append((int(step), [number(line.get(name)) for name in ("epoch", *TAGS)]))
    for step, (epoch, *found) in sorted(lines, key=lambda pair: pair[0]):
        windows.steps.append(step)
        windows.epochs.append(epoch)
        for figures, figure in zip(windows.figures.values(), found, strict=True):
            figures.append(figure)
    return windows


def course(windows: Windows, buckets: int) -> dict[str, Any] | None:
    """The windows in at most ``buckets`` groups of neighbours, as JSON can hold them; None where
    there are none.

    ``columns`` gives for every tag the ``mean`` of each group, and its ``low`` and ``high`` where a
    group is more than one window; ``spikes`` are single steps that stand out, the longest of each
    group, the longest first, each with the group it is ``at``; ``spike_count`` is the number of
    windows that hold one.
    """
    count = len(windows.steps)
    if not count:
        return None
    groups = min(count, buckets)
    edges = [group * count // groups for group in range(groups + 1)]
    columns = {
        tag: _column(figures, edges)
        for tag, figures in windows.figures.items()
        if tag in _DRAWN and any(figure is not None for figure in figures)
    }
    found = spikes(windows)
    longest: dict[int, int] = {}
    for index in found:
        longest.setdefault(bisect_right(edges, index) - 1, index)
    return {
        "steps": [windows.steps[edge - 1] for edge in edges[1:]],
        "epochs": [windows.epochs[edge - 1] for edge in edges[1:]],
        "windows": count,
        "columns": columns,
        "spikes": [_told(windows, index) | {"at": group} for group, index in longest.items()],
        "spike_count": len(found),
    }


def latest(windows: Windows) -> dict[str, Any]:
    """The last window in the words of a report, with None for what it does not say: for a run that
    has no report yet.
    """
    if not windows.steps:
        return {}
    last = {tag: figures[-1] for tag, figures in windows.figures.items()}
    spreads = {name: figure.tag for name, figure in STEP_FIGURES.items() if figure.unit == "ms"}
    numbers = {name: figure.tag for name, figure in STEP_FIGURES.items() if figure.unit != "ms"}
    known = {part: ms for part in PARTS if (ms := last[f"time/{part}_ms/median"]) is not None}
    whole = sum(known.values())
    return {
        "steps": windows.steps[-1],
        "gpu_utilization": last[Tag.GPU_UTILIZATION],
        **{name: last[tag] for name, tag in numbers.items()},
        **{name: {of: last[f"{tag}/{of}"] for of in SPREAD} for name, tag in spreads.items()},
        "shares": {part: ms / whole for part, ms in known.items()} if whole > 0 else None,
    }


def declared() -> dict[str, Any]:
    """Returns what the page shows of the figures: the charts of their courses, and a row for each
    of the steps.
    """
    charts: dict[str, list[Figure]] = {}
    for figure in CHARTED:
        charts.setdefault(figure.chart, []).append(figure)
    return {
        "charts": [
            {
                "title": title,
                "unit": drawn[0].unit,
                "series": [
                    {"tag": _columns(figure)[0], "name": figure.label or figure.text}
                    for figure in drawn
                ],
            }
            for title, drawn in charts.items()
        ],
        "figures": [
            {"name": name, "unit": figure.unit, "text": figure.text}
            for name, figure in STEP_FIGURES.items()
        ],
    }


def spikes(windows: Windows) -> list[int]:
    """The windows whose longest step stands out, the longest first, and of equal ones the earliest."""
    longest = windows.figures["time/step_ms/max"]
    known = [figure for figure in longest if figure is not None]
    if not known:
        return []
    typical = median(
        figure for figure in windows.figures["time/step_ms/median"] if figure is not None
    )
    least = max(_OF_TYPICAL * typical, _OF_USUAL * median(known))
    over = [
        (figure, index)
        for index, figure in enumerate(longest)
        if figure is not None and figure > least
    ]
    return [index for _, index in sorted(over, key=lambda spike: (-spike[0], spike[1]))]


def _told(windows: Windows, index: int) -> dict[str, Any]:
    """One spike: between which steps, how long, and the part of a step that made up most of it, if
    one did.
    """
    ms = windows.figures["time/step_ms/max"][index] or 0.0
    parts = {part: windows.figures[f"time/{part}_ms/max"][index] or 0.0 for part in PARTS}
    cause = max(parts, key=lambda part: parts[part])
    before = windows.steps[index - 1] if index else 0
    told = {"after": before, "step": windows.steps[index], "ms": _short(ms)}
    return told | ({"cause": cause} if parts[cause] > ms / 2 else {})


def _column(figures: Sequence[float | None], edges: Sequence[int]) -> dict[str, Figures]:
    column: dict[str, Figures] = {"mean": [], "low": [], "high": []}
    for first, end in pairwise(edges):
        known = [figure for figure in figures[first:end] if figure is not None]
        column["mean"].append(_short(sum(known) / len(known)) if known else None)
        column["low"].append(_short(min(known)) if known else None)
        column["high"].append(_short(max(known)) if known else None)
    return column if len(figures) >= len(edges) else {"mean": column["mean"]}


def _short(figure: float) -> float:
    """Four digits are more than a chart shows."""
    return float(f"{figure:.4g}")
