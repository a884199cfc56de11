"""Collects what ``run.py`` has measured, by part, row and round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from scripts.bench.tables import Line, Sample

# the name of a row's control ends so
AGAIN = " again"
BARE = "no loader"
# what all lines of a table have in common
KEY = ("commit", "workers", "seconds")


@dataclass(slots=True)
class Part:
    """The results of one part, all of one ``key``: by row and round."""

    key: Line = field(default_factory=dict)
    rows: dict[str, dict[int, Line]] = field(default_factory=lambda: defaultdict(dict))
    missing: dict[str, str] = field(default_factory=dict)
    cores: float = 0.0

    def has(self, *rows: str) -> bool:
        """Whether all of these were measured, in one round at least."""
        return bool(set.intersection(*(set(self.rows.get(row, ())) for row in rows)))

    def values(self, row: str, figure: Callable[[Line], float]) -> list[float]:
        """A figure in each round."""
        return [figure(line) for line in self.rows[row].values()]

    def middle(self, row: str, figure: Callable[[Line], float]) -> float:
        """Its median."""
        return median(self.values(row, figure))

    def ratio(self, over: str, under: str, figure: Callable[[Line], float]) -> Sample:
        """Of a figure of two rows, paired by round."""
        one = self.rows[over]
        other = self.rows[under]
        return Sample.of(
            [figure(one[number]) / figure(other[number]) for number in one.keys() & other.keys()]
        )

    def added(self, row: str, figure: Callable[[Line], float]) -> Sample:
        """Of a figure beyond that of a process without a loader, paired by round."""
        one = self.rows[row]
        bare = self.rows[BARE]
        return Sample.of(
            [figure(one[number]) - figure(bare[number]) for number in one.keys() & bare.keys()]
        )

    def least(self, rows: Iterable[str], figure: Callable[[Line], float]) -> str | None:
        """The row of which the median is the least; None where none was measured."""
        return min(
            (row for row in rows if row in self.rows),
            key=lambda row: self.middle(row, figure),
            default=None,
        )


def collect(lines: Sequence[Line]) -> dict[str, Part]:
    """The parts; of each what has the key of its last line.

    A row measured in spite of an earlier failure is not missing.
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
    """Processor time of all processes for an image."""
    return float(1e3 * line["cpu_s"] / line["images"])


def rate(line: Line) -> float:
    """Images/s by the clock."""
    return float(line["images"] / line["wall_s"])
