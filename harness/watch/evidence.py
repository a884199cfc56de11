"""What a verdict rests on, and what follows from it by arithmetic alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from harness.watch.figures import Tag, Window
from harness.watch.stages import StageTotals
from harness.watch.supply import reckon

_LARGEST_CEILING = 1000.0
_FULL = 0.9  # of the processors' time: so much in use, some work waits for a processor
THROTTLED = (
    0.25  # of the scheduling periods: kubernetes-mixin's CPUThrottlingHigh warns from here on
)


class LoaderSettings(Protocol):
    """What a verdict asks of a loader's settings; the names are torch's."""

    @property
    def backend(self) -> str:
        """The form of the feed; one of "arrays" never has workers."""

    @property
    def batch_size(self) -> int:
        """Images in a batch."""

    @property
    def num_workers(self) -> int:
        """Worker processes; 0: loading happens in the trainer."""

    @property
    def prefetch_factor(self) -> int | None:
        """Batches in flight: per worker process, of threads in all; None without workers."""

    @property
    def pin_memory(self) -> bool:
        """Whether batches are page-locked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """One rank's step: the median of ``step_ms``, else means, in milliseconds; None where the
    device cannot tell.

    ``stalled_ms`` is device time idle for want of data, not the host's wait, which is harmless
    while work is queued.
    """

    rank: int
    step_ms: float
    stalled_ms: float
    host_ms: float | None
    forward_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a verdict rests on.

    Attributes:
        window: the steps' figures, usually the whole run's.
        stages: what the workers spent their time on; None where the feed does not tell.
        settings: the loader's.
        cores: processors that this rank may use.
        device: cpu, cuda or mps.
        sampled: the machine's figures by tag, means over the run.
        autotuned: whether the loader's settings are those of a search.
        ranks: every rank's figures, where there are several.
        precision: the network's, by its name in the settings.
        compiled: whether torch.compile was used.
        channels_last: whether activations are kept as NHWC.
        window_steps: steps in one logged window.
    """

    window: Window
    stages: StageTotals | None
    settings: LoaderSettings
    cores: float
    device: str
    sampled: Mapping[str, float]
    autotuned: bool
    ranks: tuple[RankFigures, ...] = ()
    precision: str = "fp32"
    compiled: bool = False
    channels_last: bool = False
    window_steps: int = 10


class Reckoning:
    """``evidence`` as shares of the time, 0..1.

    Attributes:
        starved: the device had nothing to run and the loop waited for a batch.
        copy: it waited for a batch's copy.
        host: it waited for Python, on a CPU for garbage collections within a step too.
        launch: it waited for Python within a step, to launch the next kernel; 0 where that was not
            looked into.
        lost: the four together.
        prepare: it augmented and normalised batches.
        compute: it ran the network; None where that is not known.
        parts: what ``starved`` was spent on: make, transport, pin and move; empty where no batch
            was stamped.
        host_parts: what ``host`` was spent on, as far as that has a name.
        supply: what the workers' time went for; None where nothing tells.
        ceiling: speed-up if loading were free.
    """

    def __init__(self, evidence: Evidence) -> None:
        window = evidence.window
        shares = evidence.window.shares
        self.evidence = evidence
        self.window = window
        self.stall = min(1.0, max(0.0, window.stall_fraction or 0.0))
        self.ceiling = min(_LARGEST_CEILING, 1 / max(1 - self.stall, 1e-9))
        self.copy = shares.get("exposed_copy", 0.0)
        self.starved = shares.get("starved", self.stall - self.copy)
        self.compute = shares.get("compute", window.compute_fraction)
        elapsed_s = max(window.elapsed_s, 1e-9)
        self.host = shares.get("host", 0.0)
        # named work that a device did not wait for, because it had steps in store, is no part of it
        self.host_parts = {
            name: min(self.host, spent_s / elapsed_s)
            for name, spent_s in window.host_parts_s.items()
        }
        self.launch = shares.get("launch", 0.0)
        self.prepare = shares.get("prepare", 0.0)
        self.lost = self.starved + self.copy + self.host + self.launch
        named = {name: window.wait_parts.get(name, 0.0) for name in ("make", "transport", "pin")}
        self.parts = (
            {**named, "move": max(0.0, 1 - sum(named.values()))} if window.wait_parts else {}
        )
        self.supply = reckon(evidence.stages, self._lone_crowding())

    def sampled(self, tag: Tag) -> float | None:
        """The mean of one of the machine's figures over the run."""
        return self.evidence.sampled.get(tag)

    def suspects(self) -> dict[str, float]:
        """The share of the time that each kind of bottleneck held the steps up; compute's is the
        steps' own.
        """
        parts = self.parts or {"make": 1.0}
        found = {
            "compute": (self.compute or 0.0) + self.prepare,
            "host": self.host,
            "launch": self.launch,
        }
        found["copy"] = self.copy + self.starved * parts.get("move", 0.0)
        found["transport"] = self.starved * (parts.get("transport", 0.0) + parts.get("pin", 0.0))
        made = self.starved * parts["make"]
        for kind, share in self.supply.parts.items() if self.supply else ():
            found[kind] = found.get(kind, 0.0) + made * share
        return found

    def unmade(self) -> float:
        """The share of the time that steps would wait for batches if those were here as soon as
        they are made.
        """
        supply = self.supply
        workers = self.evidence.settings.num_workers
        if supply is None or not workers:
            return self.starved
        demand = (self.window.images_per_s or 0.0) * self.ceiling
        return max(0.0, 1 - workers / max(workers, supply.wall_s * demand))

    def room(self) -> float:
        """How many times as much as its workers the processors could load, beside the step, if that
        was all that bounds it.
        """
        supply = self.supply
        rate = self.window.images_per_s
        workers = self.evidence.settings.num_workers
        if supply is None or not rate:
            return 1.0
        cores = self.evidence.cores
        used = self.sampled(Tag.CPU_CORES)
        step_cores = 0.0  # where the device is another one and nothing was sampled
        if used is not None:
            step_cores = max(0.0, min(used, cores) - supply.cpu_s * rate)
        elif self.evidence.device == "cpu":
            step_cores = cores * (self.compute or 0.0)
        return supply.rate_of(cores, step_cores / rate) / max(rate, workers / supply.wall_s)

    def _lone_crowding(self) -> float | None:
        """The most that the processors can have been crowded; None where they were full."""
        used = self.sampled(Tag.CPU_CORES)
        machine = self.sampled(Tag.CPU_FRACTION)
        shares = [
            share for share in (used and used / self.evidence.cores, machine) if share is not None
        ]
        if (
            max(shares, default=0.0) >= _FULL
            or (self.sampled(Tag.THROTTLED_FRACTION) or 0.0) >= THROTTLED
        ):
            return None
        return (
            1.0
            if shares
            else max(1.0, (self.evidence.settings.num_workers + 1) / self.evidence.cores)
        )
