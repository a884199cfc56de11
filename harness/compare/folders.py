"""What runs left in their folders, as figures and settings that can be compared."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import config
from harness.runtime.files import read_inside, read_json

_MOST_NAMES = 3  # of runs in a note
_LARGEST = 1e300  # what is beyond is no figure, and an integer of JSON may be too long for a float
_CONFIG = ".hydra/config.yaml"


class Unusable(Exception):
    """Input that nothing can be told from; the text is one line with the way out."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a report, and how two of them are compared.

    Attributes:
        name: what a limit calls it.
        title: its column, with the unit.
        path: where ``report.json`` holds it.
        higher_is_better: otherwise lower is.
        is_fraction: 0..1 and compared by difference; other figures are compared by ratio.
        is_clocked: rests on the clock that ``stall_basis`` names, and is compared with figures of
            the same clock alone.
    """

    name: str
    title: str
    path: tuple[str, ...]
    higher_is_better: bool
    is_fraction: bool
    is_clocked: bool = False

    @property
    def key(self) -> str:
        """Its name in JSON, which carries the unit."""
        return "_".join(self.path)

    def of(self, report: Mapping[str, Any]) -> float | None:
        """The figure in ``report``; None where there is no finite number."""
        value: Any = report
        for part in self.path:
            value = value.get(part) if isinstance(value, Mapping) else None
        is_number = (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and -_LARGEST < value < _LARGEST
        )
        return float(value) if is_number else None

    def change(self, value: float, first: float) -> float | None:
        """``value`` against ``first``; None where a ratio has nothing to refer to."""
        if self.is_fraction:
            return value - first
        return value / first if first > 0 else None

    def shown(self, value: float) -> str:
        """``value`` as people read it."""
        return (
            f"{value:.1%}"
            if self.is_fraction
            else f"{value:.0f}"
            if value >= 1000
            else f"{value:.4g}"
        )

    def shown_change(self, change: float) -> str:
        """A change as people read it."""
        return f"{100 * change:+.1f} points" if self.is_fraction else f"{change:.3g}x"


FIGURES = (
    Figure("speed", "images/s", ("images_per_s",), True, False),
    Figure("step", "step ms", ("step_ms", "median"), False, False),
    Figure("p95", "p95 ms", ("step_ms", "p95"), False, False),
    Figure("stall", "stall", ("stall_fraction",), False, True, True),
    Figure("goodput", "goodput", ("goodput", "fraction"), True, True, True),
    Figure("top1", "top-1", ("top1",), True, True),
)


@dataclass(frozen=True, slots=True)
class Run:
    """What a run's folder says.

    Attributes:
        name: the folder, as short as tells it from the others.
        status: completed, interrupted or failed, as the report has it; unreadable where there is no
            report.
        error: why it did not complete, where that is known.
        report: ``report.json``.
        settings: the run's settings by dotted name, and ``used.*``, what its loader ran with.
    """

    name: str
    status: str
    error: str | None = None
    report: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def changes(self, first: Run) -> Iterator[tuple[Figure, float]]:
        """Each figure that this run and ``first`` can be compared by, with the change; none unless
        both completed.
        """
        if self.status == first.status == "completed":
            same_clock = self.report.get("stall_basis") == first.report.get("stall_basis")
            for figure in FIGURES:
                value, reference = figure.of(self.report), figure.of(first.report)
                if (
                    value is not None
                    and reference is not None
                    and (same_clock or not figure.is_clocked)
                ):
                    change = figure.change(value, reference)
                    if change is not None:
                        yield figure, change


def find(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs in ``folders``, in the order given, those of one folder by name; and a note for each
    folder that is passed over.

    Raises:
        Unusable: a folder is not there or holds no run.
    """
    found = [Path(os.path.abspath(place)) for folder in folders for place in _expanded(folder)]
    places = [place for place in found if not _is_diagnosis(place)]
    passed = [
        f"{os.path.relpath(place)}: passed over: a diagnosis trains nothing"
        for place in found
        if place not in places
    ]
    if not places:
        raise Unusable(f"{passed[0]}; name a run's folder, or a sweep's")
    base = os.path.commonpath([place.parent for place in places])
    return [_read(place, os.path.relpath(place, base)) for place in places], passed


def _expanded(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise Unusable(f"{folder}: no such folder; name a run's folder, or a sweep's")
    if _is_run(folder):
        return [folder]
    jobs = sorted((place for place in folder.iterdir() if _is_run(place)), key=_natural)
    if not jobs:
        raise Unusable(
            f"{folder}: holds no run, nor does a folder in it; name a folder with a report.json, "
            "or one above it"
        )
    return jobs


def _is_run(folder: Path) -> bool:
    return (folder / "report.json").is_file() or (folder / ".hydra").is_dir()


def _is_diagnosis(folder: Path) -> bool:
    """Whether it holds what ``mode=diagnose`` leaves, and no run's report."""
    return (folder / "diagnosis.json").is_file() and not (folder / "report.json").is_file()


def _natural(folder: Path) -> list[str | int]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", folder.name)]


def _read(folder: Path, name: str) -> Run:
    path = folder / "report.json"
    try:
        report = read_json(path)
        if not isinstance(report, dict) or not isinstance(report.get("status"), str):
            raise ValueError("holds no status")
        path = folder / _CONFIG
        settings = config.saved(read_inside(folder, _CONFIG)) if path.exists() else {}
    except FileNotFoundError:
        return Run(
            name,
            "unreadable",
            f"{os.path.relpath(path)}: not there; wait for the run's end, or look into its "
            "train.log",
        )
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        return Run(
            name, "unreadable", f"{os.path.relpath(path)}: damaged: {why}; leave the run out"
        )
    tree = {
        **settings,
        "used": group(report, "loader"),
        "world_size": report.get("world_size"),
    }
    flat = {key: value for key, value in _flat(tree) if key != "run.name"}  # every run has its own
    return Run(name, report["status"], report.get("error"), report, flat)


def group(report: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object ``name`` of a report; an empty one where there is none."""
    found = report.get(name)
    return found if isinstance(found, Mapping) else {}


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differing(trees: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Each key that tells some of the named ``trees`` from others, with its value in each as text;
    ``-`` where it is not.
    """
    keys = dict.fromkeys(key for tree in trees.values() for key in tree)
    values = {key: {name: text(tree, key) for name, tree in trees.items()} for key in keys}
    return {key: by_name for key, by_name in values.items() if len(set(by_name.values())) > 1}


def text(tree: Mapping[str, Any], key: str) -> str:
    """A value as people read it; ``-`` where there is none."""
    value = tree.get(key, "-")
    return value if isinstance(value, str) else json.dumps(value)


def settings_that_differ(runs: Sequence[Run]) -> dict[str, dict[str, str]]:
    """Each setting that tells some of ``runs`` from others, by run; ``used.*`` only where it says
    more than ``loader.*``.
    """
    found = differing({run.name: run.settings for run in runs if run.report})
    asked = {
        key.replace("loader.", "used.", 1): values
        for key, values in found.items()
        if key.startswith("loader.")
    }
    return {key: values for key, values in found.items() if asked.get(key) != values}


def notes(runs: Sequence[Run]) -> list[str]:
    """What a reader must know of the figures: runs that did not complete; other machines, versions
    and clocks.
    """
    found = [
        f"{run.name}: {run.status}{f': {run.error}' if run.error else ''}"
        for run in runs
        if run.status != "completed"
    ]
    facts = {
        run.name: {
            "stall_basis": run.report.get("stall_basis"),
            **dict(_flat(group(run.report, "environment"))),
        }
        for run in runs
        if run.report
    }
    for key, values in differing(facts).items():
        names = {
            value: [name for name in values if values[name] == value]
            for value in dict.fromkeys(values.values())
        }
        found.append(
            f"{key} differs: "
            + "; ".join(f"{value} ({_some(those)})" for value, those in names.items())
        )
    return found


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
