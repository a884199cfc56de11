"""The run in one object, and its last words on the console."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harness.config import Config, DistName, Mode, walk
from harness.data.cache import PixelCache
from harness.runtime import accelerator, launch
from harness.runtime.distributed import World
from harness.runtime.errors import described
from harness.runtime.folder import LOGGER
from harness.training.engine import Engine
from harness.watch.console import say
from harness.watch.evidence import Evidence
from harness.watch.figures import Spread, Tag, Window, by_name
from harness.watch.goodput import Goodput
from harness.watch.host import environment
from harness.watch.stages import GROUPS, StageTotals
from harness.watch.verdict import Verdict, judge

_log = logging.getLogger(LOGGER)
_HPARAMS = (
    "loader.batch_size",
    "model.name",
    "optim.lr",
    "trainer.precision",
)  # few: the page opens with five columns


class Page(NamedTuple):
    """The page of a run: its address while the run goes on, for whoever starts TensorBoard, and
    what writes it at the end.
    """

    link: str
    write: Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Reporter:
    """Writes ``report.json``, the HParams row and the closing lines of a run.

    Attributes:
        config: the run's settings.
        overridden: what the command line set, such as ``loader.num_workers=2``: each is a column of
            the HParams page.
        tuning: called with the run's figures, gives what tuning did, as plain values; None where
            nothing was tuned.
        cores: what this rank may use.
        page: is written once ``report.json`` is.
        cache: where decoded images are kept, if they are.
    """

    config: Config
    overridden: tuple[str, ...]
    tuning: Callable[[Window], Mapping[str, Any]] | None
    cores: float
    page: Page
    cache: PixelCache | None = None

    @contextmanager
    def reporting(self, engine: Engine) -> Iterator[None]:
        """Report on ``engine`` at the end of the block, however it ends."""
        error: BaseException | None = None
        if self.config.mode is Mode.train and self.config.watch.tensorboard:
            say(f"watch it: tensorboard --logdir {os.path.relpath(_root(engine.place.folder))}")
            _log.info("the charts of a stall, pinned on top in TensorBoard: %s", self.page.link)
        try:
            yield
        except BaseException as caught:
            error = caught
            raise
        finally:
            if (
                engine.watch.board is not None and engine.outcome.status != "idle"
            ):  # the report of what was done stays
                self._report(engine, error)

    def _report(self, engine: Engine, error: BaseException | None) -> None:
        board = engine.watch.board
        outcome = engine.outcome
        assert board is not None
        try:
            report = self.figures(engine)
        except Exception as fault:
            # a device that has failed answers nothing more; how the run ended is not up to its
            # report
            _log.warning("report: no figures: %s: %s", type(fault).__name__, fault)
            report = {
                "status": outcome.status,
                "epochs": engine.state.epoch,
                "steps": engine.state.step,
            }
        if error is not None:
            known = described(error)
            report["error"] = known[0] if known else f"{type(error).__name__}: {error}"
        board.report(report)
        if "verdict" not in report:
            return
        verdict: Verdict = report["verdict"]
        board.text("verdict", [verdict.sentence, *verdict.evidence])
        results = {
            "hparam/top1": outcome.evaluation.top1 if outcome.evaluation else None,
            "hparam/images_per_s": report.get("images_per_s"),
            "hparam/stall_fraction": report.get("stall_fraction"),
            "hparam/goodput": report["goodput"].fraction if "goodput" in report else None,
        }
        board.hparams(self._hparams(engine), results)
        self.page.write(engine.place.folder)
        if outcome.status == "completed":
            self._close(engine, report)
        elif outcome.status == "interrupted" or engine.saves.last:
            self._stand(engine)

    def figures(self, engine: Engine) -> dict[str, Any]:
        """``report.json`` as plain values; what this device cannot give is absent."""
        total = engine.watch.clock.total()
        outcome = engine.outcome
        world = engine.world
        sampled = engine.watch.sampler.means() if engine.watch.sampler else {}
        worked = engine.feed.meter.read() if engine.feed.meter is not None else None
        own = accelerator.of(world.device)
        device = own.name if own.kind == "cuda" else None
        found: dict[str, Any] = {
            "status": outcome.status,
            "epochs": engine.state.epoch,
            "steps": engine.state.step,
            "world_size": world.size,
            "global_batch_size": self.config.loader.batch_size
            * world.size
            * self.config.trainer.accumulate_steps,
            **by_name(total.of_ranks(world.size)),
            "shares": dict(total.shares) or None,
            "wait_parts": dict(total.wait_parts) or None,
            "host_parts_s": dict(total.host_parts_s) or None,
            "stall_basis": total.stall_basis,
            "gpu_utilization": sampled.get(Tag.GPU_UTILIZATION),
            "gpu_memory": engine.memory.peaks,
            "skipped_updates": outcome.skipped,
            "sampled": sampled or None,
            "ranks": outcome.ranks or None,
            "pauses_s": dict(total.pauses_s),
            "goodput": engine.watch.course.goodput(total),
            "turns_ms": [
                {"val": val_ms, "train": train_ms} for val_ms, train_ms in outcome.turns_ms
            ]
            or None,
            "loader": engine.feed.settings,
            "tuning": self.tuning and self.tuning(total),
            "cache": self.cache.stats() if self.cache is not None else None,
            "verdict": judge(self._evidence(engine, total, worked, sampled)),
            "environment": environment(device),
            "run": {"name": engine.place.folder.name, "overrides": list(self.overridden)},
        }
        if worked is not None and worked.samples:
            found |= _workers(worked, engine.worker_s)
        if outcome.evaluation is not None:
            evaluation = outcome.evaluation
            found |= {"top1": evaluation.top1, "top5": evaluation.top5, "loss": evaluation.loss}
            found |= {"val_images": evaluation.images, "best_top1": engine.state.best_top1}
        return {key: value for key, value in found.items() if value is not None}

    def _evidence(
        self,
        engine: Engine,
        total: Window,
        worked: StageTotals | None,
        sampled: Mapping[str, float],
    ) -> Evidence:
        trainer = self.config.trainer
        return Evidence(
            window=total,
            stages=worked,
            settings=engine.feed.settings,
            cores=self.cores,
            device=accelerator.of(engine.world.device).kind,
            sampled=sampled,
            autotuned=self.tuning is not None,
            ranks=engine.outcome.ranks,
            precision=trainer.precision.name,
            compiled=trainer.compile,
            channels_last=trainer.channels_last,
            window_steps=self.config.watch.window_steps,
        )

    def _hparams(self, engine: Engine) -> dict[str, Any]:
        values = {path: value for path, value, _ in walk(self.config)}
        named = [override.lstrip("+").partition("=")[0] for override in self.overridden]
        chosen = {key: values[key] for key in (*_HPARAMS, *named) if key in values}
        used = engine.feed.settings
        return chosen | {
            "used.num_workers": used.num_workers,
            "used.pin_memory": used.pin_memory,
            "used.prefetch_factor": used.prefetch_factor,
        }

    def _close(self, engine: Engine, report: Mapping[str, Any]) -> None:
        folder = engine.place.folder
        say("")
        if "top1" in report:
            say(f"top-1          {report['top1']:.4f} on {report['val_images']} validation images")
        if "step_ms" in report:
            say(
                f"speed          {report['images_per_s']:.0f} images/s while training, "
                f"{_spread(report['step_ms'])} a step"
            )
            say(f"data wait      {report['data_wait_fraction']:.1%} of the training time")
        if "goodput" in report:
            say(f"goodput        {_goodput(report['goodput'])}")
        if "gpu_memory" in report:
            say(f"memory         {report['gpu_memory']}")
        if self.config.mode is Mode.train:
            say(f"loader         {engine.feed.settings}{_tuned(report.get('tuning'))}")
            if settled := report.get("tuning", {}).get("settled"):
                say(f"next time      {settled}")
            say(f"verdict        {report['verdict'].sentence}", stands_out=True)
        if self.cache is not None:
            say(f"cache          {self.cache.summary()}")
        say(f"run folder     {os.path.relpath(folder)}")
        page = os.path.relpath(folder / "report.html")
        root = os.path.relpath(_root(folder))
        say(f"look at it     {page}, or tensorboard --logdir {root}")

    def _stand(self, engine: Engine) -> None:
        """Say where a run stands that ended too early, and the command that goes on with it."""
        state = engine.state
        folder = os.path.relpath(engine.place.folder)
        amid = (
            f" and {state.samples} of {engine.order.stop(state.epoch)} images of the next"
            if state.samples
            else ""
        )
        say(
            f"stopped after step {state.step}: {state.epoch} of {self.config.trainer.epochs} "
            f"epochs{amid}"
        )
        if saved := engine.saves.last:
            say(f"saved          {os.path.relpath(saved)}")
            say(f"go on with     {_command(self.config, self.overridden, folder, engine.world)}")
        elif not self.config.checkpoint.enabled:
            say("nothing was saved: checkpoint.enabled=false")
        elif engine.saves.unsaved:
            say("nothing was saved: an update was under way, or the disk refused")
        else:
            say("nothing was saved: no step was made since the start")


def _command(config: Config, overridden: tuple[str, ...], folder: str, world: World) -> str:
    """The command line that goes on with the run in ``folder``."""
    named = config.run.name is not None and Path(folder) == Path("outputs", config.run.name)
    left_out = {"resume"} if named else {"resume", "run.name"}
    kept = [text for text in overridden if text.lstrip("+").partition("=")[0] not in left_out]
    ranks = None
    if config.dist.name is DistName.torchrun:
        ranks = f"--nproc-per-node={world.local_size}" if world.size == world.local_size else "..."
    return shlex.join(
        [*launch.command(ranks), *kept, "resume=auto" if named else f"resume={folder}"]
    )


def _tuned(tuning: Mapping[str, Any] | None) -> str:
    """What tuning took, and what it gained."""
    if tuning is None:
        return ""
    told = "remembered" if tuning["reused"] else f"tuned in {tuning['seconds']:.0f} s"
    if (gained_s := tuning.get("gained_s", 0.0)) >= 1:
        told += f", saved about {gained_s:.0f} s of training"
    return f" ({told})"


def _spread(spread: Spread) -> str:
    return f"{spread.median:.1f} ms (p95 {spread.p95:.1f}, max {spread.max:.1f})"


def _goodput(goodput: Goodput) -> str:
    """The share of the wall time that went to training steps, and the three largest parts of the
    rest.
    """
    rest = ", ".join(f"{part.name.replace('_', ' ')} {part.s:.1f} s" for part in goodput.rest[:3])
    return f"{goodput.fraction:.0%} of {goodput.wall_s:.1f} s in training steps; {rest}"


def _workers(worked: StageTotals, worker_s: float) -> dict[str, Any]:
    """What the training feed's workers did in the whole run, by stage, in so many seconds of them
    together.
    """
    each = [
        {
            "name": name,
            "group": GROUPS.get(name, "augment"),
            "wall_ms": 1e3 * cost.wall_s / worked.samples,
            "cpu_ms": 1e3 * cost.cpu_s / worked.samples,
        }
        for name, cost in worked.stages.items()
    ]
    busy = min(1.0, worked.busy_s / worker_s) if worker_s > 0 else None
    return {"stages": each, "workers": {"samples": worked.samples, "busy_fraction": busy}}


def _root(folder: Path) -> Path:
    """The folder that holds this run and its neighbours, whose names TensorBoard then shows."""
    parts = Path(os.path.relpath(folder)).parts
    return Path(parts[0]) if len(parts) > 1 and parts[0] in ("outputs", "multirun") else folder
