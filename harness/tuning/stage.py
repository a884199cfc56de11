"""Tuning as a stage of a run: recalled where such a run was tuned before, measured where not, and checked while training."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from harness.config import Config
from harness.data.identity import identity
from harness.feed.forms import Feeds
from harness.feed.interface import FeedSettings
from harness.runtime.distributed import World
from harness.runtime.limits import Limits
from harness.tuning import capacity
from harness.tuning.figures import Trainee
from harness.tuning.follow import Follow
from harness.tuning.memory import Memory, fingerprint
from harness.tuning.report import TuningReport
from harness.tuning.tuner import tune
from harness.watch.console import say


@dataclass(frozen=True, slots=True)
class Tuned:
    """What the stage found, and what checks it over the first training steps."""

    report: TuningReport
    follow: Follow


def tuned(feeds: Feeds, trainee: Trainee, config: Config, limits: Limits, world: World) -> Tuned:
    """The settings for this run's feeds, the same on every rank.

    One of several runs alike tunes, the others wait for its answer. ``tuner.fresh=true`` forgets what was found before.

    Raises:
        BadSample: a sample cannot be read.
    """
    begin = time.perf_counter()
    own = feeds.settings(limits)
    memory = Memory(_fingerprint(feeds, config, limits, world)) if world.is_main else None
    with memory.held() if memory else nullcontext():
        if memory and config.tuner.fresh:
            memory.forget()
        report = _recalled(world.agreed(memory.recall() if memory else None), own)
        if report is not None and world.smallest(_fits(report, feeds, limits)) > 0:
            report = dataclasses.replace(report, seconds=time.perf_counter() - begin)
        else:
            report = tune(feeds, trainee, own, config.tuner, limits, world)
            if memory and report.after.images_per_s is not None:
                memory.keep({"report": report.to_plain(), "at": time.strftime("%Y-%m-%d %H:%M")})
    return Tuned(report, Follow(report, _forgetting(memory if report.reused else None)))


def _fingerprint(feeds: Feeds, config: Config, limits: Limits, world: World) -> dict[str, Any]:
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type
    return fingerprint(config, identity(feeds.splits), limits, world.size, world.local_size, device)


def _recalled(answer: dict[str, Any] | None, own: FeedSettings) -> TuningReport | None:
    """The remembered report, with the settings that are never tuned taken from ``own``; None where there is none to use."""
    try:
        if answer is None:
            return None
        report, at = TuningReport.from_plain(answer["report"]), str(answer["at"])
    except (KeyError, TypeError, ValueError):
        return None
    notes = (f"found by a run of {at}; tuner.fresh=true tunes anew", *report.notes)
    settings, val = (dataclasses.replace(s, timeout_s=own.timeout_s) for s in (report.settings, report.val))
    return dataclasses.replace(report, settings=settings, val=val, notes=notes, reused=True)


def _fits(report: TuningReport, feeds: Feeds, limits: Limits) -> bool:
    """Whether the remembered settings fit into what is free today."""
    return capacity.refusal(report.settings, feeds.batch_bytes(report.settings), 0, limits) is None


def _forgetting(memory: Memory | None) -> Callable[[], None] | None:
    if memory is None:
        return None

    def forget() -> None:
        memory.forget()
        say("the remembered answer is forgotten; the next run tunes anew")

    return forget
