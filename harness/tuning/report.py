"""What a search found, as people, ``tuning.json`` and other runs get it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from multiprocessing import get_all_start_methods
from typing import Any

from harness.feed.interface import ARRAYS, PROCESSES, FeedSettings
from harness.runtime.limits import Limits
from harness.tuning.measures import FED, Rate, Trial
from harness.watch.board import Board, plain, publish
from harness.watch.console import aligned


@dataclass(frozen=True, slots=True)
class Side:
    """What one setting gives: a row of the table before and after.

    Attributes:
        images_per_s: delivered to training steps, measured or predicted; of the loader alone where
            a search does not run steps; None where neither could be had.
        wait_fraction: share of the time in which the steps wait for data.
        memory_bytes: the workers' private memory and the batches in flight.
    """

    settings: FeedSettings
    images_per_s: Rate | None = None
    wait_fraction: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningReport:
    """What a search measured and chose.

    Attributes:
        search: which one: auto or grid.
        before: the user's own settings.
        after: the choice.
        val: the choice for the validation feed.
        demand: images/s that the step takes, as far as the search has learned; None where it did
            not look.
        reason: why this choice, in sentences without the last period.
        complete: False where the budget ended the search.
        trials: all that was measured or refused, in order.
        limits: what a rank may use.
        notes: what else the user should know, a sentence each.
        worker_bytes: private memory of one worker.
        seconds: what tuning cost this run.
        reused: whether the answer was remembered from an earlier run.
        others_cores: those that other programs took while it was measured; None where they spoilt
            nothing.
    """

    search: str
    before: Side
    after: Side
    val: FeedSettings
    demand: Rate | None = None
    reason: str = ""
    complete: bool = True
    trials: tuple[Trial, ...]
    limits: Limits
    notes: tuple[str, ...] = ()
    worker_bytes: int = 0
    seconds: float = 0.0
    reused: bool = False
    others_cores: float | None = None

    @property
    def settings(self) -> FeedSettings:
        """The choice for the training feed."""
        return self.after.settings

    @property
    def ceiling(self) -> float | None:
        """The speed-up over ``before`` if loading were free; None where that is not known."""
        before = self.before.images_per_s
        if not (self.demand and before):
            return None
        return max(1.0, self.demand.images_per_s / before.images_per_s)

    @property
    def sentence(self) -> str:
        """What the step takes, what settings deliver, and why one was chosen."""
        before = self.before
        after = self.after
        if not (self.ceiling and after.images_per_s):
            return f"Chosen: {after.settings}. {self.reason}."
        rates = (
            f"The model takes {self.demand} images/s. {before.settings} delivers "
            f"{before.images_per_s}"
        )
        if after.settings != before.settings:
            return f"{rates}, {after.settings} {after.images_per_s}. {self.reason}."
        if FED * self.ceiling <= 1:
            return f"Nothing to gain (ceiling {self.ceiling:.1f}x). {rates}. {self.reason}."
        return f"{rates}, and stays. {self.reason}."

    @property
    def override(self) -> str:
        """What to type to get this choice without tuning."""
        train = self.settings
        val = self.val
        words: dict[str, Any] = {"backend": train.backend, "pin_memory": train.pin_memory}
        if train.backend != ARRAYS:
            words["num_workers"] = train.num_workers
        if train.num_workers:
            words["prefetch_factor"] = train.prefetch_factor
            words["persistent_workers"] = train.persistent_workers
        # the validation feed's follow from these, unless they had to be less
        derived = {"batch_size": train.batch_size, "num_workers": train.num_workers}
        for name, value in {**derived, "prefetch_factor": 2}.items():
            if getattr(val, name) not in (None, value):
                words[f"val.{name}"] = getattr(val, name)
        return " ".join(f"loader.{name}={str(value).lower()}" for name, value in words.items())

    @property
    def loader_arguments(self) -> dict[str, Any]:
        """The choice as keyword arguments of torch's ``DataLoader``."""
        own = self.settings
        names = ["batch_size", "num_workers", "pin_memory"]
        if own.num_workers:
            names += ["prefetch_factor", "persistent_workers"]
        found = {name: getattr(own, name) for name in names}
        # the first is what Python does by itself
        if own.num_workers and own.start_method != get_all_start_methods()[0]:
            found["multiprocessing_context"] = own.start_method
        return found

    @property
    def dataloader(self) -> str:
        """The line that gives the same in code; empty: torch's loader has no such backend."""
        if self.settings.backend != PROCESSES:
            return ""
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.loader_arguments.items())
        return f"DataLoader(dataset, shuffle=True, {arguments})"

    def publish(self, board: Board | None) -> None:
        """Prints the outcome; writes ``tuning.json`` and TensorBoard's Text page by ``board``."""
        names = ("settings", "ceiling", "sentence", "override", "dataloader")
        more = {name: getattr(self, name) for name in names}
        publish("tuning", self.lines(), {**self.to_plain(), **more}, board)

    def lines(self) -> list[str]:
        """Returns the outcome: before and after, why, how to get it again, what was refused."""
        count = f"{len(self.trials)} measurement" + "s" * (len(self.trials) != 1)
        title = f"tuner={self.search}: {count} in {self.seconds:.1f} s"
        if self.reused:
            title = f"tuner={self.search}: remembered from an earlier run, {self.seconds:.1f} s"
        elif not self.complete:
            title += ", the time was over"
        rows = [
            (
                name,
                str(side.images_per_s or "-"),
                "-" if side.wait_fraction is None else f"{side.wait_fraction:.0%}",
                "-" if side.memory_bytes is None else shown(side.memory_bytes),
                str(side.settings),
            )
            for name, side in (("before", self.before), ("after", self.after))
        ]
        what = "images/s" if self.demand else "images/s (loader alone)"
        code = [f"the same in code: {self.dataloader}"] if self.dataloader else []
        return [
            title,
            *aligned(("", what, "waiting", "memory", "setting"), rows),
            self.sentence,
            f"the same without tuning: {self.override}",
            *code,
            *(
                f"refused {trial.settings}: {trial.refused}"
                for trial in self.trials
                if trial.refused
            ),
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


def shown(count: float) -> str:
    """Returns ``count`` bytes in MB, from a thousand of them on in GB."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.1f} MB"
