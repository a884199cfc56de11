"""The differential runs of a diagnosis, each of which leaves a part of training out.

G is the step without loading, P loading without the step, A both, F reading cold files. The method
is DS-Analyzer's (Mohan, Phanishayee, Raniwala and Chidambaram, VLDB 2021) on the user's own data
set, network and loader. What does not fit into the time is left out, with a note.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from harness.data.datasets import ImageDataset
from harness.diagnose.fetch import Fetch, UnmeasuredError, cold_fetch, files_of
from harness.feed.feeds import Feeds
from harness.feed.interface import Backend, FeedSettings
from harness.runtime.errors import LoaderError
from harness.tuning.measures import Rate, Trial
from harness.tuning.probe import Lab
from harness.watch.console import AddRow
from harness.watch.stages import SAMPLE, StageCost, StageMeter, StageTotals

_ROUNDS = 3
_LOADING_S = 1.5
_DEMAND_S = 1.0
_STEPS_S = 3.0
_FETCH_S = 4.0
# workers and their first files
_START_S = 2.0
_UNREAD = "no whole batch was read before"
_WHAT = {
    "": "loading alone, files as they are",
    "G": "steps on a batch that is at hand",
    "A": "steps on the feed",
    "P": "loading alone, files read before",
    "F": "reading cold files",
}


class FirstReads(Feeds):
    """Feeds whose probes read new samples, or while ``warm`` the last ones again.

    Attributes:
        warm: go round the samples of the last probe that were seen.
        meter: of the feed that was made last.
    """

    warm = False
    meter: StageMeter | None = None

    @property
    def has_seen(self) -> bool:
        """Whether a whole batch has come, which can be read again."""
        return bool(self.cursor.seen)

    def probe(self, settings: FeedSettings, *, again: bool = False) -> Backend:
        """Returns an endless feed."""
        feed = super().probe(settings, again=again or self.warm)
        self.meter = feed.meter
        return feed


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """What the runs gave; None: not measured.

    Attributes:
        demand: G, images/s of the step on a batch that is at hand.
        step_cpu_s: processor seconds of the step per image.
        loading: loading alone, the files as they were.
        stages: what the workers spent in it.
        warm: P, loading alone, the files read before.
        delivered: A, images/s of real steps; without workers on samples that were read before.
        wait_fraction: share of their time in which these waited for data.
        fetch: F, reading cold files.
        copy_per_s: images/s that copies to a CUDA device give, from the memory that the settings
            ask for.
        notes: what was left out, and why, a sentence each.
    """

    demand: Rate
    step_cpu_s: float
    loading: Trial
    stages: StageTotals
    warm: Trial | None = None
    delivered: Rate | None = None
    wait_fraction: float | None = None
    fetch: Fetch | None = None
    copy_per_s: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Session:
    """One diagnosis: the runs in turn, for as long as there is time.

    Every rank makes the same calls.
    """

    lab: Lab
    probes: FirstReads
    dataset: ImageDataset
    add_row: AddRow
    ends: float  # on ``now``
    now: Callable[[], float] = time.perf_counter
    fetch: Callable[..., Fetch] = cold_fetch
    notes: list[str] = field(default_factory=list)
    has_seen: bool = False  # every rank has read a whole batch, which can be read again

    def run(self, settings: FeedSettings) -> Runs:
        """Returns what all runs gave with ``settings``.

        Raises:
            BadSample: a sample cannot be read.
            LoaderError: loading does not work at all.
        """
        loading = self._supply(settings)
        if loading.rate is None:
            raise LoaderError(
                f"loading does not work with {settings}: {loading.refused}; "
                "try other loader settings"
            )
        self._row("", loading.rate)
        self.has_seen = self.lab.ranks.smallest(float(self.probes.has_seen)) > 0
        stages = self.probes.meter.read() if self.probes.meter else None
        if not stages or not stages.samples:
            # no whole batch came: only what single samples took is known
            cost = loading.cost
            assert cost is not None
            sample = StageCost(cost.wall_s, cost.cpu_s)
            stages = StageTotals(1, cost.wall_s, {SAMPLE: sample})
        return Runs(
            loading=loading,
            stages=stages,
            **self.rounds(settings, loading),
            warm=self.warm(settings),
            fetch=self.cold(max(1, settings.num_workers)),
            copy_per_s=self.copies(settings.pin_memory),
            notes=tuple(self.notes),
        )

    def rounds(self, settings: FeedSettings, loading: Trial) -> dict[str, Any]:
        """Returns G and A by the names of ``Runs``, of three rounds if time allows.

        In turn, so that both have the same neighbours; G is measured at least once.
        """
        demands: list[tuple[Rate, float]] = []
        trials: list[Trial] = []
        # P, F and their workers need some of the time
        after_s = 2 * _LOADING_S + _FETCH_S + _START_S
        for _ in range(_ROUNDS):
            began = self.now()
            # by the mean, as real steps are counted: the two are to be compared
            demands.append(self.lab.demand(_DEMAND_S, Rate.of))
            trials.append(self.steps(settings, loading, demands[-1][0]))
            # another round may take as long as this one
            round_s = self.now() - began
            if not trials[-1].rate or self._left_s(round_s) <= after_s:
                break
        demand = _middle([rate for rate, _ in demands])
        self._row("G", demand)
        steps = [(trial.rate, trial.wait_fraction or 0.0) for trial in trials if trial.rate]
        delivered = _middle([rate for rate, _ in steps]) if steps else None
        remark = "" if settings.num_workers else "on images that were read before"
        self._row("A", delivered, remark, trials[-1].refused)
        return {
            "demand": demand,
            "step_cpu_s": median(cpu_s for _, cpu_s in demands),
            "delivered": delivered,
            "wait_fraction": median(waits for _, waits in steps) if steps else None,
        }

    def steps(self, settings: FeedSettings, loading: Trial, demand: Rate) -> Trial:
        """Returns real steps, refused where the first few would take longer than there is time.

        Without workers this process reads itself, and could not give up a file that does not come:
        it reads what came before.
        """
        assert loading.cost is not None
        if not settings.num_workers and not self.has_seen:
            return Trial(settings, "steps", refused=_UNREAD)
        batch_s = settings.batch_size * loading.cost.wall_s
        each_s = settings.batch_size / demand.images_per_s + batch_s / max(1, settings.num_workers)
        # the first batch, some that are not counted, two that are
        need_s = _START_S + batch_s + _STEPS_S + 4 * each_s
        left_s = self._left_s()
        if need_s > left_s:
            late = f"the first batches would take {need_s:.0f} s, {max(0.0, left_s):.0f} were left"
            return Trial(settings, "steps", refused=late)
        return self.lab.attempt(settings, "steps", _STEPS_S)

    def warm(self, settings: FeedSettings) -> Trial | None:
        """Returns P; None: no time is left, or nothing was read before."""
        missing: str | None = "no time was left"
        if not self.has_seen:
            missing = _UNREAD
        elif self._left_s() > 2 * _LOADING_S + _START_S:
            self.probes.warm = True
            trial = self._supply(settings)
            if trial.rate:
                self._row("P", trial.rate, "warm")
                return trial
            missing = trial.refused
        self._row("P", None, "", missing)
        return None

    def cold(self, readers: int) -> Fetch | None:
        """Returns F of the slowest rank; None: a rank could not measure it."""
        limit_s = min(_FETCH_S, self._left_s() - _START_S)
        found: Fetch | str = "no time was left"
        if limit_s > 0:
            try:
                found = self.fetch(files_of(self.dataset.source), readers, limit_s)
            except UnmeasuredError as error:
                found = str(error)
        every: list[Any] = self.lab.ranks.gathered(found)
        for missing in every:
            if isinstance(missing, str):
                self._row("F", None, "", missing)
                return None
        slowest: Fetch = min(every, key=lambda one: one.images_per_s)
        rate = Rate.of([slowest.files], [slowest.seconds])
        self._row("F", rate, f"{readers} files at a time, nothing decoded")
        return slowest

    def copies(self, pinned: bool) -> float | None:
        """Returns images/s of copies to a CUDA device; None: no device, or no pinned memory."""
        batch = self.lab.batch
        try:
            # from pageable and from page-locked memory
            seconds = self.lab.copies_s()
        except RuntimeError as error:
            self.notes.append(f"copies were not measured: {error}")
            return None
        return len(batch.labels) / seconds[pinned] if batch and seconds else None

    def _left_s(self, less_s: float = 0.0) -> float:
        """Returns seconds left to the rank that has the fewest, after ``less_s`` of its own."""
        return self.lab.ranks.smallest(self.ends + self.lab.first_s - self.now() - less_s)

    def _supply(self, settings: FeedSettings) -> Trial:
        """Returns loading alone, of at least one worker: a worker that hangs can be ended."""
        working = replace(settings, num_workers=max(1, settings.num_workers))
        return self.lab.attempt(working, "supply", _LOADING_S)

    def _row(
        self, name: str, rate: Rate | None, remark: str = "", missing: str | None = None
    ) -> None:
        """Adds a row to the table, and a note if a figure is missing."""
        if missing:
            self.notes.append(f"{name} was not measured: {missing}")
        self.add_row((name, _WHAT[name], str(rate or "-"), missing or remark))


def _middle(rates: list[Rate]) -> Rate:
    """Returns the median rate, with the interval of their order; a single one as is."""
    if len(rates) == 1:
        return rates[0]
    return Rate.typical([rate.images_per_s for rate in rates], [1.0] * len(rates))
