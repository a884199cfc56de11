"""What would feed somebody's loop better, in the words of the loop."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.feed.interface import FeedSettings
from harness.hooks.loops import Followed
from harness.watch.bottleneck import HARM
from harness.watch.evidence import Evidence, StallBreakdown
from harness.watch.verdict import Verdict

# beyond what steps take on average: samples are uneven
_SPARE = 1.1
# our settings, and what somebody's loop has in their place; the value follows "="
_WORDS: Mapping[str, str] = {
    "loader.num_workers": "num_workers={}",
    "loader.prefetch_factor": "prefetch_factor={}",
    "loader.pin_memory": "pin_memory=True and .to(device, non_blocking=True)",
    "loader.batch_size": "batch_size={}",
    "trainer.precision": "torch.autocast with torch.bfloat16",
    "trainer.channels_last": "model.to(memory_format=torch.channels_last)",
    "trainer.compile": "torch.compile(model)",
    "watch.window_steps": "logging less often",
}


@dataclass(frozen=True, slots=True)
class Change:
    """Other arguments of a loader, and what they should give.

    Attributes:
        where: the file and line that made the loader.
        arguments: the new ones by name.
        gain: times the samples/s of now.
        note: what else they change; empty: nothing.
    """

    where: str
    arguments: Mapping[str, object]
    gain: float
    note: str

    def __str__(self) -> str:
        typed = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        text = f"DataLoader(..., {typed}) at {self.where}: about {self.gain:.2g}x as fast"
        return f"{text}. {self.note}" if self.note else text


def better(evidence: Evidence, followed: Followed) -> Change | None:
    """Returns the loader's arguments that feed the steps, by what its workers took in this run.

    None: nothing tells, or no number of workers gives a twentieth more.
    """
    found = StallBreakdown(evidence)
    cost = found.cost
    if cost is None or not found.rate or found.starved < HARM / 2:
        return None
    own = followed.settings
    reachable = min(found.could(), found.ceiling * found.rate)
    most = max(8, int(4 * evidence.cores))
    workers = min(most, max(1, math.ceil(_SPARE * reachable * cost.wall_s)))
    gain = min(reachable, workers / cost.wall_s) / found.rate
    if gain < 1.05 or workers <= own.num_workers:
        return None
    arguments: dict[str, object] = {"num_workers": workers}
    if not own.persistent_workers and followed.passes > 1:
        arguments["persistent_workers"] = True
    if evidence.device == "cuda" and not own.pin_memory:
        arguments["pin_memory"] = True
    note = ""
    if any(name not in ("load", "sample", "collate", "share") for name in stage_names(evidence)):
        note = "Random transforms draw other numbers: each worker has a seed of its own"
    return Change(followed.where, arguments, gain, note)


@dataclass(frozen=True, slots=True)
class Offer:
    """What ``wellfed.faster`` would give.

    Attributes:
        gain: times the samples/s of now.
        share: of a sample's time that is left.
        difference: of the pixels, mean, in grey levels of 255.
    """

    gain: float
    share: float
    difference: float

    def __str__(self) -> str:
        return (
            f"dataset = wellfed.faster(dataset): a sample takes {self.share:.0%} of the time, "
            f"pixels differ by {self.difference:.2g} of 255: about {self.gain:.2g}x as fast"
        )


def offered(evidence: Evidence, followed: Followed) -> Offer | None:
    """Returns what this project's decoding would give; None: next to nothing, or nobody can tell.

    Reads and decodes some images of the data set.
    """
    found = StallBreakdown(evidence)
    if followed.images is None or found.cost is None or not found.rate:
        return None
    # imports torchvision
    from harness.hooks.faster import trial

    tried = trial(followed.images)
    if tried is None:
        return None
    share = tried.after_s / tried.before_s
    # waiting for files, and putting batches together, take as long as before
    sample = sum(found.cost.parts.get(kind, 0.0) for kind in ("decode", "augment"))
    left = 1 - sample * (1 - share)
    gain = min(found.ceiling, 1 / left)
    return Offer(gain, share, tried.difference) if gain >= 1.05 else None


def stage_names(evidence: Evidence) -> list[str]:
    """Returns the stages on which workers spent time."""
    stages = evidence.stages.stages if evidence.stages else {}
    return [name for name, cost in stages.items() if cost.wall_s]


def in_words(
    verdict: Verdict, settings: FeedSettings, where: str, change: Change | None
) -> Verdict:
    """Returns ``verdict`` with what to try as somebody's own loop has it."""

    def word(found: re.Match[str]) -> str:
        name, value = found.groups()
        if name == "loader.autotune":
            workers = change.arguments["num_workers"] if change else None
            if workers is None:
                return f"other arguments of the DataLoader at {where} (wellfed.tune finds them)"
            name, value = "loader.num_workers", str(workers)
        text = _WORDS.get(name, f"{name}={{}}").format(value)
        if name.startswith("loader."):
            now = getattr(settings, name.removeprefix("loader."), None)
            text += f" in the DataLoader at {where} (now {now})"
        return text

    def told(text: str) -> str:
        return re.sub(r"\b((?:loader|trainer|watch)\.\w+)=(\w+)", word, text)

    next_step = verdict.next_step and told(verdict.next_step)
    return replace(verdict, sentence=told(verdict.sentence), next_step=next_step)
