"""The stage before training that measures loader settings, chooses among them, and tells why."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_all_start_methods
from typing import Any

from harness.config import TunerConfig, TunerName
from harness.feed.interface import (
    ARRAYS,
    PROCESSES,
    FeedSettings,
)
from harness.feed.threads import MOST_THREADS
from harness.feed.timed import TimedSteps
from harness.runtime import accelerator
from harness.runtime.distributed import World
from harness.runtime.folder import log
from harness.runtime.limits import Limits
from harness.tuning.measures import Probes, Trial
from harness.tuning.probe import Lab, shown
from harness.tuning.search import Ask, AutoSearch, Choice, Search, Side, follow, grid
from harness.watch.board import Board, plain, publish
from harness.watch.console import AddRow, aligned, live_table
from harness.watch.neighbours import Neighbours


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningReport(Choice):
    """What a search measured and chose.

    Attributes:
        search: which one: auto or grid.
        val: the choice for the validation feed.
        trials: all that was measured or refused, in order.
        limits: what a rank may use.
        notes: what else the user should know, a sentence each.
        seconds: what tuning cost this run.
        reused: whether the answer was remembered from an earlier run.
        others_cores: those that other programs took while it was measured; None where they spoilt
            nothing.
        worker_bytes: private memory of one worker.
    """

    search: str
    val: FeedSettings
    trials: tuple[Trial, ...]
    limits: Limits
    notes: tuple[str, ...]
    seconds: float
    reused: bool = False
    others_cores: float | None = None
    worker_bytes: int = 0

    @property
    def override(self) -> str:
        """What to type to get this choice without tuning."""
        return override(self.settings, self.val)

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


def override(train: FeedSettings, val: FeedSettings) -> str:
    """Returns what to type to get these settings of both feeds."""
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


def tune(
    probes: Probes,
    trainee: TimedSteps,
    own: FeedSettings,
    config: TunerConfig,
    limits: Limits,
    ranks: World,
    images_left: float = math.inf,
) -> TuningReport:
    """Chooses the setting with the fewest workers of those that deliver most training images/s.

    All ranks try the same settings at once, and one decision holds for all. No trace stays: what
    steps change is put back, random states are as before. A setting that does not fit is refused
    before it runs, one that crashes or hangs is refused with its symptom.

    Args:
        probes: makes the feeds to be measured.
        trainee: the training step.
        own: the user's settings, which the choice may not be slower than.
        config: which search, its budget, the most workers.
        limits: what this rank may use.
        ranks: this rank among the others.
        images_left: that this rank is still to be trained on.

    Raises:
        BadSample: a sample cannot be read.
    """
    device = accelerator.of(trainee.device)
    begin = device.now()
    own = ranks.agreed(own)
    # all ranks must come to the same numbers
    limits = replace(limits, cores=ranks.smallest(limits.cores))
    lab = Lab(probes, trainee, limits, ranks)
    title = f"tuning the loader (tuner={config.name.name})"
    columns = ("measured    ", "images/s  ", "waiting", "seconds", "setting")
    trials: list[Trial] = []
    with trainee.kept():
        add_row = live_table(title, columns)

        def attempt(ask: Ask) -> Trial:
            trials.append(lab.attempt(ask))
            add_row(trials[-1].row)
            return trials[-1]

        # other ranks would count as other programs
        neighbours = Neighbours(limits.cores if ranks.size == 1 else None)
        search = automatic(lab, own, config, add_row, begin, images_left)
        if config.name is TunerName.grid:
            pins = (False, True)[: 1 + device.has_streams]
            search = grid(own, max(1, int(limits.cores)), pins, config.budget_s or math.inf)
        choice = follow(search, attempt)
        others = neighbours.look()
        if others is not None:
            log.warning("%s; tune again when they have ended", neighbours.told(others))
    device.release()
    seconds = device.now() - begin
    return _report(lab, choice, config.name.name, trials, seconds, others)


def most_workers(config: TunerConfig, limits: Limits) -> int:
    """Returns the most workers that a search tries, but for the user's number."""
    return config.max_workers or min(MOST_THREADS, max(8, 4 * int(limits.cores)))


def automatic(
    lab: Lab,
    own: FeedSettings,
    config: TunerConfig,
    add_row: AddRow,
    begin: float,
    images_left: float,
) -> Search:
    """Measures what the user's setting supplies, then the step, and lets ``AutoSearch`` go on."""
    trials: list[Trial] = []
    # one worker where the user has none, and a modest one of any backend where that fails
    modest = replace(own, num_workers=1, prefetch_factor=1)
    first = replace(own, num_workers=own.num_workers or 1)
    backends = lab.probes.backends
    for settings in dict.fromkeys(
        (first, modest, *(replace(modest, backend=backend) for backend in backends))
    ):
        # a setting that ran has died or hung, and threads that hang cannot be ended
        if settings.backend != own.backend and any(trial.seconds for trial in trials):
            break
        trials.append((yield Ask(settings, "supply", limit_s=0.5)))
        if trials[-1].rate:
            break
    if symptom := trials[-1].refused:
        log.warning("the loader could not be tuned: %s", symptom)
        # what did not even run does not fit
        chosen = own if any(trial.seconds for trial in trials) else replace(own, num_workers=0)
        return Choice(Side(own), Side(chosen), reason="No setting could be measured")

    demand, step_cpu_s = lab.demand(0.5)
    add_row(("demand", str(demand), "", "", "steps on one batch that is at hand"))
    takes = demand.images_per_s
    budget_s = config.budget_s
    if budget_s is None:
        # five seconds or seven steps, of which demand makes four; at most a tenth of the rest
        rest_s = images_left / min(takes, trials[-1].images_per_s)
        budget_s = min(max(5.0, 7 * own.batch_size / takes), 0.1 * rest_s)
    # what the first step takes longer comes on top, for training pays that anyway
    budget_s += lab.first_s - (lab.now() - begin)
    look = AutoSearch(
        own=own,
        trials=trials,
        backends=backends,
        demand=demand,
        modelled=partial(lab.model, takes, step_cpu_s),
        most=most_workers(config, lab.limits),
        pin_memory=lab.pays_to_pin(own),
        fits=lab.unfit,
        left_s=lab.ranks.agreed(budget_s),
    )
    return (yield from look.run())


def _report(
    lab: Lab,
    choice: Choice,
    search: str,
    trials: list[Trial],
    seconds: float,
    others_cores: float | None,
) -> TuningReport:
    """Returns everything that was found, with the validation feed's settings."""
    val: FeedSettings = lab.ranks.agreed(lab.val_beside(choice.settings))
    notes: tuple[str, ...] = ()
    if lab.ranks.size > 1:
        notes = (f"images/s are those of the slowest of {lab.ranks.size} ranks",)
    before, after = (
        replace(side, memory_bytes=lab.needs(side.settings).memory)
        for side in (choice.before, choice.after)
    )
    return TuningReport(
        before=before,
        after=after,
        demand=choice.demand,
        reason=choice.reason,
        complete=choice.complete,
        search=search,
        val=val,
        trials=tuple(trials),
        limits=lab.limits,
        notes=notes,
        seconds=seconds,
        others_cores=others_cores,
        worker_bytes=lab.worker_bytes,
    )
