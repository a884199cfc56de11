"""Figures in, one class of bottleneck and a few sentences out. Pure functions.

``judge`` is the one classifier: of runs, and of what ``mode=diagnose`` has measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

import numpy as np

from harness.watch.bottleneck import HARM, HEADLINE, SECOND, WORK, Bottleneck
from harness.watch.evidence import THROTTLED, WORTH, Evidence, StallBreakdown, listed
from harness.watch.figures import Tag
from harness.watch.neighbours import SPOILT

# what a stall below this share of the time would give back cannot be told from noise
_FED = 0.02


@dataclass(frozen=True, slots=True)
class Verdict:
    """What bounds a run.

    Attributes:
        bottleneck: its kind; balanced: some waiting, under a tenth of the time.
        ceiling: speed-up if loading were free, 1 / (1 - stall_fraction); None: the stall is not
            known.
        sentence: the class in words, the figures that say so, the ceiling, and what to try: short
            sentences.
        next_step: settings to try, as overrides that can be typed; None: no setting helps.
        evidence: the figures that it rests on.
    """

    bottleneck: Bottleneck
    ceiling: float | None
    sentence: str
    next_step: str | None
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """A bottleneck, sentences with its figures, and what helps: a setting, or something else.

    ``ceiling`` is the speed-up if another rank did not wait for data.
    """

    bottleneck: Bottleneck
    cause: str
    next_step: str | None = None
    advice: str | None = None
    ceiling: float = 1.0


def judge(evidence: Evidence) -> Verdict:
    """Returns what bounds the steps in ``evidence.window``, and what to try."""
    window = evidence.window
    # in under a second, a single slow step among a few would decide
    least = 10 if window.elapsed_s >= 1.0 else 20
    if window.stall_fraction is None or window.steps < least:
        why = f"On {evidence.device}, it cannot be told whether the device waits for data"
        if window.steps < least:
            few = f"{window.steps} steps are too few for a verdict"
            why = f"{few}. Try: let the run go on for longer"
        return Verdict("unknown", None, f"Unknown. {why}.", None, ())
    r = StallBreakdown(evidence)
    found = straggler(r)
    if found is None:
        rule = unharmed
        if r.lost >= HARM:
            # the rule for what costs the most
            costs = {starved: r.starved, copied: r.copy, hosted: r.host, launched: r.launch}
            rule = max(costs, key=costs.__getitem__)
        found = rule(r)
    found = lacking(r, found) or found
    ceiling = max(r.ceiling, found.ceiling)

    # the class, the cause, the ceiling, and what to try
    kind = found.bottleneck
    sentences = [HEADLINE[kind], found.cause]
    if kind in SECOND and r.lost >= HARM and (r.compute or 0.0) >= 0.75:
        sentences[0] = f"Mostly compute ({r.compute:.0%}), then {SECOND[kind]}"
    # beside other programs the ceiling would be theirs too
    if 1 - 1 / ceiling >= _FED and kind != "neighbours":
        gain = f"Faster loading gives at most {ceiling:.3g}x"
        if evidence.device == "cpu":
            gain += ", and less where it takes processors from the step"
            # they hardly wait, and are slower all the same
            if evidence.ceiling and r.lost < HARM and ceiling > 1 / (1 - HARM):
                gain = (
                    "Loading takes processors from the steps: without it, they are "
                    f"{ceiling:.3g}x as fast"
                )
        sentences.append(gain)
    ways = [way for way in (found.next_step, found.advice) if way]
    if ways:
        sentences.append(f"Try: {', or '.join(ways)}")
    return Verdict(kind, ceiling, ". ".join(sentences) + ".", found.next_step, r.told())


def straggler(r: StallBreakdown) -> Finding | None:
    """Returns the rank that the others wait for, where gradients meet; None: they are alike."""
    e = r.evidence
    if len(e.ranks) < 2:
        return None
    causes = (
        ("waiting for data", "look at that rank's storage and cores"),
        ("Python between two steps", "look at what else runs on that rank's cores"),
        ("the forward pass", "look whether that rank's device is slower or shared"),
    )
    ms = np.array([[rank.stalled_ms, rank.host_ms, rank.forward_ms] for rank in e.ranks], float)
    # a figure that one rank cannot tell counts for none of them
    ms[:, np.isnan(ms).any(axis=0)] = 0.0
    slowest = int(ms.sum(axis=1).argmax())
    others_ms = np.delete(ms, slowest, axis=0)
    late_ms = float(ms[slowest].sum() - np.median(others_ms.sum(axis=1)))
    step_ms = median(rank.step_ms for rank in e.ranks)
    if late_ms <= HARM * step_ms:
        return None
    more_ms = ms[slowest] - np.median(others_ms, axis=0)
    what, advice = causes[more_ms.argmax()]
    cause = (
        f"Rank {e.ranks[slowest].rank} holds the others up by {late_ms:.1f} ms a step. "
        f"Most of that is {what}"
    )
    if more_ms.argmax() > 0:
        return Finding("rank", cause, None, advice)
    held_up = float(more_ms[0]) / max(step_ms, 1e-9)
    return Finding("rank", cause, r.search, advice, 1 / max(0.01, 1 - held_up))


def unharmed(r: StallBreakdown) -> Finding:
    """Returns what sets the pace where next to nothing is lost."""
    e = r.evidence
    # a twentieth of the time for Python is no surprise where steps are short
    if r.stall >= _FED or r.host >= 0.05:
        cause = r.waited
        if r.host >= WORTH:
            cause += f", and for Python {r.host:.0%}"
        return Finding("balanced", cause)
    if r.compute is None:
        apart = f"On {e.device}, the network's time and Python's cannot be told apart"
        return Finding("unknown", f"Loading does not hold the steps up. {r.waited}. {apart}")
    cause = f"The network takes {r.compute:.0%} of the time"
    if r.prepare >= _FED:
        cause += f", preparing batches {r.prepare:.0%}"
    if e.device != "cuda":
        return Finding("compute", cause, advice="a smaller network or image, or a GPU")
    steps = []
    if e.precision == "fp32":
        steps.append(f"trainer.precision={e.half_precision}")
    if not e.channels_last:
        steps.append("trainer.channels_last=true")
    if not steps and not e.compiled:
        steps.append("trainer.compile=true")
    if steps:
        return Finding("compute", cause, " ".join(steps))
    return Finding("compute", cause, advice="a smaller network or image")


def starved(r: StallBreakdown) -> Finding:
    """Returns why batches come too late: made too slowly, or long on the way."""
    e = r.evidence
    cost = r.cost
    late = max(r.handed, r.moved) > r.made
    # workers that are too slow, and processors full of samples, delay handing over too: where that
    # were the bottleneck, they would idle
    is_full = r.could() < (1 + HARM) * r.rate and cost and 2 * cost.wants_s * r.rate >= e.cores
    if late and not is_full and (cost is None or r.unmade() < r.starved / 2):
        if r.moved >= r.handed:
            return copied(r)
        cause = f"{r.waited}. For {r.handed:.0%} of that, batches were made but not here yet"
        next_step = r.search
        # making a batch here is quicker than fetching it
        if next_step and r.workers and cost and 0 < cost.wall_s * r.rate < r.starved:
            next_step = "loader.num_workers=0"
        return Finding("transport", cause, next_step, WORK["transport"][1])
    if cost is None:
        return Finding("unknown", f"{r.waited}. The feed does not say for what", r.search)

    more, why = more_in_flight(r)
    doing, cheaper = WORK[cost.kind]
    took = (
        f"{doing.capitalize()} takes {1e3 * cost.parts[cost.kind] * cost.wall_s:.3g} of the "
        f"{1e3 * cost.wall_s:.3g} ms of a sample"
    )
    if cost.kind == "augment":
        took += f", most of them in {cost.stage}"
    if cost.waits:
        took += ", mostly waiting"
        if cost.kind == "storage":
            took += r.origin()
    elif more:
        return Finding("workers", f"{r.waited}. {why}", more)
    elif not r.has_room():
        took += f". The {e.cores:g} cores have no room for more workers"
    if cost.kind == "transport":
        # backends other than processes share nothing
        more = r.search
    return Finding(cost.kind, f"{r.waited}. {took}", more, cheaper)


def more_in_flight(r: StallBreakdown) -> tuple[str | None, str]:
    """Returns a setting that adds workers or batches in flight, if any, and why."""
    e = r.evidence
    cost = r.cost
    if cost is None or e.autotuned or r.could() < (1 + HARM) * r.rate:
        return None, ""
    if r.workers and r.unmade() == 0:
        # more than 8 batches ahead of each process, or 32 of all threads, have not helped
        deepest = 32 if e.settings.backend == "threads" else 8
        depth = e.settings.prefetch_factor or deepest
        if depth >= deepest:
            return None, ""
        uneven = f"{r.workers} workers are enough on average, but their batches come unevenly"
        return f"loader.prefetch_factor={min(2 * depth, deepest)}", uneven
    # a tenth more than the steps would take, as far as there are processors: samples are uneven
    rate = min(r.could(), r.ceiling * r.rate)
    wanted = max(1, math.ceil(1.1 * rate * cost.wall_s))
    wanted = min(wanted, e.most_workers or max(8, int(4 * e.cores)))
    if not r.has_room() or wanted <= r.workers or e.settings.backend == "arrays":
        return None, ""
    why = f"Loading runs in the trainer itself. The {e.cores:g} cores have room for workers"
    if r.workers:
        why = (
            f"A sample takes one of the {r.workers} workers {1e3 * cost.wall_s:.3g} ms. "
            f"The {e.cores:g} cores have room for more"
        )
    return f"loader.num_workers={wanted}", why


def copied(r: StallBreakdown) -> Finding:
    """Returns why batches that are here wait to be brought to the device and normalised."""
    took = f"Copies took {r.copy:.0%} of the time while nothing ran"
    if r.moved * r.starved > r.copy:
        took = f"Moving and normalising batches took {r.moved:.0%} of that"
    next_step = None
    if r.evidence.device == "cuda" and not r.evidence.settings.pin_memory:
        took += ", from pageable memory"
        next_step = "loader.pin_memory=true"
    return Finding("copy", f"{r.waited}. {took}", next_step, "make images smaller, or steps longer")


def hosted(r: StallBreakdown) -> Finding:
    """Returns how Python keeps the device waiting between two steps."""
    spent = {name: share for name, share in r.host_parts.items() if share >= WORTH}
    spent["unnamed work"] = r.host - sum(spent.values())
    largest = max(spent, key=spent.__getitem__)
    shown = listed(spent).replace("gc ", "garbage collection ")
    cause = f"Python held the steps up {r.host:.0%} of the time: {shown}"
    if largest == "gc":
        return Finding(
            "host", cause, advice="keep fewer objects alive, or call gc.freeze() before training"
        )
    if largest == "logging":
        return Finding("host", cause, f"watch.window_steps={10 * r.evidence.window_steps}")
    return Finding("host", cause, r.larger, "do less between two steps")


def launched(r: StallBreakdown) -> Finding:
    """Returns that Python launches kernels more slowly than the device runs them."""
    cause = f"The device waited for Python within the step {r.launch:.0%} of the time"
    if launch := r.evidence.window.launch_ms:
        cause += f". Launching a step takes {launch.median:.1f} ms"
    faster = r.larger if r.evidence.compiled else "trainer.compile=true"
    return Finding("launch", cause, faster)


def lacking(r: StallBreakdown, found: Finding) -> Finding | None:
    """Returns what the machine lacked, where that can have caused ``found``."""
    e = r.evidence
    kind = found.bottleneck
    # slow processors do not harm an accelerator that is busy all the same
    if e.device == "cpu" or r.lost >= HARM:
        # a page from a disk takes 0.1 ms at least; files that are mapped fault where they are read
        faulting = min(1.0, 1e-4 * r.sampled(Tag.MAJOR_FAULTS_PER_S, 0.0)) * (kind != "storage")
        stalled = r.sampled(Tag.MEMORY_STALL_FRACTION, faulting)
        if stalled >= HARM and kind != "rank":
            fewer = None
            if r.workers > 1:
                fewer = f"loader.num_workers={r.workers // 2}"
            elif (e.settings.prefetch_factor or 1) > 1:
                fewer = "loader.prefetch_factor=1"
            cause = f"Work stood still for memory {stalled:.0%} of the time"
            return Finding("memory", cause, fewer, "give the run more memory")
        # a quota that stops the run in most periods stops it within reads, too
        waits = kind == "storage" and r.throttled < 0.5 and r.cost is not None and r.cost.waits
        if not waits and kind not in ("copy", "rank", "unknown"):
            return lacking_cores(r, kind)
    busy = r.sampled(Tag.GPU_OTHERS_UTILIZATION, 0.0)
    if busy < SPOILT or kind != "compute":
        return None
    cause = f"Other programs keep the GPU busy {busy:.0%} of the time"
    return Finding(
        "neighbours", cause, advice="wait until these programs end, or train on another GPU"
    )


def lacking_cores(r: StallBreakdown, kind: Bottleneck) -> Finding | None:
    """Returns what takes the processors that ``kind`` needs; None: nothing does."""
    e = r.evidence
    full = r.others is None and e.cores_from.startswith("quota") and not r.has_room()
    if r.throttled >= THROTTLED or (full and r.cost and r.cost.kind == kind):
        cause = f"{e.cores:.3g} cores are too few"
        if r.throttled:
            cause += f". The quota stopped this run in {r.throttled:.0%} of its periods"
        quotas = "raise the quota (cpu.max, docker --cpus, Kubernetes limits.cpu)"
        return Finding("quota", cause, advice=quotas)
    if r.others is None:
        return None
    cause = f"Other programs take {r.others:.2g} of the {e.cores:.3g} cores"
    if queued := r.sampled(Tag.QUEUED_THREADS):
        cause += f". On average, {queued:.2g} threads of this run waited for a core"
    advice = "wait until these programs end, or train on cores of your own"
    return Finding("neighbours", cause, advice=advice)
