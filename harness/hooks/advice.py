"""What would feed somebody's loop better, in the words of the loop."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.hooks.loops import Followed
from harness.watch.evidence import Evidence, StallBreakdown
from harness.watch.stages import DECODE, GROUPS, READ
from harness.watch.verdict import Verdict

# our settings, and what somebody's loop has in their place; the value follows "="
_WORDS: Mapping[str, str] = {
    "loader.num_workers": "num_workers={}",
    "loader.prefetch_factor": "prefetch_factor={}",
    "loader.pin_memory": "pin_memory=True and .to(device, non_blocking=True)",
    "loader.batch_size": "batch_size={}",
    "trainer.precision=bf16": "torch.autocast with torch.bfloat16",
    "trainer.precision=fp16": "torch.autocast with torch.float16 and torch.amp.GradScaler",
    "trainer.channels_last": "model.to(memory_format=torch.channels_last)",
    "trainer.compile": "torch.compile(model)",
    "watch.window_steps": "logging less often",
}
# whether it does cannot be seen from outside
_SHARED = "IterableDataset must split its samples by get_worker_info(), or each worker repeats them"


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


def better(verdict: Verdict, evidence: Evidence, followed: Followed) -> Change | None:
    """Returns the loader's arguments by which ``verdict`` has the workers feed the steps.

    None: it asks for no more workers.
    """
    found = StallBreakdown(evidence)
    own = followed.settings
    named = re.fullmatch(r"loader\.num_workers=(\d+)", verdict.next_step or "")
    workers = int(named[1]) if named else 0
    if found.cost is None or not found.rate or workers <= own.num_workers:
        return None
    # a batch that is made is handed over in as long as now
    fed = found.rate / max(1 - found.starved * found.made, 0.001)
    gain = min(found.could(), fed, workers / found.cost.wall_s) / found.rate
    arguments: dict[str, object] = {"num_workers": workers}
    if not own.persistent_workers and followed.passes > 1:
        arguments["persistent_workers"] = True
    if evidence.device == "cuda" and not own.pin_memory:
        arguments["pin_memory"] = True
    note = ""
    stages = evidence.stages.stages if evidence.stages else {}
    if followed.streams:
        note = f"The {_SHARED}"
    elif any(cost.wall_s and name not in GROUPS for name, cost in stages.items()):
        note = (
            "Random transforms draw other numbers: torch seeds the global generators in each "
            "worker. One that an object keeps is copied, and repeats: seed it in worker_init_fn"
        )
    return Change(followed.where, arguments, gain, note)


def offered(evidence: Evidence, followed: Followed) -> str:
    """Returns what this project's decoding would give; empty: next to nothing, or nobody can tell.

    Reads and decodes some images of the data set.
    """
    ceiling = StallBreakdown(evidence).ceiling
    if followed.images is None or evidence.stages is None:
        return ""
    # imports torchvision
    from harness.hooks.faster import trial

    tried = trial(followed.images)
    if tried is None:
        return ""
    wall_s = {name: cost.wall_s for name, cost in evidence.stages.stages.items()}
    done_s = sum(wall_s.get(name, 0.0) for name in (READ, DECODE, *tried.steps))
    left = 1 - done_s / sum(wall_s.values()) * (1 - tried.share)
    gain = min(ceiling, 1 / left)
    if gain < 1.05:
        return ""
    return (
        f"dataset = wellfed.faster(dataset): loading and cutting an image takes {tried.share:.0%} "
        f"of the time, pixels differ by {tried.difference:.2g} of 255: about {gain:.2g}x as fast"
    )


def in_words(verdict: Verdict, followed: Followed) -> Verdict:
    """Returns ``verdict`` with what to try as somebody's own loop has it."""

    def word(found: re.Match[str]) -> str:
        name, value = found.groups()
        if name == "loader.autotune":
            tuned = "" if followed.streams else " (wellfed.tune finds them)"
            return f"other arguments of the DataLoader at {followed.where}{tuned}"
        text = _WORDS.get(found[0]) or _WORDS.get(name, f"{name}={{}}").format(value)
        if name.startswith("loader."):
            now = getattr(followed.settings, name.removeprefix("loader."))
            more = followed.streams and name == "loader.num_workers" and int(value) > now
            condition = f"; the {_SHARED}" if more else ""
            text += f" in the DataLoader at {followed.where} (now {now}{condition})"
        return text

    def told(text: str) -> str:
        return re.sub(r"\b((?:loader|trainer|watch)\.\w+)=(\w+)", word, text)

    next_step = verdict.next_step and told(verdict.next_step)
    return replace(verdict, sentence=told(verdict.sentence), next_step=next_step)
