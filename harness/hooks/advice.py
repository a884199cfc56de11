"""What would feed somebody's loop better, in the words of the loop."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from harness.hooks.loops import Followed
from harness.watch.stages import GROUPS
from harness.watch.verdict import Change, Verdict

# our settings, some with their value, and what somebody's loop has in their place
_WORDS: Mapping[str, str] = {
    "loader.num_workers": "num_workers={}",
    "loader.prefetch_factor": "prefetch_factor={}",
    "loader.pin_memory": "pin_memory={} and .to(device, non_blocking=True)",
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
class LoaderCall:
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


def better(verdict: Verdict, followed: Followed) -> LoaderCall | None:
    """Returns the loader's arguments by which ``verdict`` has the workers feed the steps.

    None: it asks for no more workers.
    """
    found = verdict.shares
    own = followed.settings
    workers = int(verdict.change.get("loader.num_workers", 0))
    if found.cost is None or not found.rate or workers <= own.num_workers:
        return None
    # a batch that is made is handed over in as long as now
    fed = found.rate / max(1 - found.starved * found.made, 0.001)
    gain = min(found.could(), fed, workers / found.cost.wall_s) / found.rate
    arguments: dict[str, object] = {"num_workers": workers}
    if not own.persistent_workers and followed.passes > 1:
        arguments["persistent_workers"] = True
    if found.device == "cuda" and not own.pin_memory:
        arguments["pin_memory"] = True
    note = ""
    stages = found.stages.stages if found.stages else {}
    if followed.streams:
        note = f"The {_SHARED}"
    elif any(cost.wall_s and name not in GROUPS for name, cost in stages.items()):
        note = (
            "Random transforms draw other numbers: torch seeds the global generators in each "
            "worker. One that an object keeps is copied, and repeats: seed it in worker_init_fn"
        )
    return LoaderCall(followed.where, arguments, gain, note)


def offered(followed: Followed) -> str:
    """Returns the line that puts this project's decoding in; empty: it cannot serve the loader."""
    if followed.images is None:
        return ""
    # imports torchvision
    from harness.hooks.faster import faster

    with suppress(ValueError, AttributeError):
        faster(followed.images)
        return "dataset = wellfed.faster(dataset): decodes, cuts, resizes and mirrors in one go"
    return ""


def in_script(change: Change, followed: Followed) -> str:
    """Returns the settings of ``change`` as somebody's own loop has them."""
    return ", ".join(_in_script(name, value, followed) for name, value in change.items())


def _in_script(name: str, value: int | bool | str, followed: Followed) -> str:
    room, _, argument = name.partition(".")
    if argument == "autotune":
        tuned = "" if followed.streams else " (wellfed.tune finds them)"
        return f"other arguments of the DataLoader at {followed.where}{tuned}"
    text = _WORDS.get(f"{name}={value}") or _WORDS[name].format(value)
    if room != "loader":
        return text
    now = getattr(followed.settings, argument)
    more = followed.streams and argument == "num_workers" and int(value) > now
    condition = f"; the {_SHARED}" if more else ""
    return f"{text} in the DataLoader at {followed.where} (now {now}{condition})"
