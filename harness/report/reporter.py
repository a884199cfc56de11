"""Writes a run's report at its end, and prints the closing lines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..clock.figures import as_report
from ..config import Mode, shown, walk
from ..data import libraries, shrink
from ..data.datasets import Splits
from ..monitor.console import say
from ..monitor.writer import BAD_SAMPLES, RunWriter
from ..runtime import accelerator, launch
from ..runtime.distributed import resume_command
from ..runtime.errors import described, listed, words
from ..runtime.folder import log
from ..suggestions import override, shell_word
from ..training.checkpoint_read import Record, records
from ..training.engine import Engine
from . import mistakes
from .evidence import Evidence
from .page.document import write_report
from .run_report import closing, report, sized
from .statement import Statement, stated
from .verdict import judge


@dataclass(frozen=True, slots=True)
class Reporter:
    """Writes ``report.json``, the HParams row and the closing lines of a run.

    Attributes:
        overridden: overrides such as ``loader.num_workers=2``; each is a column of the HParams
            page.
        tuning: called at the end; returns a summary of tuning as plain values; None without tuning.
        cores: cores available to this rank.
        splits: the dataset whose most confident mistakes are shown.
    """

    overridden: tuple[str, ...]
    tuning: Callable[[], Mapping[str, Any]] | None
    cores: float
    splits: Splits

    @contextmanager
    def reporting(self, engine: Engine) -> Iterator[None]:
        """Reports on ``engine`` at the end of the block, however it ends."""
        if engine.config.mode is Mode.train:
            if told := mistakes.class_counts(self.splits, engine.config):
                say(told)
            if engine.config.watch.tensorboard:
                say(f"watch it: tensorboard --logdir {_root(engine.folder)}")
        try:
            yield
        except BaseException as error:
            known = described(error)
            text = known[0] if known else f"{type(error).__name__}: {words(error)}"
            self._report(engine, {"error": text})
            raise
        self._report(engine, {})

    def _report(self, engine: Engine, ending: Mapping[str, str]) -> None:
        writer = engine.monitor.writer
        # an earlier report is kept
        if writer is None or engine.status == "idle":
            return
        # first without the device, which may have failed
        writer.report({**_progress(engine), **ending})
        try:
            self._publish(engine, writer, ending)
        except Exception as error:
            # a failing report must not change how the run ends
            log.warning("report.json: %s: %s", type(error).__name__, words(error))

    def _publish(self, engine: Engine, writer: RunWriter, ending: Mapping[str, str]) -> None:
        """Writes the whole report and prints the closing lines."""
        found = self.figures(engine)
        writer.report({**found, **ending})
        verdict: Statement = found["verdict"]
        writer.text("verdict", [verdict.sentence, *verdict.evidence])

        # only a few, because the page opens with five columns
        columns = ["loader.batch_size", "model.name", "optim.lr", "trainer.precision"]
        columns += map(launch.setting, self.overridden)
        values = {
            path: shown(value) if isinstance(value, str | dict) else value
            for path, value, _ in walk(engine.config)
        }
        row = {name: values[name] for name in columns if name in values}
        for name in ("num_workers", "pin_memory", "prefetch_factor"):
            row[f"used.{name}"] = getattr(engine.feed.settings, name)
        told = ("top1", "images_per_s", "stall_fraction")
        results = {f"hparam/{name}": found.get(name) for name in told}
        goodput = found.get("goodput")
        writer.hparams(row, results | {"hparam/goodput": goodput and goodput["fraction"]})

        if engine.answers is not None:
            # an interrupted run reads no more images
            read = engine.status == "completed"
            mistakes.show(engine.answers, self.splits, engine.config, writer, read=read)
        write_report(engine.folder)
        if engine.status == "completed":
            self._close(engine, found)
            if engine.stopped is None or engine.is_done:
                return
        saved = records(engine.folder / "checkpoints")
        if saved or engine.status == "interrupted":
            self._stand(engine, saved)

    def figures(self, engine: Engine) -> dict[str, Any]:
        """Returns ``report.json`` as plain values, without those unavailable on this device."""
        total = engine.monitor.clock.total()
        world = engine.world
        config = engine.config
        trainer = config.trainer
        cache = self.splits.cache
        own = accelerator.get(world.device)
        by_size = [
            Evidence(
                **part,
                cores=self.cores,
                device=own.kind,
                sampled=engine.monitor.sampler.means() if engine.monitor.sampler else {},
                autotuned=self.tuning is not None,
                ranks=engine.ranks,
                trainer=trainer,
                half_precision=own.half_precision,
                window_steps=config.watch.window_steps,
            )
            for part in (*engine.parts, engine.part())
        ]
        # the size at which training waited longest for data
        evidence = max(by_size, key=lambda part: part.stall * part.window.elapsed_s)
        verdict = judge(evidence)
        # an interrupted run reads no more images
        if verdict.kind == "decode" and engine.status == "completed":
            evidence.shrinks = shrink.speedup(self.splits.train)
        copied = shrink.Copy.at(Path(self.splits.root).expanduser()) if self.splits.root else None
        evaluated = {}
        if engine.evaluation is not None:
            result = engine.evaluation._asdict()
            evaluated = {"val_images": result.pop("images"), **result}
            evaluated["evaluated"] = self.splits.val_name
            evaluated["best_top1"] = engine.state.best_top1
        folds = {} if config.data.fold is None else {"folds": config.data.folds}
        return report(
            evidence,
            stated(verdict),
            world.size,
            None if own.is_host else own.name,
            # it covers the feeds for all sizes
            0.0 if engine.parts else engine.worker_s,
            **_progress(engine),
            **as_report(total, world.size),
            sizes=[sized(each, world.size) for each in by_size] if evidence.size else None,
            global_batch_size=config.loader.batch_size * world.size * trainer.accumulate_steps,
            gpu_memory=engine.memory.peaks,
            skipped_updates=engine.skipped,
            bad_samples=len(engine.replaced) or None,
            goodput=engine.monitor.timer.goodput(total),
            stopped=engine.stopped,
            tuning=self.tuning and self.tuning(),
            cache=cache and cache.stats(),
            copy_of=copied and asdict(copied),
            decoded_without_pillow=libraries.in_use(),
            store=self.splits.fetched,
            run={"name": engine.folder.name, "overrides": list(self.overridden), **folds},
            **evaluated,
        )

    def _close(self, engine: Engine, found: Mapping[str, Any]) -> None:
        """Prints the results of a completed run."""
        folder = engine.folder
        say("")
        if "top1" in found:
            images = f"{found['val_images']} {found['evaluated']}"
            say(f"top-1          {found['top1']:.4f} on {images}")
            if len(engine.classes) > 5:
                say(f"top-5          {found['top5']:.4f}")
            if missed := mistakes.missed(engine.answers, engine.classes):
                say(f"recall 0       {listed(missed)}")
        for line in closing(found, "images"):
            say(line)
        if "gpu_memory" in found:
            say(f"memory         {found['gpu_memory']}")
        if engine.config.mode is Mode.train:
            tuning = found.get("tuning", {})
            tuned = ""
            if tuning:
                tuned = "remembered" if tuning["reused"] else f"tuned in {tuning['seconds']:.0f} s"
                tuned = f" ({tuned}{'' if tuning['complete'] else ', out of time'})"
            say(f"loader         {engine.feed.settings}{tuned}")
            if settled := tuning.get("settled"):
                say(f"next time      {settled}")
            say(f"verdict        {found['verdict'].sentence}", stands_out=True)
        if engine.stopped:
            say(f"stopped        {engine.stopped}")
        if bad := found.get("bad_samples"):
            say(f"bad samples    {bad} replaced by others, listed in {BAD_SAMPLES}")
        if self.splits.cache is not None:
            say(f"cache          {self.splits.cache.summary()}")
        if "copy_of" in found:
            copied = shrink.Copy(**found["copy_of"])
            say(f"data           {self.splits.root} is {copied}")
        say(f"run folder     {os.path.relpath(folder)}")
        page = os.path.relpath(folder / "report.html")
        say(f"look at it     {page}, or tensorboard --logdir {_root(folder)}")

    def _stand(self, engine: Engine, saved: Sequence[Record]) -> None:
        """Prints the progress of an unfinished run and the command that resumes it."""
        state = engine.state
        config = engine.config
        folder = os.path.relpath(engine.folder)
        within = ""
        if state.samples:
            images = engine.order.taken(state.epoch)
            within = f", and {state.samples} of {images} images in the next"
        epochs = config.trainer.epochs
        say(f"stopped after step {state.step}; epochs done: {state.epoch} of {epochs}{within}")
        if not saved:
            why = "no step has finished, one was underway, or writing failed"

            if not config.checkpoint.enabled:
                why = "checkpoint.enabled=false"
            say(f"nothing was saved: {why}")
            return
        resume = override("resume", folder)
        without = ["run.name"]
        # a named run finds its own checkpoints
        if config.run.name is not None and Path(folder) == Path("outputs", config.run.name):
            resume = "resume=auto"
            without = []
        say(f"saved          {os.path.relpath(saved[-1].path)}")
        command = resume_command(config, engine.world, self.overridden, [resume], *without)
        say(f"resume with    {command}")


def _progress(engine: Engine) -> dict[str, Any]:
    """Returns the run's progress."""
    state = engine.state
    return {"status": engine.status, "epochs": state.epoch, "steps": state.step}


def _root(folder: Path) -> str:
    """Returns the folder of this run and its siblings; TensorBoard then shows their names."""
    path = os.path.relpath(folder)
    parts = Path(path).parts
    # the current folder has no parts
    if len(parts) > 1 and parts[0] in ("outputs", "multirun"):
        return parts[0]
    return shell_word(path)
