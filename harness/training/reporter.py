"""The run in one object, and its last words on the console."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.config import Config, Mode, shown, walk
from harness.data.datasets import Splits
from harness.runtime import accelerator, launch
from harness.runtime.distributed import again
from harness.runtime.errors import described, words
from harness.runtime.folder import log
from harness.training import pictures
from harness.training.checkpoint import Record, records
from harness.training.engine import Engine
from harness.watch.board import BAD_SAMPLES
from harness.watch.console import say
from harness.watch.evidence import Evidence
from harness.watch.figures import Tag, told
from harness.watch.host import environment
from harness.watch.stages import StageTotals
from harness.watch.verdict import Verdict, judge


@dataclass(frozen=True, slots=True)
class Reporter:
    """Writes ``report.json``, the HParams row and the closing lines of a run.

    Attributes:
        config: the run's settings.
        overridden: what the command line set, as in ``loader.num_workers=2``: each is a column of
            the HParams page.
        tuning: called at the end, gives what tuning did, as plain values; None: nothing was tuned.
        cores: what this rank may use.
        write_page: writes the page of a run's folder, once ``report.json`` is there.
        splits: the data set, of which the surest mistakes are shown.
    """

    config: Config
    overridden: tuple[str, ...]
    tuning: Callable[[], Mapping[str, Any]] | None
    cores: float
    write_page: Callable[[Path], object]
    splits: Splits | None = None

    @contextmanager
    def reporting(self, engine: Engine) -> Iterator[None]:
        """Reports on ``engine`` at the end of the block, however it ends."""
        if self.config.mode is Mode.train:
            if self.splits is not None and (told := pictures.told(self.splits)):
                say(told)
            if self.config.watch.tensorboard:
                say(f"watch it: tensorboard --logdir {_root(engine.place.folder)}")
        try:
            yield
        except BaseException as error:
            known = described(error)
            text = known[0] if known else f"{type(error).__name__}: {words(error)}"
            self._report(engine, {"error": text})
            raise
        self._report(engine, {})

    def _report(self, engine: Engine, ending: Mapping[str, str]) -> None:
        board = engine.watch.board
        # the report of what was done stays
        if board is None or engine.status == "idle":
            return
        try:
            report = self.figures(engine)
        except Exception as fault:
            # a device that has failed answers nothing more; how the run ended is not up to its
            # report
            log.warning("report: no figures: %s: %s", type(fault).__name__, fault)
            board.report({**_progress(engine), **ending})
            return
        board.report({**report, **ending})
        verdict: Verdict = report["verdict"]
        board.text("verdict", [verdict.sentence, *verdict.evidence])

        # few, for the page opens with five columns
        columns = ["loader.batch_size", "model.name", "optim.lr", "trainer.precision"]
        columns += map(launch.setting, self.overridden)
        values = {
            path: shown(value) if isinstance(value, str) else value
            for path, value, _ in walk(self.config)
        }
        row = {name: values[name] for name in columns if name in values}
        for name in ("num_workers", "pin_memory", "prefetch_factor"):
            row[f"used.{name}"] = getattr(engine.feed.settings, name)
        told = ("top1", "images_per_s", "stall_fraction")
        results = {f"hparam/{name}": report.get(name) for name in told}
        goodput = report.get("goodput")
        board.hparams(row, results | {"hparam/goodput": goodput and goodput.fraction})

        if engine.answers is not None and self.splits is not None:
            # a run that is asked to end reads no more images
            read = engine.status == "completed"
            try:
                pictures.show(engine.answers, self.splits, board, read=read)
            except Exception as error:
                log.warning("mistakes.json: %s: %s", type(error).__name__, words(error))
        self.write_page(engine.place.folder)
        if engine.status == "completed":
            self._close(engine, report)
            if engine.stopped is None or engine.state.is_done(self.config.trainer):
                return
        saved = records(engine.place.folder / "checkpoints")
        if saved or engine.status == "interrupted":
            self._stand(engine, saved)

    def figures(self, engine: Engine) -> dict[str, Any]:
        """Returns ``report.json`` as plain values; what this device cannot give is absent."""
        total = engine.watch.clock.total()
        world = engine.world
        trainer = self.config.trainer
        settings = engine.feed.settings
        cache = self.splits and self.splits.cache
        sampled: Mapping[str, float] = {}
        if engine.watch.sampler is not None:
            sampled = engine.watch.sampler.means()
        worked = None
        if engine.feed.meter is not None:
            worked = engine.feed.meter.read()
        images = self.config.loader.batch_size * world.size * trainer.accumulate_steps
        own = accelerator.of(world.device)
        evidence = Evidence(
            window=total,
            stages=worked,
            settings=settings,
            cores=self.cores,
            device=own.kind,
            sampled=sampled,
            autotuned=self.tuning is not None,
            ranks=engine.ranks,
            precision=trainer.precision.name,
            compiled=trainer.compile,
            channels_last=trainer.channels_last,
            half_precision=own.half_precision,
            window_steps=self.config.watch.window_steps,
        )
        found: dict[str, Any] = {
            **_progress(engine),
            "world_size": world.size,
            "global_batch_size": images,
            **told(total, world.size),
            "gpu_utilization": sampled.get(Tag.GPU_UTILIZATION),
            "gpu_memory": engine.memory.peaks,
            "skipped_updates": engine.skipped,
            "bad_samples": len(engine.replaced) or None,
            "sampled": sampled or None,
            "ranks": engine.ranks or None,
            "goodput": engine.watch.course.goodput(total),
            "stopped": engine.stopped,
            "loader": settings,
            "tuning": self.tuning and self.tuning(),
            "cache": cache and cache.stats(),
            "verdict": judge(evidence),
            "environment": environment(own.name if own.kind == "cuda" else None),
            "run": {"name": engine.place.folder.name, "overrides": list(self.overridden)},
        }
        if worked is not None and worked.samples:
            found |= _workers(worked, engine.worker_s)
        if engine.evaluation is not None:
            result = asdict(engine.evaluation)
            found |= {"val_images": result.pop("images"), **result}
            found["evaluated"] = self.splits.val_name if self.splits else "images"
            found["best_top1"] = engine.state.best_top1
        return {key: value for key, value in found.items() if value is not None}

    def _close(self, engine: Engine, report: Mapping[str, Any]) -> None:
        """Says how a completed run went."""
        folder = engine.place.folder
        say("")
        if "top1" in report:
            images = f"{report['val_images']} {report['evaluated']}"
            say(f"top-1          {report['top1']:.4f} on {images}")
            if len(engine.place.classes) > 5:
                say(f"top-5          {report['top5']:.4f}")
        if "step_ms" in report:
            step = report["step_ms"]
            say(
                f"speed          {report['images_per_s']:.0f} images/s while training, "
                f"{step.median:.1f} ms (p95 {step.p95:.1f}, max {step.max:.1f}) a step"
            )
            say(f"data wait      {report['data_wait_fraction']:.1%} of the training time")
        if goodput := report.get("goodput"):
            rest = [f"{part.name.replace('_', ' ')} {part.s:.1f} s" for part in goodput.rest[:3]]
            say(
                f"goodput        {goodput.fraction:.0%} of {goodput.wall_s:.1f} s in training "
                f"steps; {', '.join(rest)}"
            )
        if "gpu_memory" in report:
            say(f"memory         {report['gpu_memory']}")
        if self.config.mode is Mode.train:
            tuning = report.get("tuning", {})
            tuned = ""
            if tuning:
                tuned = "remembered" if tuning["reused"] else f"tuned in {tuning['seconds']:.0f} s"
                tuned = f" ({tuned})"
            say(f"loader         {engine.feed.settings}{tuned}")
            if settled := tuning.get("settled"):
                say(f"next time      {settled}")
            say(f"verdict        {report['verdict'].sentence}", stands_out=True)
        if engine.stopped:
            say(f"stopped        {engine.stopped}")
        if bad := report.get("bad_samples"):
            say(f"bad samples    {bad} replaced by others; they are listed in {BAD_SAMPLES}")
        if self.splits is not None and self.splits.cache is not None:
            say(f"cache          {self.splits.cache.summary()}")
        say(f"run folder     {os.path.relpath(folder)}")
        page = os.path.relpath(folder / "report.html")
        say(f"look at it     {page}, or tensorboard --logdir {_root(folder)}")

    def _stand(self, engine: Engine, saved: Sequence[Record]) -> None:
        """Says where an unfinished run stands, and the command that goes on with it."""
        state = engine.state
        config = self.config
        folder = os.path.relpath(engine.place.folder)
        within = ""
        if state.samples:
            images = engine.order.stop(state.epoch)
            within = f", and {state.samples} of {images} images of the next"
        epochs = config.trainer.epochs
        say(f"stopped after step {state.step}; epochs done: {state.epoch} of {epochs}{within}")
        if not saved:
            why = "no step was made since the start, one was under way, or the disk refused"
            if not config.checkpoint.enabled:
                why = "checkpoint.enabled=false"
            say(f"nothing was saved: {why}")
            return
        # a run that has a name finds its checkpoints by itself
        resume = f"resume={folder}"
        without = ["run.name"]
        if config.run.name is not None and Path(folder) == Path("outputs", config.run.name):
            resume = "resume=auto"
            without = []
        say(f"saved          {os.path.relpath(saved[-1].path)}")
        say(f"go on with     {again(config, engine.world, self.overridden, [resume], *without)}")


def _progress(engine: Engine) -> dict[str, Any]:
    """Returns how far the run came."""
    state = engine.state
    return {"status": engine.status, "epochs": state.epoch, "steps": state.step}


def _workers(worked: StageTotals, worker_s: float) -> dict[str, Any]:
    """Returns what the training feed's workers did, by stage, in ``worker_s`` seconds of theirs."""
    workers: dict[str, float] = {"samples": worked.samples}
    if worker_s:
        workers["busy_fraction"] = min(1.0, worked.busy_s / worker_s)
    return {"stages": worked.rows(), "workers": workers}


def _root(folder: Path) -> str:
    """Returns the folder of this run and its neighbours, whose names TensorBoard then shows."""
    path = os.path.relpath(folder)
    parts = Path(path).parts
    # the current folder has no parts
    if len(parts) > 1 and parts[0] in ("outputs", "multirun"):
        return parts[0]
    return path
