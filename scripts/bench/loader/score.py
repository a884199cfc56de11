"""Collects the measurements of ``run.py``, by part, row and round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from scripts.bench.tables import Line, Sample

# suffix of a row's control
AGAIN = " again"
BARE = "no loader"
# properties shared by all lines of a table
KEY = ("commit", "workers", "seconds")


@dataclass(slots=True)
class Part:
    """The results of one part and one ``key``, by row and round."""

    key: Line = field(default_factory=dict)
    rows: dict[str, dict[int, Line]] = field(default_factory=lambda: defaultdict(dict))
    missing: dict[str, str] = field(default_factory=dict)
    cores: float = 0.0

    def has(self, *rows: str) -> bool:
        """Returns whether all of these were measured in at least one round."""
        return bool(set.intersection(*(set(self.rows.get(row, ())) for row in rows)))

    def values(self, row: str, figure: Callable[[Line], float]) -> list[float]:
        """Returns a figure in each round."""
        return [figure(line) for line in self.rows[row].values()]

    def middle(self, row: str, figure: Callable[[Line], float]) -> float:
        """Its median."""
        return median(self.values(row, figure))

    def ratio(self, over: str, under: str, figure: Callable[[Line], float]) -> Sample:
        """Returns the ratio of a figure of two rows, paired by round."""
        one = self.rows[over]
        other = self.rows[under]
        return Sample.of(
            [figure(one[number]) / figure(other[number]) for number in one.keys() & other.keys()]
        )

    def added(self, row: str, figure: Callable[[Line], float]) -> Sample:
        """Returns a figure minus that of a process without a loader, paired by round."""
        one = self.rows[row]
        bare = self.rows[BARE]
        return Sample.of(
            [figure(one[number]) - figure(bare[number]) for number in one.keys() & bare.keys()]
        )

    def least(self, rows: Iterable[str], figure: Callable[[Line], float]) -> str | None:
        """Returns the row with the lowest median; None if none was measured."""
        return min(
            (row for row in rows if row in self.rows),
            key=lambda row: self.middle(row, figure),
            default=None,
        )


def collect(lines: Sequence[Line]) -> dict[str, Part]:
    """Returns the parts, each with the lines that share its last line's key.

    A row measured after an earlier failure is not missing.
    """
    parts = {
        line["part"]: Part({name: line[name] for name in KEY})
        for line in lines
        if line["kind"] != "machine"
    }
    cores = 0.0
    for line in lines:
        if line["kind"] == "machine":
            cores = line["machine"]["usable_cores"]
            continue
        part = parts[line["part"]]
        if not part.key.items() <= line.items():
            continue
        part.cores = cores
        if line["kind"] == "missing":
            part.missing[line["row"]] = line["reason"]
        else:
            part.rows[line["row"]][line["round"]] = line
            part.missing.pop(line["row"], None)
    return parts


def cpu_ms(line: Line) -> float:
    """Returns the CPU time of all processes per image."""
    return float(1e3 * line["cpu_s"] / line["images"])


def rate(line: Line) -> float:
    """Returns images/s of wall time."""
    return float(line["images"] / line["wall_s"])
