"""Reads the metrics and settings of runs from their folders."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ... import config
from ...runtime.files import natural, number, read_inside, read_written


class Figure(NamedTuple):
    """A metric in a report, and how to compare two values of it.

    Attributes:
        name: its name in limits.
        title: its column title, with the unit.
        path: its dotted key in ``report.json``.
        higher_is_better: whether higher values are better; otherwise, lower values are.
        is_fraction: whether it is 0..1 and compared by difference; others are compared by ratio.
        is_clocked: whether it is measured by the clock ``stall_basis`` and compared only with
            values from the same clock.
    """

    name: str
    title: str
    path: str
    higher_is_better: bool = False
    is_fraction: bool = False
    is_clocked: bool = False

    def shown(self, value: float) -> str:
        """Returns ``value`` as text."""
        if self.is_fraction:
            return f"{value:.1%}"
        return f"{value:.4g}" if value < 1000 else f"{value:.0f}"

    def shown_change(self, change: float) -> str:
        """Returns a change as text."""
        return f"{100 * change:+.1f} points" if self.is_fraction else f"{change:.3g}x"


# by the key in JSON, which includes the unit
FIGURES: Mapping[str, Figure] = {
    figure.path.replace(".", "_"): figure
    for figure in (
        Figure("speed", "images/s", "images_per_s", higher_is_better=True),
        Figure("step", "median step ms", "step_ms.median"),
        Figure("p95", "p95 ms", "step_ms.p95"),
        Figure("stall", "stall", "stall_fraction", False, True, True),
        Figure("goodput", "goodput", "goodput.fraction", True, True, True),
        Figure("top1", "top-1", "top1", True, True),
    )
}


class Run(NamedTuple):
    """The contents of a run's folder.

    Attributes:
        run: the folder, relative to the runs' common parent.
        status: completed, interrupted or failed, from the report; unreadable without a report.
        error: why it did not complete, if known.
        steps: number of steps, as text.
        figures: the ``FIGURES`` in the report, by key.
        verdict: from the report.
        settings: the run's settings by dotted name; ``used.*``, the loader's actual settings;
            ``environment.*``, versions and hardware; ``stall_basis``, the clock of its stalls.
    """

    run: str
    status: str
    error: str | None = None
    steps: str = "-"
    figures: Mapping[str, float] = {}
    verdict: Mapping[str, Any] = {}
    settings: Mapping[str, Any] = {}

    def changes(self, first: Run) -> dict[str, float]:
        """Returns the change in each metric that both runs have; empty unless both completed."""
        found: dict[str, float] = {}
        if not self.status == first.status == "completed":
            return found
        is_same_clock = self.settings["stall_basis"] == first.settings["stall_basis"]
        for key, figure in FIGURES.items():
            value, reference = self.figures.get(key), first.figures.get(key)
            if value is None or reference is None or (figure.is_clocked and not is_same_clock):
                continue
            if figure.is_fraction:
                found[key] = value - reference
            elif reference > 0:
                found[key] = value / reference
        return found


def find(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Returns the runs in ``folders``, in the given order, and a note for each that did not train.

    Runs in one folder are sorted by name.

    Raises:
        FileNotFoundError: a folder is missing or does not contain a run.
    """
    places = []
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder; pass a run or sweep folder")
        inside = [folder]
        if not _is_run(folder):
            inside = sorted(filter(_is_run, folder.iterdir()), key=lambda run: natural(run.name))
        if not inside:
            raise FileNotFoundError(
                f"{folder}: no run found here or below; pass a folder with a "
                "report.json, or its parent"
            )
        places += [Path(os.path.abspath(place)) for place in inside]
    # a run may be specified twice, by itself and by its folder
    places = [*dict.fromkeys(places)]
    runs = []
    passed = []
    base = os.path.commonpath([place.parent for place in places])
    for place in places:
        run = _read(place, os.path.relpath(place, base))
        if run.settings.get("mode") in ("diagnose", "verify", "predict", "export"):
            where = os.path.relpath(place)
            passed.append(f"{where}: skipped; not a training run")
        else:
            runs.append(run)
    if not runs:
        raise FileNotFoundError(f"{passed[0]}; pass a run or sweep folder")
    return runs, passed


def _is_run(folder: Path) -> bool:
    return (folder / "report.json").is_file() or (folder / ".hydra").is_dir()


def _read(folder: Path, name: str) -> Run:
    """Returns the run in ``folder``; an unreadable one has an error."""
    path = folder / ".hydra" / "config.yaml"
    settings = {}
    try:
        if path.exists():
            settings = config.saved(read_inside(folder, ".hydra/config.yaml"))
            # unique to each run
            settings.get("run", {}).pop("name", None)
        path = folder / "report.json"
        report = read_written(path)
        settings |= {name: report.get(name) for name in ("world_size", "stall_basis")}
        settings |= {"used": report.get("loader"), "environment": report.get("environment", {})}
        figures = {}
        for key, figure in FIGURES.items():
            value: Any = report
            for part in figure.path.split("."):
                value = value.get(part, {})
            if number(value) is not None:
                figures[key] = value
        return Run(
            name,
            str(report["status"]),
            report.get("error"),
            text(report, "steps"),
            figures,
            dict(report.get("verdict", {})),
            dict(config.leaves(settings)),
        )
    except FileNotFoundError:
        why = "missing; wait for the run to end, or see its train.log"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        why = f"damaged: {reason}; omit the run"
    error_text = f"{os.path.relpath(path)}: {why}"
    return Run(name, "unreadable", error_text, settings=dict(config.leaves(settings)))


def text(tree: Mapping[str, Any], key: str) -> str:
    """Returns a value as text; ``-`` if there is none."""
    value = tree.get(key, "-")
    return value if isinstance(value, str) else json.dumps(value)


def settings_that_differ(runs: Sequence[Run]) -> dict[str, dict[str, str]]:
    """Returns each setting that differs among ``runs``, by run.

    ``used.*`` is included only if it differs from ``loader.*``. A watched script has no settings.
    """
    readable = [run for run in runs if run.status != "unreadable"]
    own = {run.run for run in readable if "mode" in run.settings}
    keys = dict.fromkeys(key for run in readable for key in run.settings)
    found = {key: {run.run: text(run.settings, key) for run in readable} for key in keys}
    return {
        key: values
        for key, values in found.items()
        if len({said for run, said in values.items() if run in own or said != "-"}) > 1
        and (not key.startswith("used.") or found.get(f"loader.{key[5:]}") != values)
    }
