"""The differential runs: the step without loading (G), loading without the step (P), both (A), and
cold files (F).

The method is DS-Analyzer's (Mohan, Phanishayee, Raniwala and Chidambaram, VLDB 2021) on the user's
own data set, network and loader. What does not fit into the time is left out, and said.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from harness.data.images import ImageDataset
from harness.diagnose.fetch import Fetch, UnmeasuredError, cold_fetch, files_of
from harness.feed.forms import Feeds
from harness.feed.gauge import Gauge
from harness.feed.interface import Feed, FeedSettings
from harness.runtime import accelerator
from harness.runtime.errors import LoaderError
from harness.tuning import probe
from harness.tuning.figures import Rate, Trial
from harness.tuning.probe import Lab
from harness.tuning.search import Ask, with_workers
from harness.watch.console import LiveTable
from harness.watch.stages import StageMeter, StageTotals

BUDGET_S = 60.0
COLUMNS = ("", "run", "images/s", "seconds", "")
WIDTHS = (1, 34, 12, 7, 0)
DEMAND = "steps on a batch that is at hand"
DELIVERED = "steps on the feed"
LOADING = "loading alone, files as they are"
WARM = "loading alone, files read before"
COLD = "reading cold files"
_UNREAD = "no whole batch was read before"
_ROUNDS = 3
_LOADING_S = 1.5
_DEMAND_S = 1.0
_STEPS_S = 3.0
_WARM_S = 1.5
_FETCH_S = 4.0
_START_S = 2.0  # workers and their first files
_AFTER_S = 2 * _WARM_S + _FETCH_S + _START_S  # is kept for what follows the rounds

Clock = Callable[[], float]


class FirstReads:
    """The probes of ``feeds``, on samples that none has asked for unless told ``again``; while
    ``warm``, all are again.

    Attributes:
        warm: go round the samples of the last probe that were seen.
        has_seen: whether there are such.
        meter: of the feed that was made last.
    """

    def __init__(self, feeds: Feeds) -> None:
        self._feeds = feeds
        self._again = False
        self.warm = False
        self.has_seen = False
        self.meter: StageMeter | None = None
        self.forms = feeds.forms
        self.batch_bytes = feeds.batch_bytes
        self.val_settings = feeds.val_settings
        self.probed = feeds.probed
        self.held_bytes = feeds.held_bytes

    def probe(
        self, settings: FeedSettings, gauge: Gauge | None = None, *, again: bool = False
    ) -> Feed:
        """An endless feed."""
        self._again = again or self.warm
        feed = self._feeds.probe(settings, gauge, again=self._again)
        self.meter = feed.meter
        return feed

    def saw(self, batches: int) -> None:
        """Note that the last probe has given so many batches; those that come again are known."""
        if batches and not self._again:
            self._feeds.saw(batches)
            self.has_seen = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """What the runs gave; None for what was not measured.

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
            ask for; None without one.
        notes: what was left out, and why, a sentence each.
    """

    demand: Rate
    step_cpu_s: float
    loading: Trial
    stages: StageTotals | None = None
    warm: Trial | None = None
    delivered: Rate | None = None
    wait_fraction: float | None = None
    fetch: Fetch | None = None
    copy_per_s: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Round:
    """G and A once."""

    demand: Rate
    step_cpu_s: float
    steps: Trial | None


@dataclass(slots=True)
class Session:
    """One diagnosis: the runs in turn, for as long as there is time.

    Every rank makes the same calls.
    """

    lab: Lab
    probes: FirstReads
    dataset: ImageDataset
    rows: LiveTable
    ends: float  # on ``now``
    now: Clock = time.perf_counter
    fetch: Callable[..., Fetch] = cold_fetch
    notes: list[str] = field(default_factory=list)

    def run(self, own: FeedSettings) -> Runs:
        """All runs with the settings ``own``.

        Raises:
            BadSample: a sample cannot be read.
            LoaderError: loading does not work at all.
        """
        loading, stages = self._loading(own)
        rounds = self._rounds(own, loading)
        steps = [round_.steps for round_ in rounds if round_.steps]
        return Runs(
            loading=loading,
            stages=stages,
            demand=_middle([round_.demand for round_ in rounds]),
            step_cpu_s=median(round_.step_cpu_s for round_ in rounds),
            delivered=_middle([trial.rate for trial in steps if trial.rate]) if steps else None,
            wait_fraction=median(trial.wait_fraction or 0.0 for trial in steps) if steps else None,
            warm=self._warm(own),
            fetch=self._fetch(own),
            copy_per_s=self._copies(own),
            notes=tuple(self.notes),
        )

    def _left_s(self, less_s: float = 0.0) -> float:
        """Seconds that are left to the rank that has the fewest, after ``less_s`` of its own."""
        return self.lab.ranks.smallest(self.ends + self.lab.first_s - self.now() - less_s)

    def _has_seen(self) -> bool:
        """Whether every rank has read a whole batch, which can be read again."""
        return self.lab.ranks.smallest(float(self.probes.has_seen)) > 0

    def _supply(self, own: FeedSettings, limit_s: float) -> Trial:
        """Loading alone; of one worker where there are none, because one that hangs can be ended."""
        return self.lab.attempt(
            Ask(own if own.num_workers else with_workers(own, 1), "supply", limit_s=limit_s)
        )

    def _loading(self, own: FeedSettings) -> tuple[Trial, StageTotals | None]:
        begin = self.now()
        self.rows.status(LOADING)
        trial = self._supply(own, _LOADING_S)
        if trial.rate is None:
            raise LoaderError(
                f"loading does not work with {own}: {trial.refused}; try other loader settings"
            )
        self._row("", LOADING, trial.rate, begin, "")
        totals = self.probes.meter.read() if self.probes.meter else None
        return trial, totals if totals and totals.samples else None

    def _rounds(self, own: FeedSettings, loading: Trial) -> list[_Round]:
        """G and A in turn, so that both have the same neighbours: up to three rounds, at least the
        first G.
        """
        rounds: list[_Round] = []
        begin = self.now()
        took_s = 0.0
        while not rounds or (
            len(rounds) < _ROUNDS and rounds[-1].steps and self._left_s(took_s) > _AFTER_S
        ):
            round_began = self.now()
            self.rows.status(
                f"the step on a batch that is at hand, then on the feed (round {len(rounds) + 1})"
            )
            found = self.lab.demand(
                _DEMAND_S, Rate.of
            )  # as real steps are counted, to be compared with them
            assert found is not None, "the lab has a batch"
            rounds.append(_Round(*found, self._steps(own, loading, found[0])))
            took_s = self.now() - round_began
        rates = [round_.steps.rate for round_ in rounds if round_.steps and round_.steps.rate]
        self._row(
            "G",
            DEMAND,
            _middle([round_.demand for round_ in rounds]),
            begin,
            f"{len(rounds)} rounds, A and G in turn",
        )
        remark = "" if own.num_workers else "on images that were read before"
        self._row(
            "A",
            DELIVERED,
            _middle(rates) if rates else None,
            begin,
            remark if rates else self.notes[-1],
        )
        return rounds

    def _steps(self, own: FeedSettings, loading: Trial, demand: Rate) -> Trial | None:
        """Real steps; None, and a note, where they fail or the first few would take longer than
        there is time.

        Without workers this process reads itself, and could not give up a file that does not come:
        it reads what came before.
        """
        need_s = _steps_need_s(own, loading, demand)
        left_s = self._left_s()
        missing = (
            f"the first batches would take {need_s:.0f} s, {max(0.0, left_s):.0f} s were left"
            if need_s > left_s
            else ""
        )
        if not own.num_workers and not self._has_seen():
            missing = _UNREAD
        if missing:
            self.notes.append(f"A was not measured: {missing}")
            return None
        trial = self.lab.attempt(Ask(own, "steps", limit_s=_STEPS_S))
        if trial.refused:
            self.notes.append(f"A was not measured: {trial.refused}")
            return None
        self.probes.saw(trial.images // own.batch_size)
        return trial

    def _warm(self, own: FeedSettings) -> Trial | None:
        begin = self.now()
        missing = _UNREAD
        if self._has_seen():
            missing = "no time was left"
            if self._left_s() > 2 * _WARM_S + _START_S:
                self.probes.warm = True
                self.rows.status(WARM)
                trial = self._supply(own, _WARM_S)
                missing = trial.refused or ""
                if trial.rate is not None:
                    self._row("P", WARM, trial.rate, begin, "warm")
                    return trial
        self.notes.append(f"P was not measured: {missing}")
        self._row("P", WARM, None, begin, missing)
        return None

    def _fetch(self, own: FeedSettings) -> Fetch | None:
        begin = self.now()
        readers = max(1, own.num_workers)
        limit_s = min(_FETCH_S, self._left_s() - _START_S)
        self.rows.status(COLD)
        found: Fetch | str = "no time was left"
        if limit_s > 0:
            try:
                found = self.fetch(files_of(self.dataset.source), readers, limit_s)
            except UnmeasuredError as error:
                found = str(error)
        every: list[Fetch | str] = self.lab.ranks.gathered(found)
        for other in every:
            if isinstance(other, str):
                self.notes.append(f"F was not measured: {other}")
                self._row("F", COLD, None, begin, other)
                return None
        slowest = min(
            (one for one in every if isinstance(one, Fetch)), key=lambda one: one.images_per_s
        )
        rate = Rate.of([slowest.files], [slowest.seconds])
        remark = f"{slowest.bytes_per_s / 1e6:.0f} MB/s, {readers} at a time, nothing decoded"
        self._row("F", COLD, rate, begin, remark)
        return slowest

    def _copies(self, own: FeedSettings) -> float | None:
        device = self.lab.trainee.device
        batch = self.lab.batch
        if not accelerator.of(device).has_streams or batch is None:
            return None
        try:
            pageable_s, pinned_s = probe.measure_copies(batch.images, device)
        except RuntimeError as error:  # no room for page-locked memory
            self.notes.append(f"copies were not measured: {error}")
            return None
        return len(batch.labels) / (pinned_s if own.pin_memory else pageable_s)

    def _row(self, name: str, what: str, rate: Rate | None, begin: float, remark: str) -> None:
        self.rows.add((name, what, str(rate) if rate else "-", f"{self.now() - begin:.1f}", remark))


def _steps_need_s(own: FeedSettings, loading: Trial, demand: Rate) -> float:
    """Seconds that the shortest run of real steps takes: the first batch, some that are not
    counted, two that are.
    """
    assert loading.cost is not None
    step_s = own.batch_size / demand.images_per_s
    batch_s = own.batch_size * loading.cost.wall_s
    each_s = max(step_s, batch_s / own.num_workers) if own.num_workers else step_s + batch_s
    return _START_S + batch_s + step_s + max(_STEPS_S / 3, each_s) + max(_STEPS_S, 2 * each_s)


def _middle(rates: list[Rate]) -> Rate:
    """The median of several rates with what their order says of its interval; a single one with its
    own.
    """
    return (
        rates[0]
        if len(rates) == 1
        else Rate.typical([rate.images_per_s for rate in rates], [1.0] * len(rates))
    )
