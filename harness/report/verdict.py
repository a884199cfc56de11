"""Decides the bottleneck and the settings to change, based on metrics, in pure functions.

``judge`` classifies runs and the measurements of ``mode=diagnose``; ``statement`` phrases the
verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ..clock.figures import Tag
from ..clock.stages import workers_for
from ..config import Precision
from ..monitor.host import SPOILT
from .evidence import FED, HARM, THROTTLED, Bottleneck, Evidence

# new values by setting
Change = Mapping[str, int | bool | str]
Why = Literal[
    "few steps", "no stall", "no stages", "no compute", "uneven", "handed over", "gc", ""
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """The bottleneck of a run.

    Attributes:
        kind: the kind of bottleneck; balanced if less than a tenth of the time is lost.
        shares: the underlying measurements.
        change: new values for settings that should help; empty if none would.
        why: the reason, if ``kind`` and ``shares`` leave it open.
        ceiling: speedup if loading were free, 1 / (1 - stall_fraction); None if the stall is
            unknown.
    """

    kind: Bottleneck
    shares: Evidence
    change: Change = field(default_factory=dict)
    why: Why = ""
    ceiling: float | None = None


def judge(r: Evidence) -> Verdict:
    """Returns the bottleneck of the steps in ``r.window``, and the settings to try."""
    window = r.window
    # a few steps suffice: a slow machine slows both
    if r.starting >= max(HARM, r.lost):
        return Verdict("starts", r, {"loader.persistent_workers": True})
    # within a second, one slow step among a few would decide
    if window.steps < (10 if window.elapsed_s >= 1.0 else 20):
        return Verdict("unknown", r, why="few steps")
    if window.stall_fraction is None:
        return Verdict("unknown", r, why="no stall")
    rule = explain_unharmed
    if r.lost >= HARM:
        # the rule for the largest loss
        costs = {
            explain_data_bound: r.starved,
            explain_copy_bound: r.copy,
            explain_host_bound: r.host,
            explain_launch_bound: r.launch,
        }
        rule = max(costs, key=costs.__getitem__)
    ceiling = r.speedup
    if r.late:
        found = Verdict("rank", r, searched(r) if r.late.part == "stalled" else {})
        ceiling = max(ceiling, 1 / max(0.01, 1 - r.late.share))
    else:
        found = rule(r)
    return replace(explain_shortage(r, found.kind) or found, ceiling=ceiling)


def searched(r: Evidence) -> Change:
    """Returns the setting that tunes the loader, unless it has been tuned."""
    return {} if r.autotuned else {"loader.autotune": True}


def explain_unharmed(r: Evidence) -> Verdict:
    """Returns the bottleneck to report when almost no time is lost."""
    # short steps normally lose up to a twentieth of the time to Python
    if r.stall >= FED or r.host >= 0.05:
        return Verdict("balanced", r)
    if r.compute is None:
        return Verdict("unknown", r, why="no compute")
    change: dict[str, bool | str] = {}
    if r.half_precision:
        if r.trainer.precision is Precision.fp32:
            change["trainer.precision"] = r.half_precision
        if not r.trainer.channels_last:
            change["trainer.channels_last"] = True
        # on a CPU it needs a compiler
        if not change and not r.trainer.compile and r.device != "cpu":
            change["trainer.compile"] = True
    return Verdict("compute", r, change)


def explain_data_bound(r: Evidence) -> Verdict:
    """Returns why batches arrive late: slow to make, or slow to transfer."""
    cores = r.cores
    cost = r.cost
    late = max(r.handed, r.moved) > r.made
    # slow workers and cores full of samples delay transfers too; if transfers were the bottleneck,
    # they would idle
    is_full = r.could() < (1 + HARM) * r.rate and cost and 2 * cost.wants_s * r.rate >= cores
    change = searched(r)
    if late and not is_full and (cost is None or r.unmade() < r.starved / 2):
        if r.moved >= r.handed:
            return explain_copy_bound(r)
        # making a batch here is faster than fetching it
        if change and r.workers and cost and 0 < cost.wall_s * r.rate < r.starved:
            change = {"loader.num_workers": 0}
        return Verdict("transport", r, change, "handed over")
    if cost is None:
        return Verdict("unknown", r, change, "no stages")
    more = more_in_flight(r)
    if more and not cost.waits:
        return Verdict("workers", r, more)
    # the largest group of stages: storage, decode, augment, collate or, only with processes,
    # transport
    return Verdict(cost.kind, r, change if cost.kind == "transport" else more)


def more_in_flight(r: Evidence) -> Change:
    """Returns a setting that adds workers or batches in flight; empty if none helps."""
    cost = r.cost
    if cost is None or r.autotuned or r.could() < (1 + HARM) * r.rate:
        return {}
    if r.workers and r.unmade() == 0:
        # prefetching more than 8 batches per process, or 32 across all threads, has not helped
        deepest = max(1, 32 // r.workers) if r.settings.backend == "threads" else 8
        ahead = r.settings.batches_ahead
        depth = min(math.ceil(2 * ahead / r.workers), deepest)
        return {"loader.prefetch_factor": depth} if depth * r.workers > ahead else {}
    # 10% more than the steps would take, within the cores, because samples are uneven
    wanted = workers_for(1.1 * min(r.could(), r.speedup * r.rate), cost.wall_s)
    wanted = min(wanted, r.most_workers or max(8, int(4 * r.cores)))
    if not r.has_room() or wanted <= r.workers or r.settings.backend == "arrays":
        return {}
    return {"loader.num_workers": wanted}


def explain_copy_bound(r: Evidence) -> Verdict:
    """Returns the verdict that batches wait to be copied to the device and normalized."""
    pins = r.window.stall_basis == "device" and not r.settings.pin_memory
    return Verdict("copy", r, {"loader.pin_memory": True} if pins else {})


def explain_host_bound(r: Evidence) -> Verdict:
    """Returns the verdict that Python keeps the device waiting between steps."""
    match max(r.host_parts, key=r.host_parts.__getitem__):
        case "gc":
            return Verdict("host", r, why="gc")
        case "logging":
            return Verdict("host", r, {"watch.window_steps": 10 * r.window_steps})
    return Verdict("host", r, {"loader.batch_size": 2 * r.settings.batch_size})


def explain_launch_bound(r: Evidence) -> Verdict:
    """Returns the verdict that Python launches kernels too slowly for the device."""
    larger = {"loader.batch_size": 2 * r.settings.batch_size}
    return Verdict("launch", r, larger if r.trainer.compile else {"trainer.compile": True})


def fewer_threads(r: Evidence) -> Change:
    """Returns a setting for as many torch threads as free cores; empty for an accelerator."""
    # a preempted thread delays all others, which spin
    threads = max(1, int(r.cores - (r.others or 0.0)))
    is_fewer = threads < (r.trainer.num_threads or int(r.cores))
    return {"trainer.num_threads": threads} if r.device == "cpu" and is_fewer else {}


def explain_shortage(r: Evidence, kind: Bottleneck) -> Verdict | None:
    """Returns the resource shortage that may have caused ``kind``, if any."""
    # slow cores do not harm an accelerator that stays busy
    if r.device == "cpu" or r.lost >= HARM:
        # reading mapped files causes page faults
        is_told = kind != "storage" or Tag.MEMORY_STALL_FRACTION in r.sampled
        if r.memory >= HARM and is_told and kind != "rank":
            if r.workers > 1:
                return Verdict("memory", r, {"loader.num_workers": r.workers // 2})
            deep = r.settings.batches_ahead > 1
            return Verdict("memory", r, {"loader.prefetch_factor": 1} if deep else {})
        # a quota that throttles most periods also stops the run within reads
        waits = kind == "storage" and r.throttled < 0.5 and r.cost and r.cost.waits
        if not waits and kind not in ("copy", "rank", "unknown"):
            full = r.others is None and r.by_quota and not r.has_room()
            if r.throttled >= THROTTLED or (full and r.cost and r.cost.kind == kind):
                return Verdict("quota", r)
            return None if r.others is None else Verdict("neighbors", r, fewer_threads(r))
    shared = r.sampled.get(Tag.GPU_OTHERS_UTILIZATION, 0.0) >= SPOILT
    return Verdict("neighbors", r) if shared and kind == "compute" else None
