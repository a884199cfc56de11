"""Phrases a verdict for ``report.json`` and the console.

The sentences give the bottleneck, the numbers behind it, the ceiling and the settings to try.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..clock.figures import Tag
from ..clock.stages import SAMPLE
from ..runtime.errors import rounded
from .evidence import FED, HARM, Bottleneck, Evidence, WorkerCost
from .verdict import Change, Verdict

# fraction of the time: smaller causes are not mentioned
_WORTH = 0.01
# others are written as KIND-bound
_HEADLINES: Mapping[Bottleneck, str] = {
    "augment": "Augmentation-bound",
    "workers": "Too few workers",
    "quota": "Limited by the CPU quota",
    "memory": "Memory pressure",
    "host": "Python overhead",
    "neighbors": "Contention with other programs",
    "rank": "One rank is slow",
    "starts": "Slow epoch starts",
    "balanced": "Balanced",
    "unknown": "Unknown",
}
# also the second bottleneck, if the network takes most of the time
_WORK: Mapping[Bottleneck, str] = {
    "storage": "reading",
    "decode": "decoding",
    "augment": "augmentation",
    "collate": "collation",
    "transport": "batch transfer",
    "copy": "copies",
    "workers": "waiting for workers",
    "launch": "kernel launches",
    "host": "Python",
}
# remedies other than settings, by reason, part of a rank's step or kind
_WAYS: Mapping[str, str] = {
    "few steps": "train for more steps, or with a smaller batch size",
    "uneven": "diagnose again when the machine is idle",
    "stalled": "check that rank's storage and cores",
    "forward": "check whether that rank's device is slower or shared",
    "storage": "put the files on a faster disk, or keep them in memory",
    "decode": "store smaller files (shorter side 1.15 to 2 times the crop)",
    "augment": "make the augmentation cheaper",
    "collate": "make images or batches smaller",
    "transport": "make images or batches smaller",
    "copy": "make images smaller, or steps longer",
    "compute": "a smaller network or image, or a faster device",
    "host": "do less between steps",
    "gc": "keep fewer objects alive, or call gc.freeze() before training",
    "memory": "give the run more memory",
    "quota": "raise the quota (cpu.max, docker --cpus, Kubernetes limits.cpu)",
    "neighbors": "wait until these programs end, or train on an idle machine",
}
_UNKNOWN: Mapping[str, str] = {
    "no stall": "This device does not report whether it waits for data",
    "no stages": "The loader does not report stage times",
    "no compute": "This device does not separate the network's time from Python's",
    "uneven": "The measurement is too noisy to find the bottleneck",
}


@dataclass(frozen=True, slots=True)
class Statement:
    """A verdict as in ``report.json``.

    Attributes:
        bottleneck: its kind.
        ceiling: speedup if loading were free; None if the stall is unknown.
        sentence: short sentences with the bottleneck, its numbers, the ceiling and remedies.
        next_step: settings to try; None if no setting helps.
        evidence: the underlying measurements.
    """

    bottleneck: Bottleneck
    ceiling: float | None
    sentence: str
    next_step: str | None = None
    evidence: tuple[str, ...] = ()


def shrinking_helps(verdict: Verdict) -> bool:
    """Whether samples load faster from a smaller copy, and decoding is the bottleneck."""
    return verdict.kind == "decode" and (verdict.shares.shrinks or 0.0) >= 1 + HARM


def as_overrides(change: Change) -> str:
    """Returns settings as they are typed on the command line."""
    return " ".join(f"{name}={str(value).lower()}" for name, value in change.items())


def stated(verdict: Verdict, tried: Callable[[Change], str] = as_overrides) -> Statement:
    """Returns ``verdict`` in words; ``tried`` formats the settings to try."""
    kind = verdict.kind
    r = verdict.shares
    headline = _HEADLINES.get(kind, f"{kind.capitalize()}-bound")
    if kind in _WORK and r.lost >= HARM and (r.compute or 0.0) >= 0.75:
        headline = f"Mostly compute ({r.compute:.0%}), then {_WORK[kind]}"
    if r.size:
        headline += f" at {r.size} px"
    next_step = tried(verdict.change) or None
    reason = verdict.why or (r.late.part if kind == "rank" and r.late else kind)
    other = _WAYS.get(reason, _WAYS.get(kind))
    if shrinking_helps(verdict):
        faster = f"samples load {r.shrinks:.1f}x as fast"
        other = f"train on a smaller copy (wellfed shrink FOLDER OUT): {faster}"
    needs_cores = kind in ("decode", "augment", "collate") and not (r.cost and r.cost.waits)
    ways = [way for way in (next_step, other, "add cores" * needs_cores) if way]
    sentences = [headline, *_facts(verdict), *_gain(verdict)]
    if ways:
        sentences.append(f"Try: {', or '.join(ways)}")
    evidence = tuple(_evidence(r)) if verdict.ceiling else ()
    return Statement(kind, verdict.ceiling, ". ".join(sentences) + ".", next_step, evidence)


def _facts(verdict: Verdict) -> Iterator[str]:
    """Yields the facts behind the kind, with their numbers."""
    r = verdict.shares
    cost = r.cost
    if verdict.ceiling and r.stall >= FED:
        waiting = "The loop (and at most the device)" if r.device != "cpu" else "Training"
        if r.window.stall_basis == "device":
            waiting = "The device"
        yield f"{waiting} waited for data {r.stall:.0%} of the time"
    match verdict.kind:
        case "unknown" if verdict.why == "few steps":
            yield f"{r.window.steps} measured steps are too few for a verdict"
        case "unknown":
            yield _UNKNOWN[verdict.why]
        case "rank" if r.late:
            works = {"stalled": "waiting for data", "host": "Python between steps"}
            yield f"Rank {r.late.rank} delays the others by {r.late.late_ms:.1f} ms per step"
            yield f"Most of that is {works.get(r.late.part, 'the forward pass')}"
        case "starts":
            yield f"Starting workers for each epoch takes {r.starting:.0%} of the time"
        case "balanced":
            if r.host >= _WORTH:
                yield f"Steps waited for Python {r.host:.0%} of the time"
        case "compute":
            yield f"The network takes {r.compute:.0%} of the time"
            if r.prepare >= FED:
                yield f"Preparing batches takes {r.prepare:.0%}"
        case "transport" if verdict.why:
            yield f"For {r.handed:.0%} of that, batches were ready but still in transfer"
        case "copy" if r.moved * r.starved > r.copy:
            yield f"Moving and normalizing batches took {r.moved:.0%} of that"
        case "copy":
            yield f"Copies took {r.copy:.0%} of the time, during which the device was idle"
        case "host":
            parts = _listed(r.host_parts).replace("gc ", "garbage collection ")
            yield f"Steps waited for Python {r.host:.0%} of the time: {parts}"
        case "launch":
            yield f"The device waited for Python within the step {r.launch:.0%} of the time"
        case "memory":
            yield f"The run waited for memory {r.memory:.0%} of the time"
        case "quota":
            yield f"{r.cores:.3g} cores are too few"
            if r.throttled:
                yield f"The quota throttled this run in {r.throttled:.0%} of the quota periods"
        case "neighbors" if r.others:
            yield f"Other programs take {rounded(r.others)} of the {r.cores:.3g} cores"
            if cost and cost.kind != "collate" and r.starved >= HARM:
                share = cost.parts[cost.kind]
                yield f"Loading is mostly {_named(cost)}, {share:.0%} of a sample's time"
        case "neighbors":
            busy = r.sampled.get(Tag.GPU_OTHERS_UTILIZATION, 0.0)
            yield f"Other programs keep the GPU busy {busy:.0%} of the time"
        case _ if cost:
            yield from _work(verdict, cost)


def _work(verdict: Verdict, cost: WorkerCost) -> Iterator[str]:
    """Yields the workers' time per sample, and whether the cores have room for more."""
    r = verdict.shares
    cores = f"The {r.cores:.3g} cores"
    sample_ms = 1e3 * cost.wall_s
    if "loader.prefetch_factor" in verdict.change:
        yield f"{r.workers} workers are enough on average, but their batches arrive unevenly"
    elif verdict.kind == "workers":
        where = f"Each of the {r.workers} workers" if r.workers else "The training process"
        yield f"{where} takes {sample_ms:.3g} ms per sample. {cores} have room for more"
    else:
        kind_ms = cost.parts[cost.kind] * sample_ms
        work = _named(cost).capitalize()
        took = f"{work} takes {kind_ms:.3g} of the {sample_ms:.3g} ms per sample"
        if cost.kind == "augment":
            took += f", mostly in {cost.stage}"
        yield took + ", mostly waiting" * cost.waits
        if cost.waits and cost.kind == "storage":
            yield from _origin(r)
        elif not r.has_room():
            others = r.sampled.get(Tag.OTHERS_CPU_CORES, 0.0)
            busy = f"; other programs use {others:.1f} of them" if others >= 0.5 else ""
            yield f"{cores} have no room for more workers{busy}"


def _named(cost: WorkerCost) -> str:
    """Returns the name of the largest part of the workers' time."""
    is_whole = cost.kind == "decode" and cost.stage == SAMPLE
    return "decoding with transforms" if is_whole else _WORK[cost.kind]


def _origin(r: Evidence) -> Iterator[str]:
    """Yields the origin of the bytes read, if known."""
    read = r.sampled.get(Tag.READ_BYTES_PER_S)
    stored = r.sampled.get(Tag.STORAGE_BYTES_PER_S)
    if not read or stored is None:
        return
    if stored < 0.05 * read:
        yield "Almost no data came from a disk, so opening files or network storage is slow"
        return
    # pages of mapped files also come from the disk, but are not read
    yield f"Of {max(read, stored) / 1e6:.3g} MB/s, {stored / 1e6:.3g} came from a disk or NFS"


def _gain(verdict: Verdict) -> Iterator[str]:
    """Yields the gain from faster loading, unless it is within noise."""
    ceiling = verdict.ceiling
    r = verdict.shares
    # with other programs running, the ceiling would include their effect
    if not ceiling or 1 - 1 / ceiling < FED or verdict.kind == "neighbors":
        return
    on_cpu = r.device == "cpu"
    # loading also slows steps that hardly wait
    if on_cpu and r.ceiling and r.lost < HARM and ceiling > 1 / (1 - HARM):
        yield f"Without loading on the same cores, steps are {ceiling:.3g}x as fast"
        return
    less = ", less if it takes cores from the step" * on_cpu
    yield f"Faster loading gives at most {ceiling:.3g}x{less}"


def _evidence(r: Evidence) -> Iterator[str]:
    """Yields the underlying measurements, one clause each."""
    window = r.window
    shares = _listed(window.shares).replace("_", " ")
    yield f"time on the {window.stall_basis} clock: {shares}"
    if window.wait_parts and r.starved >= _WORTH:
        yield f"waiting for a batch: {_listed(window.wait_parts)}"
    if cost := r.cost:
        yield (
            f"a sample takes {1e3 * cost.wall_s:.3g} ms, of which {1e3 * cost.cpu_s:.3g} ms "
            f"is CPU time: {_listed(cost.parts)}"
        )
    if r.host >= _WORTH:
        yield f"work between steps: {_listed(r.host_parts)}"


def _listed(shares: Mapping[str, float]) -> str:
    """Returns shares as text, without those below 0.5%."""
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
