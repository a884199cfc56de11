"""Compare runs by what they left in their folders: speed, stall, goodput, accuracy, and the
settings that differ.

The first run is the reference. A sweep's folder stands for its jobs, and any other folder for the
runs in it. A run that was interrupted or failed is listed and not compared.

    wellfed compare outputs/before outputs/after
    wellfed compare multirun/2026-05-04/10-20-30 --json
    wellfed compare outputs/main outputs/change --fail-beyond speed=0.95 stall=+0.05 top1=-0.01

Exit codes: 0; 1 where a run lies beyond a limit; 2 where a folder or a figure is missing or
damaged.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.compare.folders import (
    FIGURES,
    Figure,
    Run,
    Unusable,
    find,
    group,
    notes,
    settings_that_differ,
    text,
)
from harness.runtime.errors import printable

_MOST_COLUMNS = 4  # of settings beside the figures; more of them are a table of their own
_ROUNDING = 1e-9  # what the subtraction of two decimals may leave


@dataclass(frozen=True, slots=True)
class Limit:
    """How far a figure may be from the first run's."""

    figure: Figure
    bound: float

    @classmethod
    def parse(cls, text: str) -> Limit:
        """The limit that ``text`` writes: a ratio as in ``speed=0.95``, a difference of fractions
        as in ``stall=+0.05``.
        """
        name, _, value = text.partition("=")
        figure = next((figure for figure in FIGURES if figure.name == name), None)
        if figure is None:
            names = ", ".join(figure.name for figure in FIGURES)
            raise argparse.ArgumentTypeError(
                f"{text}: not a limit; write NAME=LIMIT, where the names are {names}"
            )
        try:
            bound = float(value)
        except ValueError:
            bound = math.nan
        signed = value[:1] in ("+", "-")
        if figure.is_fraction and not (signed and abs(bound) <= 1):
            example = f"{name}={'-' if figure.higher_is_better else '+'}0.05"
            raise argparse.ArgumentTypeError(
                f"{text}: write the allowed difference of two fractions, signed, such as {example}"
            )
        if not figure.is_fraction and not (not signed and 0 < bound <= 10):
            example = f"{name}={0.95 if figure.higher_is_better else 1.05}"
            raise argparse.ArgumentTypeError(
                f"{text}: write the allowed ratio to the first run, such as {example}"
            )
        return cls(figure, bound)

    def is_broken(self, change: float) -> bool:
        """Whether ``change`` lies beyond the limit; on it is within."""
        return (
            self.bound - change if self.figure.higher_is_better else change - self.bound
        ) > _ROUNDING

    def __str__(self) -> str:
        return f"{self.figure.name}={self.bound:{'+' if self.figure.is_fraction else ''}g}"


def judge(runs: Sequence[Run], limits: Sequence[Limit]) -> tuple[list[str], list[str]]:
    """What lies beyond the limits, and what could not be judged, a line each."""
    first, beyond, untold = runs[0], [], []
    if limits and len(runs) < 2:
        untold.append(
            f"--fail-beyond: {first.name} is the only run; name another one to compare it with"
        )
    for run in runs[1:] if limits else ():
        incomplete = next((one for one in (first, run) if one.status != "completed"), None)
        if incomplete is not None:
            untold.append(
                f"{run.name}: not judged, because {incomplete.name} is {incomplete.status}; "
                "compare completed runs"
            )
            continue
        changes = dict(run.changes(first))
        for limit in limits:
            figure = limit.figure
            if figure not in changes:
                untold.append(
                    f"{run.name}: {limit} cannot be judged: {_why_not(figure, run, first)}"
                )
            elif limit.is_broken(changes[figure]):
                value, reference = (
                    figure.shown(figure.of(one.report) or 0.0) for one in (run, first)
                )
                at = "least" if figure.higher_is_better else "most"
                allowed = figure.shown_change(limit.bound)
                beyond.append(
                    f"{run.name}: {figure.title} {value} against {reference} of {first.name}: "
                    f"{figure.shown_change(changes[figure])}, where {limit} allows {allowed} at "
                    f"{at}"
                )
    return beyond, untold


def _why_not(figure: Figure, run: Run, first: Run) -> str:
    for one in (first, run):
        if figure.of(one.report) is None:
            return f"the report of {one.name} has no {figure.key}; leave the limit out"
    if figure.is_clocked:
        return f"{first.name} and {run.name} have it from different clocks; leave the limit out"
    return f"{figure.key} of {first.name} is 0; compare with another run"


def rows(runs: Sequence[Run], settings: Mapping[str, Mapping[str, str]]) -> list[dict[str, str]]:
    """The table: a row for each run, its figures with their changes, and the ``settings``."""
    found = []
    all_completed = all(run.status == "completed" for run in runs)
    for run in runs:
        changes = {} if run is runs[0] else dict(run.changes(runs[0]))
        row = (
            {"run": run.name}
            | ({} if all_completed else {"status": run.status})
            | {"steps": text(run.report, "steps")}
        )
        for figure in FIGURES:
            value = figure.of(run.report)
            change = f" ({figure.shown_change(changes[figure])})" if figure in changes else ""
            row[figure.title] = "-" if value is None else figure.shown(value) + change
        row["verdict"] = text(group(run.report, "verdict"), "bottleneck")
        found.append(row | {key: values.get(run.name, "-") for key, values in settings.items()})
    return found


def table(listed: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table that reads well as plain text; the first row's keys are its columns."""
    lines = [
        [printable(cell).replace("|", "/") for cell in line]
        for line in (listed[0], *(row.values() for row in listed))
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    return "\n".join(
        [shown[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *shown[1:]]
    )


def show(runs: Sequence[Run], passed: Sequence[str]) -> str:
    """The comparison as text; ``passed`` are notes on folders that are no part of it."""
    settings = settings_that_differ(runs)
    beside = settings if len(settings) <= _MOST_COLUMNS else {}
    parts = [table(rows(runs, beside))]
    if settings and not beside:
        parts.append(table([{"setting": key, **values} for key, values in settings.items()]))
    if told := [*notes(runs), *passed]:
        parts.append("\n".join(f"- {printable(note)}" for note in told))
    return "\n\n".join(parts)


def as_json(
    runs: Sequence[Run], passed: Sequence[str], beyond: Sequence[str], untold: Sequence[str]
) -> str:
    """The comparison for programs."""
    settings = settings_that_differ(runs)
    listed = []
    for run in runs:
        figures = {figure.key: figure.of(run.report) for figure in FIGURES}
        listed.append(
            {
                "run": run.name,
                "status": run.status,
                "error": run.error,
                "figures": {key: value for key, value in figures.items() if value is not None},
                "against_first": {figure.key: change for figure, change in run.changes(runs[0])},
                "verdict": group(run.report, "verdict"),
                "settings": {key: run.settings.get(key) for key in settings if run.report},
            }
        )
    found = {
        "runs": listed,
        "notes": [*notes(runs), *passed],
        "beyond_limits": beyond,
        "not_judged": untold,
    }
    return json.dumps(found, indent=2, default=str)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison; the exit code."""
    parser = argparse.ArgumentParser(
        prog="wellfed compare",
        description="Compare runs by what they left in their folders. The first one is the "
                    "reference.",
        epilog="Figures that --fail-beyond knows: " + ", ".join(f"{figure.name} "
                                                                f"({figure.title})" for figure in FIGURES)
        + ". Exit codes: 0; 1 where a run lies beyond a limit; 2 where a folder or a figure is "
          "missing or damaged.",
    )  # fmt: skip
    parser.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="FOLDER",
        help="a run's folder, or a sweep's for all of its jobs",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument(
        "--fail-beyond", nargs="+", action="extend", default=[], type=Limit.parse, metavar="NAME=LIMIT",
        help="how far a run may be from the first one: a ratio, as in speed=0.95 and step=1.05, or "
             "a difference of "
        "fractions, as in stall=+0.05 and top1=-0.01",
    )  # fmt: skip
    options = parser.parse_args(argv)
    try:
        runs, passed = find(options.folders)
    except (Unusable, OSError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    beyond, untold = judge(runs, options.fail_beyond)
    print(as_json(runs, passed, beyond, untold) if options.json else show(runs, passed))
    unreadable = [f"{run.error}" for run in runs if run.status == "unreadable"]
    for kind, lines in (("error", [*unreadable, *untold]), ("regression", beyond)):
        for line in lines:
            print(f"{kind}: {printable(line)}", file=sys.stderr)
    return 1 if beyond else 2 if untold or unreadable else 0


if __name__ == "__main__":
    sys.exit(main())
