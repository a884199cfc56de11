"""What tuning tells: the choice, the evidence for it, and how to get it again without tuning."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from multiprocessing import get_all_start_methods
from typing import Any

from harness.config import LoaderConfig
from harness.feed.interface import ARRAYS, PROCESSES, FeedSettings, val_settings
from harness.runtime.limits import Limits
from harness.tuning.capacity import shown
from harness.tuning.measures import Rate, Trial
from harness.watch.board import Board, plain, publish
from harness.watch.console import aligned


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
        names = ["backend", "num_workers", "prefetch_factor", "pin_memory", "persistent_workers"]
        if own.backend == ARRAYS:
            names.remove("num_workers")
        if not own.num_workers:
            names.remove("prefetch_factor")
            names.remove("persistent_workers")
        words = {name: getattr(own, name) for name in names}
        # the validation feed's follow from these, unless they had to be less
        derived = val_settings(LoaderConfig(), own)
        for name in ("batch_size", "num_workers", "prefetch_factor"):
            value = getattr(self.val, name)
            if value not in (None, getattr(derived, name)):
                words[f"val.{name}"] = value
        return " ".join(f"loader.{name}={str(value).lower()}" for name, value in words.items())

    @property
    def loader_arguments(self) -> dict[str, Any]:
        """The choice as keyword arguments of torch's ``DataLoader``."""
        own = self.settings
        found: dict[str, Any] = {"batch_size": own.batch_size, "num_workers": own.num_workers}
        if own.num_workers:
            found["prefetch_factor"] = own.prefetch_factor
            found["persistent_workers"] = own.persistent_workers
            # the first is what Python does by itself
            if own.start_method != get_all_start_methods()[0]:
                found["multiprocessing_context"] = own.start_method
        return {**found, "pin_memory": own.pin_memory}

    @property
    def dataloader(self) -> str:
        """The line that gives the same in code; empty: torch's loader has no such backend."""
        if self.settings.backend != PROCESSES:
            return ""
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.loader_arguments.items())
        return f"DataLoader(dataset, shuffle=True, {arguments})"

    def publish(self, board: Board | None) -> None:
        """Prints the outcome; writes ``tuning.json`` and TensorBoard's Text page by ``board``."""
        whole = {**self.to_plain(), "override": self.override, "dataloader": self.dataloader}
        publish("tuning", self.lines(), whole, board)

    def lines(self) -> list[str]:
        """Returns the outcome: before and after, why, how to get it again, what was refused."""
        count = f"{len(self.trials)} measurement" + "s" * (len(self.trials) != 1)
        title = f"tuner={self.search}: {count} in {self.seconds:.1f} s"
        if self.reused:
            title = f"tuner={self.search}: remembered from an earlier run, {self.seconds:.1f} s"
        elif not self.complete:
            title += ", the time was over"
        rows = []
        for name, side in (("before", self.before), ("after", self.after)):
            waiting = "-" if side.wait_fraction is None else f"{side.wait_fraction:.0%}"
            memory = "-" if side.memory_bytes is None else shown(side.memory_bytes)
            rows.append((name, str(side.images_per_s or "-"), waiting, memory, str(side.settings)))
        what = "images/s" if self.demand else "images/s (loader alone)"
        refused = [trial for trial in self.trials if trial.refused]
        return [
            title,
            *aligned(("", what, "waiting", "memory", "setting"), rows),
            self.sentence,
            f"the same without tuning: {self.override}",
            *(f"the same in code: {line}" for line in [self.dataloader] if line),
            *(f"refused {trial.settings}: {trial.refused}" for trial in refused),
            *(f"note: {note}" for note in self.notes),
        ]

    def summary(self) -> dict[str, Any]:
        """Returns what ``report.json`` says of tuning."""
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

    def to_plain(self) -> dict[str, Any]:
        """Returns everything as JSON can hold it; ``files.typed`` is the inverse.

        An open end of an interval is None.
        """
        return dict(plain(dataclasses.asdict(self)))
