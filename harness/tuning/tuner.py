"""The stage before training that measures loader settings and chooses among them."""

from __future__ import annotations

import math
from dataclasses import replace

from harness.config import TunerConfig, TunerName
from harness.feed.interface import FeedSettings, with_backend, with_workers
from harness.feed.threads import MOST_THREADS
from harness.feed.timed import TimedSteps
from harness.runtime import accelerator
from harness.runtime.distributed import World
from harness.runtime.folder import log
from harness.runtime.limits import Limits
from harness.tuning.answer import Side, TuningReport
from harness.tuning.look import FED, Look
from harness.tuning.measures import Probes, Trial
from harness.tuning.probe import Lab
from harness.tuning.search import Ask, Choice, Search, follow, grid
from harness.watch.console import AddRow, live_table
from harness.watch.neighbours import Neighbours


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
    return _report(lab, own, choice, config.name.name, trials, seconds, others)


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
    """Measures what the user's setting supplies, then the step, and lets ``Look`` go on."""
    trials: list[Trial] = []
    # one worker where the user has none, and a modest one of any backend where that fails
    modest = with_workers(own, 1, 1)
    first = with_workers(own, own.num_workers or 1)
    backends = lab.probes.backends
    for settings in dict.fromkeys(
        (first, modest, *(with_backend(modest, backend) for backend in backends))
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
        chosen = own if any(trial.seconds for trial in trials) else with_workers(own, 0)
        return Choice(chosen, None, None, reason="No setting could be measured")

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
    look = Look(
        own=own,
        calibration=tuple(trials),
        backends=backends,
        demand=demand,
        step_cpu_s=step_cpu_s,
        cores=lab.limits.cores,
        most=most_workers(config, lab.limits),
        pin_memory=lab.pays_to_pin(own),
        alone_s=lab.launch_s if lab.trainee.overlaps else 1 / takes,
        fits=lab.unfit,
        budget_s=lab.ranks.agreed(budget_s),
    )
    return (yield from look.run())


def _report(
    lab: Lab,
    own: FeedSettings,
    choice: Choice,
    search: str,
    trials: list[Trial],
    seconds: float,
    others_cores: float | None,
) -> TuningReport:
    """Returns everything that was found, with the validation feed's settings."""
    chosen = choice.settings
    wanted = lab.probes.val_settings(chosen)
    val: FeedSettings = lab.ranks.agreed(lab.val_beside(chosen))
    notes = []
    if lab.ranks.size > 1:
        notes.append(f"images/s are those of the slowest of {lab.ranks.size} ranks")
    if val != wanted:
        notes.append(
            f"the validation feed gets {val} instead of {wanted}, to fit beside the training feed"
        )
    return TuningReport(
        search=search,
        settings=chosen,
        val=val,
        before=Side(own, choice.before, choice.waits[0], lab.needs(own).memory),
        after=Side(chosen, choice.after, choice.waits[1], lab.needs(chosen).memory),
        demand=choice.demand,
        ceiling=choice.ceiling,
        sentence=sentence(own, choice),
        trials=tuple(trials),
        limits=lab.limits,
        notes=tuple(notes),
        seconds=seconds,
        complete=choice.complete,
        reused=False,
        others_cores=others_cores,
    )


def sentence(own: FeedSettings, choice: Choice) -> str:
    """Returns what the step takes, what settings deliver, and why one was chosen."""
    if not (choice.demand and choice.before and choice.after):
        return f"Chosen: {choice.settings}. {choice.reason}."
    rates = f"The model takes {choice.demand} images/s. {own} delivers {choice.before}"
    if choice.settings != own:
        return f"{rates}, {choice.settings} {choice.after}. {choice.reason}."
    if choice.before.images_per_s >= FED * choice.demand.images_per_s:
        return f"Nothing to gain (ceiling {choice.ceiling:.1f}x). {rates}. {choice.reason}."
    return f"{rates}, and stays. {choice.reason}."
