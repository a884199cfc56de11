"""What tuning tells: the choice, the evidence for it, and how to get it again without tuning."""

from __future__ import annotations

import dataclasses
import json
import logging
from dataclasses import dataclass
from multiprocessing import get_all_start_methods
from pathlib import Path
from typing import Any

from harness.config import LoaderConfig
from harness.feed.arrays import ARRAYS
from harness.feed.forms import FORMS
from harness.feed.interface import PROCESSES, FeedSettings, val_settings
from harness.runtime.files import write_whole
from harness.runtime.folder import LOGGER
from harness.runtime.limits import Limits
from harness.tuning.figures import Rate, Trial
from harness.watch.board import Board, plain
from harness.watch.console import aligned, say

_log = logging.getLogger(LOGGER)


@dataclass(frozen=True, slots=True)
class Side:
    """What one setting gives: a row of the table before and after.

    Attributes:
        images_per_s: delivered to training steps; of the loader alone where a search does not run
            steps.
        wait_fraction: share of the time in which the steps wait for data.
        memory_bytes: the workers' private memory and the batches in flight.
    """

    settings: FeedSettings
    images_per_s: Rate | None
    wait_fraction: float | None
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class TuningReport:
    """What a search measured and chose.

    Attributes:
        search: which one: auto or grid.
        settings: the choice for the training feed.
        val: the choice for the validation feed.
        before: the user's own settings.
        after: the choice.
        demand: images/s that the step can take; None where the search does not look at it.
        ceiling: the speed-up over ``before`` if loading were free.
        sentence: the outcome in words.
        trials: all that was measured or refused, in order.
        limits: what a rank may use.
        notes: what else the user should know, a sentence each.
        seconds: what tuning cost this run.
        complete: False where the budget ended the search.
        reused: whether the answer was remembered from an earlier run.
        others_cores: those that other programs took while it was measured; None where they spoilt
            nothing.
    """

    search: str
    settings: FeedSettings
    val: FeedSettings
    before: Side
    after: Side
    demand: Rate | None
    ceiling: float | None
    sentence: str
    trials: tuple[Trial, ...]
    limits: Limits
    notes: tuple[str, ...]
    seconds: float
    complete: bool
    reused: bool
    others_cores: float | None = None

    @property
    def override(self) -> str:
        """What to type to get this choice without tuning."""
        own = self.settings
        forms = {trial.settings.backend for trial in self.trials}
        words: dict[str, int | str | None] = {
            "backend": own.backend if {own.backend, *forms} != {PROCESSES} else None,
            "num_workers": own.num_workers if own.backend != ARRAYS else None,
            "prefetch_factor": own.prefetch_factor,
            "pin_memory": own.pin_memory,
            "persistent_workers": own.persistent_workers if own.num_workers else None,
        }
        derived = val_settings(LoaderConfig(), self.settings)
        for name in ("batch_size", "num_workers", "prefetch_factor"):
            if (value := getattr(self.val, name)) != getattr(derived, name):
                words[f"val.{name}"] = value
        return " ".join(
            f"loader.{name}={str(value).lower()}"
            for name, value in words.items()
            if value is not None
        )

    @property
    def loader_arguments(self) -> dict[str, Any]:
        """The choice as keyword arguments of torch's ``DataLoader``."""
        own = self.settings
        workers: dict[str, Any] = {
            "prefetch_factor": own.prefetch_factor,
            "persistent_workers": own.persistent_workers,
        }
        counts = {"batch_size": own.batch_size, "num_workers": own.num_workers}
        if (
            own.start_method != get_all_start_methods()[0]
        ):  # the first is what Python does by itself
            workers["multiprocessing_context"] = own.start_method
        return {**counts, **(workers if own.num_workers else {}), "pin_memory": own.pin_memory}

    @property
    def dataloader(self) -> str:
        """The line that gives the same in code: torch's loader, or this project's feed where torch
        has none of that form.
        """
        if (own := self.settings).backend != PROCESSES:
            made = FORMS[own.backend]
            return (
                f"{made.__name__}(dataset, Order(len(dataset), {own.batch_size}), {own!r})  # "
                f"from {made.__module__}"
            )
        return (
            "DataLoader(dataset, shuffle=True, "
            f"{', '.join(f'{k}={v!r}' for k, v in self.loader_arguments.items())})"
        )

    def publish(self, folder: Path | None, board: Board | None) -> None:
        """Print it; write ``tuning.json`` into ``folder`` and TensorBoard's Text page to ``board``,
        unless they are None.
        """
        lines = self.lines()
        for line in lines:
            say(line)
        if folder is not None:
            try:
                self.write(folder)
            except OSError as error:
                _log.warning(
                    "%s: %s; the run goes on without it",
                    folder / "tuning.json",
                    error.strerror or error,
                )
        if board is not None:
            board.text("tuning", lines)

    def lines(self) -> list[str]:
        """The outcome: before and after, the sentence, how to get it again, what was refused."""
        alone = (
            "with torch alone" if self.settings.backend == PROCESSES else "in a loop of your own"
        )
        return [
            self._title(),
            *self._sides(),
            self.sentence,
            f"the same without tuning: {self.override}",
            f"the same {alone}: {self.dataloader}",
            *(
                f"refused {trial.settings}: {trial.refused}"
                for trial in self.trials
                if trial.refused
            ),
            *(f"note: {note}" for note in self.notes),
        ]

    def summary(self) -> dict[str, Any]:
        """What ``report.json`` says of it."""
        before = self.before.images_per_s
        after = self.after.images_per_s
        return {
            "seconds": round(self.seconds, 2),
            "chosen": str(self.settings),
            "reused": self.reused,
            "before_images_per_s": before and before.images_per_s,
            "after_images_per_s": after and after.images_per_s,
            "sentence": self.sentence,
        }

    def write(self, folder: Path) -> None:
        """Write everything as ``tuning.json``, whole or not at all."""
        whole = {**self.to_plain(), "override": self.override, "dataloader": self.dataloader}
        write_whole(
            folder / "tuning.json", (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode()
        )

    def to_plain(self) -> dict[str, Any]:
        """Everything as JSON can hold it, an open end of an interval as None; ``files.typed`` is
        the inverse.
        """
        return dict(plain(dataclasses.asdict(self)))

    def _title(self) -> str:
        if self.reused:
            return f"tuner={self.search}: remembered from an earlier run, {self.seconds:.1f} s"
        spent = "" if self.complete else ", the time was over"
        return (
            f"tuner={self.search}: {len(self.trials)} measurements in {self.seconds:.1f} s{spent}"
        )

    def _sides(self) -> list[str]:
        what = "images/s" if self.demand else "images/s (loader alone)"
        rows = [
            (
                name,
                _shown(side.images_per_s),
                _percent(side.wait_fraction),
                _size(side.memory_bytes),
                str(side.settings),
            )
            for name, side in (("before", self.before), ("after", self.after))
        ]
        return aligned(("", what, "waiting", "memory", "setting"), rows)


_NONE = "-"


def _shown(rate: Rate | None) -> str:
    return _NONE if rate is None else str(rate)


def _percent(fraction: float | None) -> str:
    return _NONE if fraction is None else f"{fraction:.0%}"


def _size(count: int | None) -> str:
    if count is None:
        return _NONE
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
