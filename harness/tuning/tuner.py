"""The stage before training that measures loader settings and chooses among them."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from harness.config import TunerConfig
from harness.feed.interface import Feed, FeedSettings
from harness.runtime.errors import LoaderError
from harness.runtime.folder import LOGGER
from harness.runtime.limits import Limits
from harness.tuning import probe
from harness.tuning.search import Candidate, Search, Trial, choose, grid, grid_size
from harness.watch.console import progress, table

_EXPECTED = 10  # candidates for each pin_memory: a search of many cores ends long before its last

_log = logging.getLogger(LOGGER)


class Ranks(Protocol):
    """What tuning needs of the other ranks: one decision for all, on the slowest."""

    @property
    def device(self) -> torch.device:
        """Where batches will go; without an accelerator, pinned memory is not tried."""
        ...

    def smallest(self, value: float) -> float:
        """The smallest ``value`` of all ranks, on every rank."""
        ...

    def agreed(self, value: Any) -> Any:
        """The first rank's ``value``, on every rank."""
        ...


MakeFeed = Callable[[FeedSettings, int], Feed]
"""Makes a fresh feed with the given settings that gives at least so many batches in one pass."""


@dataclass(frozen=True, slots=True)
class TuningReport:
    """What a search tried and chose.

    Attributes:
        before: the user's own settings.
        after: the choice; the same trial where nothing was faster.
        settings: the choice, ready for a feed.
        trials: everything that was tried, in order, ``before`` first.
        seconds: what the search cost.
        complete: False where the budget ended it.
    """

    before: Trial
    after: Trial
    settings: FeedSettings
    trials: tuple[Trial, ...]
    seconds: float
    complete: bool

    def show(self) -> None:
        """Print what was tried and the row before and after."""
        rows = [_row(trial, "chosen" if trial is self.after else "") for trial in self.trials]
        title = f"tuner=grid: {len(rows)} settings in {self.seconds:.1f} s" + ("" if self.complete else ", budget spent")
        table(title, ("num_workers", "pin_memory", "images/s", "seconds", ""), rows)
        gain = self.after.images_per_s / self.before.images_per_s if self.before.images_per_s else float("nan")
        table(
            "loader alone, before and after",
            ("", "setting", "images/s", ""),
            [
                ("before", str(self.before.candidate), f"{self.before.images_per_s:.0f}", ""),
                ("after", str(self.after.candidate), f"{self.after.images_per_s:.0f}", f"{gain:.2f}x"),
            ],
        )

    def summary(self) -> dict[str, Any]:
        """What ``report.json`` says of it."""
        return {
            "seconds": round(self.seconds, 2),
            "chosen": str(self.settings),
            "before_images_per_s": self.before.images_per_s,
            "after_images_per_s": self.after.images_per_s,
            "reused": False,
        }

    def publish(self, folder: Path | None) -> None:
        """Print it, and write everything as ``tuning.json`` into ``folder``, if there is one."""
        self.show()
        if folder is not None:
            text = json.dumps(dataclasses.asdict(self), indent=1) + "\n"
            (folder / "tuning.json").write_text(text, encoding="utf-8")


def tune(make_feed: MakeFeed, settings: FeedSettings, config: TunerConfig, limits: Limits, ranks: Ranks) -> TuningReport:
    """The fastest of the user's own settings and those that the search of ``tuner=`` proposes.

    Every rank tries the same settings at the same time. It draws nothing from the global generators and leaves no worker
    behind. A setting whose workers fail is refused with the reason; a sample that cannot be read ends the search, for it is
    no setting's fault.

    Args:
        make_feed: makes the feed to be measured.
        settings: the user's own settings, tried first.
        config: batches and budget, of which every candidate that is to be expected gets an equal share.
        limits: what this rank may use.
        ranks: the other ranks.

    Raises:
        BadSample: a sample cannot be read.
    """
    begin = time.perf_counter()
    cores = max(1, int(limits.cores))
    pin_choices = (False, True) if ranks.device.type == "cuda" else (False,)
    search, most = grid(cores, pin_choices), grid_size(cores, pin_choices)
    share_s = config.budget_s / (min(most, _EXPECTED * len(pin_choices)) + 1)
    timed = config.batches
    trials: list[Trial] = []

    def attempt(candidate: Candidate) -> Trial:
        for trial in trials:
            if trial.candidate == candidate:
                return trial
        trials.append(_attempt(make_feed, _with(settings, candidate, config), timed, share_s, ranks))
        return trials[-1]

    with progress("tuning the loader", most + 1, "settings") as bar:
        before = attempt(Candidate(settings.num_workers, settings.pin_memory))
        bar.advance(1)
        complete, trial = True, None
        while (candidate := _next(search, trial)) is not None:
            if ranks.agreed(time.perf_counter() - begin + share_s > config.budget_s):
                complete = False
                break
            trial = attempt(candidate)
            bar.advance(1)
    after = choose(trials)
    if after.refused:
        _log.warning("tuning could not measure any setting, the loader stays as it was: %s", after.refused)
    chosen = _with(settings, after.candidate, config, settings.timeout_s)
    return TuningReport(before, after, chosen, tuple(trials), time.perf_counter() - begin, complete)


def _next(search: Search, trial: Trial | None) -> Candidate | None:
    try:
        return next(search) if trial is None else search.send(trial)
    except StopIteration:
        return None


def _attempt(make_feed: MakeFeed, settings: FeedSettings, timed: int, limit_s: float, ranks: Ranks) -> Trial:
    candidate = Candidate(settings.num_workers, settings.pin_memory)
    ranks.agreed(None)  # all start together, so that they share the cores as they will in training
    begin = time.perf_counter()
    refused = None
    supply = probe.Supply(0, 0.0)
    try:
        primed = probe.primed_batches(settings.num_workers, settings.prefetch_factor)
        supply = probe.measure_supply(make_feed(settings, primed + 1 + timed), timed, limit_s)
    except LoaderError as error:
        refused = str(error)
    rate = ranks.smallest(supply.images_per_s)
    if rate == 0 and refused is None:
        refused = "refused on another rank"
    return Trial(candidate, rate, supply.images, time.perf_counter() - begin, refused)


def _with(settings: FeedSettings, candidate: Candidate, config: TunerConfig, timeout_s: float | None = None) -> FeedSettings:
    """``settings`` with the candidate's values; a probe waits no longer than the search may take."""
    workers = candidate.num_workers
    return dataclasses.replace(
        settings,
        num_workers=workers,
        pin_memory=candidate.pin_memory,
        prefetch_factor=(settings.prefetch_factor or 2) if workers else None,
        persistent_workers=workers > 0 and (settings.persistent_workers or not settings.num_workers),
        timeout_s=max(config.budget_s, 5.0) if timeout_s is None else timeout_s,
    )


def _row(trial: Trial, mark: str) -> tuple[str, ...]:
    rate = "refused" if trial.refused else f"{trial.images_per_s:.0f}"
    note = trial.refused or mark
    return (
        str(trial.candidate.num_workers),
        str(trial.candidate.pin_memory).lower(),
        rate,
        f"{trial.seconds:.1f}",
        note,
    )
