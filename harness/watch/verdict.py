"""Figures in, one sentence and a ceiling out. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from harness.watch.bottleneck import CHEAPER, FED, HARM, Bottleneck, harmful, headline, lacks_cores
from harness.watch.evidence import THROTTLED, Reckoning
from harness.watch.evidence import Evidence as Evidence
from harness.watch.evidence import RankFigures as RankFigures
from harness.watch.figures import Tag
from harness.watch.neighbours import SPOILT, taken
from harness.watch.supply import DOING, Supply

_MIN_STEPS = 10  # fewer say nothing about a run
_PROMPT = 0.05  # of the time: so much Python between two steps is no surprise where steps are short
_FOLLOWS = (
    0.9  # launching as a share of the block's device time, from which the device follows the host
)
# the longest gap between two blocks that were both launched before the device came to them
_QUEUED_MS = 0.03
_FAULT_S = 1e-4  # the least that a page from a disk costs: one read of an NVMe drive
# of the bytes read: from here on the page cache does not hold the files; up to here it does
_FROM_DISK = 0.5
_CACHED = 0.05
_WORTH = 0.01  # of the time: a smaller suspect is not worth a word
_DEEPEST = 8  # batches in flight for each worker; more have not helped
_DEEPEST_TOGETHER = 32  # of threads, whose batches are in flight for all of them
# workers: so many, or so many a core, as the tuner's search has it
MOST = 8
MOST_PER_CORE = 4
# forms of the feed: that never has workers, and whose workers share each batch
_WORKERLESS = "arrays"
_TOGETHER = "threads"

_WAITING = "waiting for data"
_MOST_HELD_UP = 0.99  # of a step
_HOST_WORDS = {"gc": "garbage collection"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What bounds a run.

    Attributes:
        bottleneck: its kind; balanced: some waiting, under a tenth of the time.
        ceiling: speed-up if loading were free, 1 / (1 - stall_fraction); None where the stall is
            not known.
        sentence: the class in words, the figures that say so, the ceiling, and what to try: short
            sentences.
        next_step: settings to try, as overrides that can be typed; None where no setting helps.
        evidence: the figures that it rests on, then the two next suspects.
    """

    bottleneck: Bottleneck
    ceiling: float | None
    sentence: str
    next_step: str | None
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Finding:
    """A bottleneck, sentences with its figures, and what would help: a setting, or something else."""

    bottleneck: Bottleneck
    cause: str
    next_step: str | None = None
    advice: str | None = None
    held_up: float = 0.0  # the share of the step that another rank's waiting for data cost this one


def judge(evidence: Evidence) -> Verdict:
    """What bounds the steps in ``evidence.window``, and what to try."""
    window = evidence.window
    if window.stall_fraction is None or window.steps < _MIN_STEPS:
        few = (
            f"Unknown. {window.steps} steps are too few for a verdict. Try: let the run go on "
            "for longer."
        )
        return Verdict("unknown", None, few, None, ())
    r = Reckoning(evidence)
    found = _straggler(evidence.ranks, evidence.autotuned) or (
        _unharmed(r) if r.lost < HARM else _harmed(r)
    )
    found = _short_of_memory(r, found) or _throttled(r, found) or _crowded(r, found) or found
    r.ceiling = max(r.ceiling, 1 / (1 - found.held_up))
    return Verdict(
        found.bottleneck, r.ceiling, _sentence(r, found), found.next_step, _clauses(r, found)
    )


def _straggler(ranks: tuple[RankFigures, ...], autotuned: bool) -> _Finding | None:
    """The rank that the others wait for, which they do where gradients meet: it has much more to do
    before that.
    """
    if len(ranks) < 2:
        return None
    columns = {
        _WAITING: ([rank.stalled_ms for rank in ranks], "look at that rank's storage and cores"),
        "Python between two steps": (
            _known([rank.host_ms for rank in ranks]),
            "look at what else runs on that rank's cores",
        ),
        "the forward pass": (
            _known([rank.forward_ms for rank in ranks]),
            "look whether that rank's device is slower or shared",
        ),
    }
    own_ms = [sum(parts) for parts in zip(*(column for column, _ in columns.values()), strict=True)]
    slowest = max(range(len(ranks)), key=own_ms.__getitem__)
    late_ms = _beyond(own_ms, slowest)
    step_ms = median(rank.step_ms for rank in ranks)
    if late_ms <= HARM * step_ms:
        return None
    what = max(columns, key=lambda name: _beyond(columns[name][0], slowest))
    cause = (
        f"Rank {ranks[slowest].rank} holds the others up by {late_ms:.1f} ms a step. Most of "
        f"that is {what}"
    )
    if what != _WAITING:
        return _Finding("rank", cause, None, columns[what][1])
    held_up = min(_MOST_HELD_UP, _beyond(columns[what][0], slowest) / max(step_ms, 1e-9))
    return _Finding(
        "rank", cause, None if autotuned else "loader.autotune=true", columns[what][1], held_up
    )


def _known(column: list[float | None]) -> list[float]:
    """``column``, or zeros where a rank cannot tell."""
    known = [value for value in column if value is not None]
    return known if len(known) == len(column) else [0.0] * len(column)


def _beyond(column: list[float], at: int) -> float:
    """How far the value at ``at`` lies above the median of the others."""
    return column[at] - median(column[:at] + column[at + 1 :])


def _unharmed(r: Reckoning) -> _Finding:
    """What sets the pace where next to nothing is lost."""
    if r.stall >= FED or r.host >= _PROMPT:
        return _Finding("balanced", f"{_waited(r)}, and for Python {r.host:.0%}")
    if r.compute is None:
        apart = f"On {r.evidence.device}, the network's time and Python's cannot be told apart"
        return _Finding("unknown", f"Loading does not hold the steps up. {_waited(r)}. {apart}")
    e = r.evidence
    launch = r.window.launch_ms
    compute = r.window.compute_ms
    gap = r.window.gap_ms
    follows = (
        launch
        and compute
        and gap
        and launch.median >= _FOLLOWS * compute.median
        and gap.median > _QUEUED_MS
    )
    if follows and "launch" not in r.window.shares:  # a device that cannot be held back to tell
        return _launched(r)
    beside = f", preparing batches {r.prepare:.0%}" if r.prepare >= FED else ""
    cause = f"The network takes {r.compute:.0%} of the time{beside}"
    if e.device != "cuda":
        return _Finding("compute", cause, advice="a smaller network or image, or a GPU")
    steps = ["trainer.precision=bf16"] if e.precision == "fp32" else []
    steps += [] if e.channels_last else ["trainer.channels_last=true"]
    steps += [] if steps or e.compiled else ["trainer.compile=true"]
    return _Finding(
        "compute", cause, " ".join(steps) or None, None if steps else "a smaller network or image"
    )


def _harmed(r: Reckoning) -> _Finding:
    """What costs the most, of waiting for batches, for copies and for Python."""
    costs = {_starved: r.starved, _copied: r.copy, _hosted: r.host, _launched: r.launch}
    return max(costs, key=lambda rule: costs[rule])(r)


def _starved(r: Reckoning) -> _Finding:
    """Batches come too late, because they are made too slowly or because it takes long to get them
    here.

    Where the workers are too slow, hand-over takes long as well, for want of processors: that is
    not the cause.
    """
    handed = r.parts.get("transport", 0.0) + r.parts.get("pin", 0.0)
    late = bool(r.parts) and max(handed, r.parts["move"]) > r.parts["make"]
    if late and (r.supply is None or r.unmade() < r.starved / 2):
        return _handed_over(r, handed) if handed > r.parts["move"] else _copied(r)
    supply = r.supply
    tuned = r.evidence.autotuned
    if supply is None:
        return _Finding(
            "unknown",
            f"{_waited(r)}. The feed does not say for what",
            None if tuned else "loader.autotune=true",
        )
    more, why = (None, "") if tuned else _more(r, supply)
    took = (
        f"{DOING[supply.kind].capitalize()} takes {1e3 * supply.kind_s:.3g} of the "
        f"{1e3 * supply.wall_s:.3g} ms of a sample"
    )
    took += f", most of them in {supply.stage}" if supply.kind == "augment" else ""
    if supply.waits:
        took += f", mostly waiting{_where_from(r) if supply.kind == 'storage' else ''}"
        return _Finding(supply.kind, f"{_waited(r)}. {took}", more, CHEAPER[supply.kind])
    if more:
        return _Finding("workers", f"{_waited(r)}. {why}", more)
    full = (
        f". The {r.evidence.cores:g} cores have no room for more workers"
        if r.room() < 1 + HARM
        else ""
    )
    next_step = (
        "loader.autotune=true" if supply.kind == "transport" and not tuned else None
    )  # other forms share nothing
    return _Finding(supply.kind, f"{_waited(r)}. {took}{full}", next_step, CHEAPER[supply.kind])


def _more(r: Reckoning, supply: Supply) -> tuple[str | None, str]:
    """More workers, if there are processors for a tenth more images, or more batches in flight; and
    why.
    """
    rate = r.window.images_per_s or 0.0
    settings = r.evidence.settings
    cores = r.evidence.cores
    deepest = _DEEPEST_TOGETHER if settings.backend == _TOGETHER else _DEEPEST
    workers = settings.num_workers
    depth = settings.prefetch_factor or deepest
    room = r.room()
    if workers and r.unmade() == 0:
        uneven = f"{workers} workers are enough on average, but their batches come unevenly"
        return (
            (f"loader.prefetch_factor={min(2 * depth, deepest)}", uneven)
            if depth < deepest
            else (None, "")
        )
    wanted = min(
        supply.workers_for(min(room, r.ceiling) * rate), max(MOST, int(MOST_PER_CORE * cores))
    )
    if room < 1 + HARM or wanted <= workers or settings.backend == _WORKERLESS:
        return None, ""
    does = (
        f"A sample takes one of the {workers} workers {1e3 * supply.wall_s:.3g} ms"
        if workers
        else "Loading has no workers"
    )
    return f"loader.num_workers={wanted}", f"{does}. The {cores:g} cores have room for more"


def _where_from(r: Reckoning) -> str:
    """Whether what was read came from the disk, as far as that is known."""
    read = r.sampled(Tag.READ_BYTES_PER_S)
    stored = r.sampled(Tag.STORAGE_BYTES_PER_S)
    if not read or stored is None:
        return ""
    if stored < _CACHED * read:
        return ". Hardly a byte came from a disk: opening files is slow, or a network's file system"
    cold = ": the files were not in the page cache" if stored >= _FROM_DISK * read else ""
    # pages of mapped files come from the disk too, and are not read
    return (
        f". Of {max(read, stored) / 1e6:.3g} MB/s, {stored / 1e6:.3g} came from a disk or NFS{cold}"
    )


def _handed_over(r: Reckoning, handed: float) -> _Finding:
    """Batches that were made wait to be brought into this process, or into page-locked memory."""
    window = r.window
    settings = r.evidence.settings
    supply = r.supply
    cause = (
        f"{_waited(r)}. For {handed:.0%} of that, batches were made but not here yet: "
        f"{r.parts['transport']:.0%} on the way"
    )
    cause += f" from a worker, {r.parts['pin']:.0%} into page-locked memory"
    waited_s = r.starved / window.images_per_s if window.images_per_s else 0.0  # for an image
    tuned = r.evidence.autotuned
    next_step = None if tuned else "loader.autotune=true"
    if (
        not tuned and settings.num_workers and supply and supply.wall_s < waited_s
    ):  # making it here is quicker than fetching it
        next_step = "loader.num_workers=0"
    return _Finding("transport", cause, next_step, "make images or batches smaller")


def _copied(r: Reckoning) -> _Finding:
    """Batches that are here wait to be brought to the device and normalised."""
    pageable = r.evidence.device == "cuda" and not r.evidence.settings.pin_memory
    took = f"Copies took {r.copy:.0%} of the time while nothing ran"
    if (moved := r.parts.get("move", 0.0)) * r.starved > r.copy:
        took = f"Moving and normalising batches took {moved:.0%} of that"
    cause = f"{_waited(r)}. {took}{', from pageable memory' if pageable else ''}"
    return _Finding(
        "copy",
        cause,
        "loader.pin_memory=true" if pageable else None,
        "make images smaller, or steps longer",
    )


def _hosted(r: Reckoning) -> _Finding:
    """Python keeps the device waiting between two steps."""
    named = sorted(
        ((name, share) for name, share in r.host_parts.items() if share >= _WORTH),
        key=lambda part: -part[1],
    )
    rest = r.host - sum(share for _, share in named)
    shown = [f"{_HOST_WORDS.get(name, name)} {share:.0%}" for name, share in named]
    shown += [f"unnamed work {rest:.0%}"] if rest >= _WORTH else []
    cause = f"Python held the steps up {r.host:.0%} of the time: {', '.join(shown)}"
    name = named[0][0] if named and named[0][1] >= rest else ""
    if name == "gc":
        return _Finding(
            "host", cause, advice="keep fewer objects alive, or call gc.freeze() before training"
        )
    if name == "logging":
        return _Finding("host", cause, f"watch.window_steps={10 * r.evidence.window_steps}")
    return _Finding(
        "host",
        cause,
        f"loader.batch_size={2 * r.evidence.settings.batch_size}",
        "do less between two steps",
    )


def _launched(r: Reckoning) -> _Finding:
    """Python launches the network's kernels more slowly than the device runs them."""
    launch = r.window.launch_ms
    share = f" {r.launch:.0%} of the time" if r.launch else ""
    took = f". Launching a step takes {launch.median:.1f} ms" if launch else ""
    faster = (
        f"loader.batch_size={2 * r.evidence.settings.batch_size}"
        if r.evidence.compiled
        else "trainer.compile=true"
    )
    return _Finding("launch", f"The device waited for Python within the step{share}{took}", faster)


def _short_of_memory(r: Reckoning, found: _Finding) -> _Finding | None:
    """Whether pages that were needed had been given up, where that can have cost time."""
    stalled = r.sampled(Tag.MEMORY_STALL_FRACTION)
    faults = r.sampled(Tag.MAJOR_FAULTS_PER_S)
    mapped = found.bottleneck == "storage"  # files that are mapped fault where they are read
    if stalled is None and faults is not None and not mapped:
        stalled = min(1.0, faults * _FAULT_S)
    if (
        stalled is None
        or stalled < HARM
        or found.bottleneck == "rank"
        or not harmful(r.evidence.device == "cpu", r.lost)
    ):
        return None
    settings = r.evidence.settings
    fewer = None
    if settings.num_workers > 1:
        fewer = f"loader.num_workers={settings.num_workers // 2}"
    elif (settings.prefetch_factor or 1) > 1:
        fewer = "loader.prefetch_factor=1"
    cause = f"Work stood still for memory {stalled:.0%} of the time"
    return _Finding("memory", cause, fewer, "give the run more memory")


def _throttled(r: Reckoning, found: _Finding) -> _Finding | None:
    """Whether the control group's quota takes the processors away that ``found`` lacks."""
    throttled = r.sampled(Tag.THROTTLED_FRACTION)
    if throttled is None or throttled < THROTTLED or not _lacks_cores(r, found):
        return None
    cause = (
        f"The quota stopped this run in {throttled:.0%} of its periods. "
        f"{r.evidence.cores:.3g} cores are too few"
    )
    return _Finding(
        "quota", cause, advice="raise the quota (cpu.max, docker --cpus, Kubernetes limits.cpu)"
    )


def _crowded(r: Reckoning, found: _Finding) -> _Finding | None:
    """Whether other programs have the processors, or the GPU, that ``found`` lacks."""
    others = taken(r.evidence.sampled)
    gpu = r.sampled(Tag.GPU_OTHERS_UTILIZATION)
    if others is not None and _lacks_cores(r, found):
        threads = (
            f"On average, {r.sampled(Tag.QUEUED_THREADS):.2g} threads of this run waited for a core"
        )
        cause = f"Other programs take {others:.2g} of the {r.evidence.cores:.3g} cores. {threads}"
        return _Finding(
            "neighbours",
            cause,
            advice="wait until these programs end, or train on cores of your own",
        )
    if (
        gpu is not None
        and gpu >= SPOILT
        and r.evidence.device == "cuda"
        and found.bottleneck == "compute"
    ):
        cause = f"Other programs keep the GPU busy {gpu:.0%} of the time"
        return _Finding(
            "neighbours", cause, advice="wait until these programs end, or train on another GPU"
        )
    return None


def _lacks_cores(r: Reckoning, found: _Finding) -> bool:
    """Whether more processors would help against ``found``."""
    return lacks_cores(found.bottleneck, r.supply, r.evidence.device == "cpu", r.lost)


def _waited(r: Reckoning) -> str:
    """How long was waited for data."""
    if r.window.stall_basis == "device":
        return f"The device waited for data {r.stall:.0%} of the time"
    if r.evidence.device == "cpu":
        return f"Training waited for data {r.stall:.0%} of the time"
    return f"The loop waited for data {r.stall:.0%} of the time, the device at most as long"


def _sentence(r: Reckoning, found: _Finding) -> str:
    """The class, the cause, the ceiling, and what to try."""
    parts = [headline(found.bottleneck, r.compute, r.lost), f"{found.cause}."]
    if max(r.stall, found.held_up) >= FED:
        shared = r.evidence.device == "cpu" and r.window.stall_basis == "host"
        less = ", and less where it takes processors from the step" if shared else ""
        parts.append(f"Faster loading gives at most {r.ceiling:.3g}x{less}.")
    ways = [way for way in (found.next_step, found.advice) if way]
    if ways:
        parts.append(f"Try: {', or '.join(ways)}.")
    return " ".join(parts)


def _clauses(r: Reckoning, found: _Finding) -> tuple[str, ...]:
    """The figures, then the two next suspects."""
    window = r.window
    supply = r.supply
    shares = {
        "compute": r.compute or 0.0,
        "launch": r.launch,
        "starved": r.starved,
        "exposed copy": r.copy,
    }
    shares |= {"prepare": r.prepare, "host": r.host}
    clauses = [f"time on the {window.stall_basis}'s clock: {_listed(shares)}"]
    if r.parts and r.starved >= _WORTH:
        clauses.append(f"waiting for a batch: {_listed(r.parts)}")
    if supply:
        each = f"{1e3 * supply.wall_s:.3g} ms, {1e3 * supply.cpu_s:.3g} ms of them on a processor"
        clauses.append(f"a sample takes {each}: {_listed(supply.parts)}")
    if r.host >= _WORTH and (named := _listed(r.host_parts)):
        clauses.append(f"named work between steps: {named}")
    others = {
        name: share
        for name, share in r.suspects().items()
        if name != found.bottleneck and share >= _WORTH
    }
    next_two = sorted(others, key=lambda name: -others[name])[:2]
    return (
        *clauses,
        *(f"next suspect: {name}, {others[name]:.0%} of the time" for name in next_two),
    )


def _listed(shares: Mapping[str, float]) -> str:
    """Shares as text, without those that are next to nothing."""
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
