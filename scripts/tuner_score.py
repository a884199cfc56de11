"""How ``bench_tuner.py`` measures and judges: steady delivery, the oracle, paired ratios.

Knows no loader.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import numpy as np

from harness.feed.base import PROCESSES

# share of the best rate that makes a number of workers sufficient
SUFFICIENT = 0.98
# what later choosing rounds keep
_NEAR = 0.9
_FEWEST = 6
_FASTEST = 4
_RESAMPLES = 10_000

# one JSON line of the results
Line = dict[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """A loader setting as tables name it: ``3x2``, 3 workers with 2 batches in flight.

    ``0``: no workers.

    Of threads the batches are in flight for all of them together.
    """

    num_workers: int
    prefetch_factor: int
    backend: str = PROCESSES

    @classmethod
    def of(cls, num_workers: int, prefetch_factor: int | None, backend: str = PROCESSES) -> Setting:
        """The setting of so many workers; one without workers has no prefetch factor."""
        return cls(num_workers, (prefetch_factor or 2) if num_workers else 0, backend)

    @classmethod
    def parse(cls, text: str) -> Setting:
        """The inverse of ``str``."""
        match = re.fullmatch(r"(?:(\w+) )?(\d+)(?:x(\d+))?", text)
        assert match is not None, text
        return cls.of(int(match[2]), int(match[3] or 0), match[1] or PROCESSES)

    def __str__(self) -> str:
        text = f"{self.num_workers}x{self.prefetch_factor}" if self.num_workers else "0"
        return text if self.backend == PROCESSES else f"{self.backend} {text}"


def steady(
    steps: Iterable[int],
    setting: Setting,
    seconds: float,
    now: Callable[[], float] = time.perf_counter,
) -> tuple[int, float]:
    """Images that the consumer got, and in how many seconds, once the loader runs steadily.

    Args:
        steps: gives the images of each step when the step is done; consumed only as far as needed.
        setting: the loader's. Its workers hand over in turn, so that each is done once in
            ``num_workers`` batches: the window is a whole number of such cycles, or slow batches,
            which come in bursts of that many, would be counted by luck.
        seconds: how long the window is at least. It opens after the first batch, one more of each
            worker, and all that may be in the primed queue; of the latter no more is awaited than
            comes within this time, for a consumer that has taken from the first batch on leaves
            slow workers nothing to put there.
        now: the clock.
    """
    cycle = max(1, setting.num_workers)
    primed = setting.num_workers * setting.prefetch_factor
    images = 0
    begin = 0.0
    first = 0.0
    # steps taken when the window opened
    opened = 0
    for taken, count in enumerate(steps, 1):
        at = now()
        first = at if taken == 1 else first
        if opened:
            images += count
            if (taken - opened) % cycle == 0 and at - begin >= seconds:
                return images, at - begin
        elif taken > cycle and (taken > primed or at - first >= seconds):
            opened = taken
            begin = at
    raise AssertionError("the steps ended; an endless feed is needed")


def choosing(
    candidates: Sequence[Setting], chosen: Iterable[Setting], earlier: Mapping[Setting, list[float]]
) -> list[Setting]:
    """Returns the settings of the next choosing round: at first all, then the likely ones.

    Of what came within a tenth of the best, these are the six with the fewest workers and the four
    fastest; and whatever a strategy chose.
    """
    if not earlier:
        return sorted({*candidates, *chosen})
    rates = {setting: mean(values) for setting, values in earlier.items()}
    near = [s for s, rate in rates.items() if rate >= _NEAR * max(rates.values())]
    kept = {*sorted(near)[:_FEWEST], *sorted(near, key=lambda s: -rates[s])[:_FASTEST], *chosen}
    return sorted(kept)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two mean rates with its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, over: Sequence[float], under: Sequence[float]) -> Ratio:
        """Of rates paired by round; percentile bootstrap over the rounds, seeded (Efron 1979)."""
        one = np.asarray(over)
        other = np.asarray(under)
        drawn = np.random.Generator(np.random.Philox(0)).integers(
            len(one), size=(_RESAMPLES, len(one))
        )
        low, high = np.quantile(
            one[drawn].mean(axis=1) / other[drawn].mean(axis=1), (0.025, 0.975)
        ).tolist()
        return cls(float(one.mean() / other.mean()), low, high)

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(slots=True)
class Found:
    """What the results say of one workload.

    Attributes:
        demand: images/s that the consumer takes.
        choices: each strategy's choices, one a repeat.
        rates: of each phase (choose, score), by setting and round; 0 where the setting was refused.
        twins: second measurements, of the oracle's setting, in the scoring rounds.
    """

    demand: float = 0.0
    choices: dict[str, list[Line]] = field(default_factory=lambda: defaultdict(list))
    rates: dict[str, dict[Setting, dict[int, float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    twins: dict[Setting, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))

    @classmethod
    def collect(cls, lines: Iterable[Line]) -> dict[str, Found]:
        """By workload, in the order of the file."""
        found: dict[str, Found] = defaultdict(cls)
        for line in lines:
            if line["kind"] == "demand":
                found[line["workload"]].demand = line["images_per_s"]
            elif line["kind"] == "choice":
                found[line["workload"]].choices[line["strategy"]].append(line)
            elif line["kind"] == "rate":
                one = found[line["workload"]]
                setting = Setting.parse(line["setting"])
                place = one.twins[setting] if line["twin"] else one.rates[line["phase"]][setting]
                place[line["round"]] = line["images_per_s"]
        return dict(found)

    def chosen(self) -> set[Setting]:
        """What the strategies chose."""
        return {
            Setting.parse(line["setting"])
            for lines in self.choices.values()
            for line in lines
            if line["setting"]
        }

    def earlier(self, before: int) -> dict[Setting, list[float]]:
        """Rates of the settings that were in all choosing rounds before round ``before``."""
        rounds = range(before)
        known = self.rates["choose"].items()
        return {
            s: [rates[r] for r in rounds]
            for s, rates in known
            if before and all(r in rates for r in rounds)
        }

    def oracle(self) -> tuple[Setting, int] | None:
        """Returns the best setting of the choosing rounds and the fewest sufficient workers.

        None before the rounds. Sufficient: within 2 % of the best.
        """
        if not self.rates["choose"]:
            return None
        rounds = 1 + max(r for rates in self.rates["choose"].values() for r in rates)
        means = {setting: mean(values) for setting, values in self.earlier(rounds).items()}
        best = max(sorted(means), key=lambda s: means[s])
        return best, min(
            s.num_workers for s, rate in means.items() if rate >= SUFFICIENT * means[best]
        )

    def ratio(self, strategy: str, to: str | None = None) -> Ratio | None:
        """Returns what ``strategy`` delivered over the oracle's or over that of ``to``.

        None where a measurement lacks.

        The rate of a strategy that was asked several times is the mean over its choices, in each
        round.
        """
        under = []
        if to is not None:
            under = self.settings(to)
        elif oracle := self.oracle():
            under = [oracle[0]]
        return _paired(self._by_round(self.settings(strategy)), self._by_round(under))

    def control(self) -> Ratio | None:
        """The oracle's setting over itself."""
        oracle = self.oracle()
        if oracle is None:
            return None
        return _paired(self.twins.get(oracle[0], {}), self._by_round([oracle[0]]))

    def seconds(self, strategy: str) -> float:
        """What choosing cost, the mean over repeats."""
        return float(mean(line["seconds"] for line in self.choices[strategy]))

    def spare(self, strategy: str) -> int | None:
        """Workers chosen beyond the fewest sufficient, at most over the repeats."""
        settings = self.settings(strategy)
        oracle = self.oracle()
        return max(s.num_workers for s in settings) - oracle[1] if settings and oracle else None

    def settings(self, strategy: str) -> list[Setting]:
        """What ``strategy`` chose, a setting for each time that it was asked and found one."""
        return [
            Setting.parse(line["setting"])
            for line in self.choices.get(strategy, [])
            if line["setting"]
        ]

    def _by_round(self, settings: Sequence[Setting]) -> dict[int, float]:
        """The mean over ``settings`` in every scoring round that has all of them."""
        rates = [self.rates["score"].get(setting, {}) for setting in settings]
        rounds = set.intersection(*map(set, rates)) if rates else set()
        return {r: mean(one[r] for one in rates) for r in rounds}


def _paired(over: Mapping[int, float], under: Mapping[int, float]) -> Ratio | None:
    """Over the rounds that both have; None without any, or where ``under`` was refused."""
    rounds = sorted(over.keys() & under.keys())
    if not rounds or not all(under[r] for r in rounds):
        return None
    return Ratio.of([over[r] for r in rounds], [under[r] for r in rounds])
