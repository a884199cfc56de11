"""What a diagnosis tells: the runs, the stages, what changes would give, one sentence, and one line
to paste.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config import Config, DistName, Precision
from harness.diagnose.runs import Runs
from harness.diagnose.whatif import NO_CEILING, Bound, Facts, WhatIf, rate_in_words
from harness.feed.interface import FeedSettings
from harness.runtime import launch
from harness.runtime.files import write_whole
from harness.runtime.folder import LOGGER
from harness.watch.board import Board, plain
from harness.watch.bottleneck import Bottleneck, headline
from harness.watch.console import aligned, say
from harness.watch.stages import AUGMENT, GROUPS, StageTotals

_log = logging.getLogger(LOGGER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What bounds training, and what would change it.

    Attributes:
        bottleneck: the class, as in a run's verdict.
        ceiling: speed-up if loading were free; None where the rates are too uneven, or other
            programs' too.
        measured: whether the ceiling rests on real steps; else what they get is reckoned.
        sentence: the outcome in words.
        command: what to type next.
        settings: the loader's.
        runs: what was measured.
        what_ifs: what changes would give, by arithmetic.
        notes: what was not measured, and why.
        seconds: what the diagnosis took.
    """

    bottleneck: Bottleneck
    ceiling: float | None
    measured: bool
    sentence: str
    command: str
    settings: FeedSettings
    runs: Runs
    what_ifs: tuple[WhatIf, ...]
    notes: tuple[str, ...]
    seconds: float

    def publish(self, folder: Path | None, board: Board | None) -> None:
        """Print it; write ``diagnosis.json`` into ``folder`` and a text to ``board``, where there
        are such.
        """
        lines = self.lines()
        for line in lines:
            say(line)
        if folder is not None:
            path = folder / "diagnosis.json"
            try:
                write_whole(
                    path, (json.dumps(self.to_plain(), indent=1, allow_nan=False) + "\n").encode()
                )
            except OSError as error:
                _log.warning("%s: %s; it is printed above", path, error.strerror or error)
        if board is not None:
            board.text("diagnosis", lines)

    def lines(self) -> list[str]:
        """The stages of a sample, what changes would give, the sentence, and what to type next."""
        found: list[str] = []
        if self.runs.stages is not None:
            rows = [
                (s["name"], s["group"], f"{s['wall_ms']:.3g}", f"{s['cpu_ms']:.3g}")
                for s in stage_rows(self.runs.stages)
            ]
            found.append("a sample in a worker, files as they are")
            found += aligned(("stage", "kind", "ms", "of it on a processor"), rows)
        if self.what_ifs:
            changes = [
                (w.change, rate_in_words(w.images_per_s), f"{w.speedup:.2f}x")
                for w in self.what_ifs
            ]
            found.append("what if (arithmetic from the figures above)")
            found += aligned(("", "images/s", "speed-up"), changes)
        return [
            *found,
            *(f"note: {note}" for note in self.notes),
            self.sentence,
            "next:",
            self.command,
        ]

    def to_plain(self) -> dict[str, Any]:
        """Everything as JSON can hold it, without what is not known."""
        whole = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        whole["stages"] = stage_rows(self.runs.stages) if self.runs.stages else None
        found: dict[str, Any] = plain(
            {name: value for name, value in whole.items() if value is not None}
        )
        return found


def stage_rows(totals: StageTotals) -> list[dict[str, Any]]:
    """Each stage as ``report.json`` has it: name, group, and milliseconds a sample by the wall
    clock and on a processor.
    """
    return [
        {
            "name": name,
            "group": GROUPS.get(name, AUGMENT),
            "wall_ms": cost.wall_s / totals.samples * 1e3,
            "cpu_ms": cost.cpu_s / totals.samples * 1e3,
        }
        for name, cost in totals.stages.items()
    ]


def sentence(facts: Facts, found: Bound) -> str:
    """The outcome: the class, why, both rates, and what faster loading gives at most."""
    if found.bottleneck in NO_CEILING:
        gets = f" and gets {facts.delivered}" if facts.delivered else ""
        rates = f"The step could take {facts.demand} images/s{gets}."
        return (
            f"{headline(found.bottleneck, None, 0.0)} {found.words}. {rates} Try again when "
            "the machine is quiet."
        )
    takes = rate_in_words(facts.demand.images_per_s)
    gets = rate_in_words(facts.got)
    how = "gets" if facts.is_measured else "would get by arithmetic"
    parts = [
        headline(found.bottleneck, 1 - facts.lost, facts.lost),
        f"{found.words}.",
        f"The step could take {takes} images/s and {how} {gets}.",
        f"Faster loading gives at most {facts.ceiling:.2f}x.",
    ]
    if facts.fetch_per_s is not None and facts.fetch_per_s < facts.got:
        parts.append(
            f"Files that come cold from storage arrive at {rate_in_words(facts.fetch_per_s)} a "
            "second."
        )
    return " ".join(parts)


def command(
    config: Config, overridden: Sequence[str], bottleneck: Bottleneck, device: str, ranks: int
) -> str:
    """What to type next: the user's own overrides, flags such as ``--config-name=x`` among them,
    and what would help most.
    """
    trainer = config.trainer
    more: list[str] = []
    if bottleneck in NO_CEILING:
        more.append("mode=diagnose")
    elif bottleneck not in ("compute", "balanced"):
        more.append("loader.autotune=true")
    elif device == "cuda":
        more += ["trainer.precision=bf16"] if trainer.precision is Precision.fp32 else []
        more += ["trainer.channels_last=true"] if not trainer.channels_last else []
    replaced = {"mode", *map(_setting, more)}
    kept = [word for word in overridden if _setting(word) not in replaced]
    by_torchrun = f"--nproc-per-node={ranks}" if config.dist.name is DistName.torchrun else None
    return shlex.join([*launch.command(by_torchrun), *kept, *more])


def _setting(override: str) -> str:
    """What an override sets, without Hydra's signs for adding and deleting; a flag such as
    ``--config-name=x`` sets nothing.
    """
    return override.partition("=")[0].lstrip("+~")
