"""The stage before training that measures loader settings and chooses among them."""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass

from harness.config import TunerConfig, TunerName
from harness.feed.arrays import in_form
from harness.feed.interface import FeedSettings
from harness.runtime import accelerator
from harness.runtime.folder import LOGGER
from harness.runtime.limits import Limits
from harness.tuning import capacity
from harness.tuning.figures import Probes, Ranks, Rate, Trainee, Trial
from harness.tuning.lab import Lab
from harness.tuning.look import FED, Look
from harness.tuning.report import Side, TuningReport
from harness.tuning.search import Ask, Choice, Problem, Search, grid, with_workers
from harness.watch.console import LiveTable, live_table
from harness.watch.neighbours import Neighbours

# what a look may take: the longer of the two, of which demand makes four steps
_LOOK_S = 5.0
_LOOK_STEPS = 7
_SHARE = 0.1  # of what is left of the run: a look never takes more
_DEMAND_S = 0.5
_FIRST_S = 0.5
_COLUMNS = (
    "backend",
    "num_workers",
    "prefetch",
    "pinned",
    "measured",
    "images/s",
    "waiting",
    "seconds",
    "",
)

_log = logging.getLogger(LOGGER)


def tune(
    probes: Probes,
    trainee: Trainee,
    own: FeedSettings,
    config: TunerConfig,
    limits: Limits,
    ranks: Ranks,
    images_left: float = math.inf,
) -> TuningReport:
    """The setting that delivers most training images/s, of those that do the one with the fewest
    workers.

    Every rank tries the same settings at the same time, and one decision holds for all. No trace
    stays: what steps change is put back, random states are as before, no worker, file or shared
    memory is left. A setting that does not fit is refused before it runs, one that crashes or hangs
    is refused with its symptom.

    Args:
        probes: makes the feeds to be measured.
        trainee: the training step.
        own: the user's own settings: always a candidate, and what the choice may not be slower
            than.
        config: which search, its budget, the most workers.
        limits: what this rank may use.
        ranks: the other ranks.
        images_left: that this rank is still to be trained on.

    Raises:
        BadSample: a sample cannot be read.
    """
    device = accelerator.of(trainee.device)
    begin = device.now()
    own = ranks.agreed(own)
    limits = _least(limits, ranks)
    lab = Lab(probes, trainee, limits, ranks)
    alone = len(ranks.gathered(None)) == 1  # else the other ranks would count as others
    most = "" if config.budget_s is None else f", at most {config.budget_s:g} s"
    title = f"tuning the loader (tuner={config.name.name}{most})"
    with trainee.kept(), live_table(title, _COLUMNS) as rows:
        session = _Session(lab, config, rows, Neighbours(limits.cores if alone else None))
        if config.name is TunerName.grid:
            pins = (False, True) if device.has_streams else (False,)
            choice = session.follow(
                grid(own, max(1, int(limits.cores)), pins, config.budget_s or math.inf)
            )
        else:
            choice = session.automatic(own, begin, images_left)
        session.warn()
    device.release()
    return session.report(own, choice, device.now() - begin)


def most_workers(config: TunerConfig, limits: Limits) -> int:
    """The most workers that a search tries, but for the user's own number."""
    return config.max_workers or max(8, 4 * int(limits.cores))


@dataclass(slots=True)
class _Session:
    """One tuning: what was tried, and the table that shows it."""

    lab: Lab
    config: TunerConfig
    rows: LiveTable
    neighbours: Neighbours
    trials: list[Trial] = dataclasses.field(default_factory=list)
    demand: Rate | None = None
    others: float | None = (
        None  # cores that other programs took, the most at a time that spoilt something
    )

    def follow(self, search: Search) -> Choice:
        """Run a search to its choice."""
        trial: Trial | None = None
        while True:
            try:
                ask = next(search) if trial is None else search.send(trial)
            except StopIteration as end:
                choice: Choice = end.value
                return choice
            trial = self.attempt(ask)

    def attempt(self, ask: Ask) -> Trial:
        """Measure, and show the row."""
        self.rows.status(f"measuring {ask.settings} ({ask.kind})")
        trial = self.lab.attempt(ask)
        self.trials.append(trial)
        self.rows.add(_row(trial))
        return trial

    def automatic(self, own: FeedSettings, begin: float, images_left: float) -> Choice:
        """Calibrate, measure demand, and let ``Look`` go on."""
        if not self._calibrate(own) or (found := self.lab.demand(_DEMAND_S)) is None:
            return self._unmeasured(own)
        self.demand, step_cpu_s = found
        self.others = self.neighbours.look()
        self.rows.add(
            (
                "",
                "",
                "",
                "",
                "demand",
                str(self.demand),
                "",
                "",
                "steps on one batch that is at hand",
            )
        )
        lab = self.lab
        problem = Problem(
            own=own,
            calibration=tuple(self.trials),
            forms=lab.probes.forms,
            demand=self.demand,
            step_cpu_s=step_cpu_s,
            cores=lab.limits.cores,
            most=most_workers(self.config, lab.limits),
            pin_memory=lab.pays_to_pin(own),
            alone_s=lab.launch_s if lab.trainee.overlaps else 1 / self.demand.images_per_s,
            fits=lambda settings: lab.ranks.agreed(lab.refusal(settings)),
            budget_s=lab.ranks.agreed(
                self._allowed_s(own, images_left) + lab.first_s - (lab.now() - begin)
            ),
        )
        return self.follow(Look(problem).run())

    def _allowed_s(self, own: FeedSettings, images_left: float) -> float:
        """Seconds that a look may take, from its beginning; the first step's own come on top, for
        training pays them anyway.
        """
        assert self.demand is not None and self.trials[-1].rate is not None, "both were measured"
        if self.config.budget_s is not None:
            return self.config.budget_s
        step_s = own.batch_size / self.demand.images_per_s
        rest_s = images_left / min(self.demand.images_per_s, self.trials[-1].rate.images_per_s)
        return min(max(_LOOK_S, _LOOK_STEPS * step_s), _SHARE * rest_s)

    def warn(self) -> None:
        """Tell what other programs took, and how fast the step is by now where they did."""
        self.others = max(filter(None, (self.others, self.neighbours.look())), default=None)
        if self.others is None:
            return
        again = self.lab.demand(_DEMAND_S) if self.demand else None
        steps = (
            f"; the step took {self.demand} images/s at first and {again[0]} at last"
            if again
            else ""
        )
        _log.warning(
            "%s%s; tune again when they have ended", self.neighbours.told(self.others), steps
        )

    def _unmeasured(self, own: FeedSettings) -> Choice:
        """The user's setting, or no workers where not even one fits into memory."""
        symptom = self.trials[-1].refused
        if any(
            trial.refused and trial.seconds for trial in self.trials
        ):  # it did run, and died or hung
            _log.warning(
                "tuning could not measure any setting, the loader stays as it was: %s", symptom
            )
            return Choice(own, None, None, reason="No setting could be measured", complete=False)
        _log.warning("not even one worker fits, the trainer itself will load: %s", symptom)
        return Choice(with_workers(own, 0), None, None, reason="Not even one worker fits")

    def _calibrate(self, own: FeedSettings) -> bool:
        """Probe the supply of the user's setting, or of one worker where there are none or they
        fail; whether one succeeded.

        Other forms are tried where it does not fit; not where it ran and failed, for threads that
        hang cannot be ended.
        """
        modest = with_workers(own, 1, 1)
        first = own if own.num_workers else with_workers(own, 1)
        for settings in dict.fromkeys(
            (first, modest, *(in_form(modest, form) for form in self.lab.probes.forms))
        ):
            if settings.backend != own.backend and any(trial.seconds for trial in self.trials):
                break
            if self.attempt(Ask(settings, "supply", limit_s=_FIRST_S)).rate is not None:
                return True
        return False

    def report(self, own: FeedSettings, choice: Choice, seconds: float) -> TuningReport:
        """Everything that the session found."""
        lab = self.lab
        ceiling = None
        demand = self.demand
        if demand is not None and choice.demand is not None and choice.before is not None:
            more = (
                choice.demand / demand.images_per_s
            )  # where a loader has delivered more than that
            demand = Rate(
                *(value * more for value in (demand.images_per_s, demand.low, demand.high))
            )
            ceiling = max(1.0, choice.demand / choice.before.images_per_s)
        val = lab.probes.val_settings(choice.settings)
        sizes = lab.batch_bytes(choice.settings), lab.batch_bytes(val)
        fitting = lab.ranks.agreed(
            capacity.beside(choice.settings, val, *sizes, lab.worker_bytes, lab.limits)
        )
        return TuningReport(
            search=self.config.name.name,
            settings=choice.settings,
            val=fitting,
            before=Side(own, choice.before, choice.waits[0], lab.memory_bytes(own)),
            after=Side(
                choice.settings, choice.after, choice.waits[1], lab.memory_bytes(choice.settings)
            ),
            demand=demand,
            ceiling=ceiling,
            sentence=_sentence(own, choice, demand, ceiling),
            trials=tuple(self.trials),
            limits=lab.limits,
            notes=self._notes(val, fitting),
            seconds=seconds,
            complete=choice.complete,
            reused=False,
            others_cores=self.others,
        )

    def _notes(self, val: FeedSettings, fitting: FeedSettings) -> tuple[str, ...]:
        read = self.lab.probes.probed()
        notes = [
            f"probes asked for {read:.1%} of the training set, workers for no image twice (cold, "
            "unless it was cached before)"
            if read <= 1
            else f"probes asked for the training set {read:.1f} times: what fits in the page cache "
            "was warm"
        ]
        if (ranks := len(self.lab.ranks.gathered(None))) > 1:
            notes.append(
                f"images/s are those of one rank, the slowest of {ranks} ranks that were measured "
                "together"
            )
        if fitting != val:
            notes.append(
                f"the validation feed gets {fitting} instead of {val}, to fit beside the training "
                "feed"
            )
        return tuple(notes)


def _least(limits: Limits, ranks: Ranks) -> Limits:
    """What every rank may use: all of them must come to the same settings."""
    shm = ranks.smallest(math.inf if limits.shm_bytes is None else float(limits.shm_bytes))
    return dataclasses.replace(
        limits,
        cores=ranks.smallest(limits.cores),
        memory_bytes=int(ranks.smallest(float(limits.memory_bytes))),
        shm_bytes=None if shm == math.inf else int(shm),
        open_files=int(ranks.smallest(float(limits.open_files))),
    )


def _sentence(own: FeedSettings, choice: Choice, demand: Rate | None, ceiling: float | None) -> str:
    """What the step takes, what the settings deliver, and why this one was chosen."""
    before = choice.before
    after = choice.after
    if (
        demand is None
        or choice.demand is None
        or before is None
        or after is None
        or ceiling is None
    ):
        return f"Chosen: {choice.settings}. {choice.reason}."
    takes, gets, got = (
        f"{rate if rate.is_uneven else round(rate.images_per_s)}"
        for rate in (demand, before, after)
    )
    rates = f"The model takes {takes} images/s. {own} delivers {gets}"
    if choice.settings != own:
        return f"{rates}, {choice.settings} {got}. {choice.reason}."
    if before.images_per_s >= FED * choice.demand:
        return f"Nothing to gain (ceiling {ceiling:.1f}x). {rates}. {choice.reason}."
    return f"{rates}, and stays. {choice.reason}."


def _row(trial: Trial) -> tuple[str, ...]:
    settings = trial.settings
    return (
        settings.backend,
        str(settings.num_workers),
        str(settings.prefetch_factor or ""),
        "yes" if settings.pin_memory else "no",
        {"supply": "loader alone", "steps": "real steps"}[trial.kind],
        str(trial.rate) if trial.rate else "refused",
        "" if trial.wait_fraction is None else f"{trial.wait_fraction:.0%}",
        f"{trial.seconds:.1f}",
        trial.refused or "",
    )
