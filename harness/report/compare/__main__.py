"""Compares the metrics of several runs, and lists the settings that differ.

The first run is the reference. A sweep folder stands for its jobs; any other folder, for the runs
in it. Interrupted and failed runs are listed but not compared.

    wellfed compare outputs/before outputs/after
    wellfed compare multirun/2026-05-04/10-20-30 --json
    wellfed compare outputs/main outputs/change --fail-beyond speed=0.95 stall=+0.05 top1=-0.01

Limits apply to speed (images/s), step (ms, median), p95 (ms, of steps), stall, goodput and top1.
Exit codes: 0: success; 1: a run exceeds a limit; 2: a folder or metric is missing or damaged.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ...config import ConfigError
from ...runtime.errors import printable, tell
from .folders import FIGURES, Run, find, settings_that_differ, text

# the text typed, the metric's key, and the allowed change from the first run's value
Limit = tuple[str, str, float]


def limit(typed: str) -> Limit:
    """Parses a ratio such as ``speed=0.95`` or a difference such as ``stall=+0.05``."""
    name, _, value = typed.partition("=")
    keys = {figure.name: key for key, figure in FIGURES.items()}
    if name not in keys:
        raise argparse.ArgumentTypeError(
            f"{printable(typed)}: not a limit; write NAME=LIMIT with one of the names "
            f"{', '.join(keys)}"
        )
    # rejects percentages and absolute values
    fraction = FIGURES[keys[name]].is_fraction
    pattern = r"[+-](0?\.\d+|0|1|1\.0+)" if fraction else r"\d?\.\d+|\d"
    if not re.fullmatch(pattern, value):
        raise argparse.ArgumentTypeError(
            f"{printable(typed)}: write the allowed ratio, such as step=1.05, or for stall, "
            "goodput and top1 the signed difference, such as top1=-0.01"
        )
    return typed, keys[name], float(value)


def judge(runs: Sequence[Run], limits: Sequence[Limit]) -> tuple[list[str], list[str]]:
    """Returns the exceeded limits and those that cannot be judged, one line each."""
    first, *others = runs
    beyond = []
    untold = []
    if limits and not others:
        untold.append(f"--fail-beyond: {first.run} is the only run; pass another one to compare")
    for run in others:
        changes = run.changes(first)
        for typed, key, bound in limits:
            figure = FIGURES[key]
            if key not in changes:
                needs = "both must be completed and have the metric, by the same clock"
                untold.append(f"{run.run}: {typed} cannot be judged against {first.run}: {needs}")
                continue
            excess = (changes[key] - bound) * (-1 if figure.higher_is_better else 1)
            # a value on the limit passes despite rounding
            if excess > 1e-9:
                beyond.append(
                    f"{run.run}: {figure.title} {figure.shown(run.figures[key])} against "
                    f"{figure.shown(first.figures[key])} in {first.run}: "
                    f"{figure.shown_change(changes[key])}, beyond {typed}"
                )
    return beyond, untold


def rows(runs: Sequence[Run]) -> Iterator[dict[str, str]]:
    """Yields the rows of the table: a run's metrics with their changes."""
    for run in runs:
        row = {"run": run.run, "status": run.status, "steps": run.steps}
        changes = run.changes(runs[0]) if run is not runs[0] else {}
        for key, figure in FIGURES.items():
            row[figure.title] = figure.shown(run.figures[key]) if key in run.figures else "-"
            if key in changes:
                row[figure.title] += f" ({figure.shown_change(changes[key])})"
        yield row | {"verdict": text(run.verdict, "bottleneck")}


def table(listed: Sequence[Mapping[str, str]]) -> str:
    """Returns a Markdown table that is readable as text; columns are the first row's keys."""
    lines = [
        [printable(cell).replace("|", "/") for cell in line]
        for line in (listed[0], *(row.values() for row in listed))
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


def show(runs: Sequence[Run], told: Sequence[str]) -> str:
    """Returns the comparison as text, with the notes ``told``."""
    parts = [table([*rows(runs)])]
    if settings := settings_that_differ(runs):
        parts.append(table([{"setting": key, **values} for key, values in settings.items()]))
    if told:
        parts.append("\n".join(f"- {printable(note)}" for note in told))
    return "\n\n".join(parts)


def as_json(
    runs: Sequence[Run], told: Sequence[str], beyond: Sequence[str], untold: Sequence[str]
) -> str:
    """Returns the comparison as JSON, without metrics that a run lacks."""
    differ = settings_that_differ(runs)
    listed = [
        {
            **run._asdict(),
            "against_first": run.changes(runs[0]),
            "settings": {key: run.settings.get(key) for key in differ},
        }
        for run in runs
    ]
    found = {"runs": listed, "notes": told, "beyond_limits": beyond, "not_judged": untold}
    return json.dumps(found, indent=2, default=str)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the comparison; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="wellfed compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="FOLDER",
        help="run folder, or sweep folder for all its jobs",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--fail-beyond",
        nargs="+",
        action="extend",
        default=[],
        type=limit,
        metavar="NAME=LIMIT",
        help="allowed change from the first run: a ratio such as speed=0.95 or step=1.05, or "
        "for fractions, a difference such as stall=+0.05 or top1=-0.01",
    )
    options = parser.parse_args(argv)
    try:
        runs, passed = find(options.folders)
    except OSError as error:
        return tell([ConfigError(str(error))])
    beyond, untold = judge(runs, options.fail_beyond)
    broken = [
        ": ".join(str(part) for part in run[:3] if part)
        for run in runs
        if run.status != "completed"
    ]
    told = [*broken, *passed]
    print(as_json(runs, told, beyond, untold) if options.json else show(runs, told))
    errors = [str(run.error) for run in runs if run.status == "unreadable"] + untold
    for line in [f"error: {line}" for line in errors] + [f"regression: {line}" for line in beyond]:
        print(printable(line), file=sys.stderr)
    return 1 if beyond else 2 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
