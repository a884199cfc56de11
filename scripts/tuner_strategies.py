"""Who chooses in ``bench_tuner.py``, and what for.

The tuner, the tutorial's grid, loadtune, rules of thumb.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.config import Config, DataConfig, LoaderConfig, ModelConfig, TunerConfig, TunerName
from harness.data.datasets import ImageDataset, Splits
from harness.feed.base import ARRAYS, PROCESSES, Backend, FeedSettings, FillableDataset, HostBatch
from harness.feed.feeds import Feeds
from harness.monitor import console
from harness.runtime import limits
from harness.runtime.distributed import World
from harness.runtime.limits import Limits
from harness.training import models
from harness.training.state import make_state
from harness.training.step import Step, device_batches
from harness.tuning.steps import StepBenchmark, StepRun
from harness.tuning.training_steps import TrainingBenchmark
from harness.tuning.tuner import tune
from scripts.tuner_score import Setting
from scripts.tuner_workloads import CLASSES, WORKLOADS, Workload

ROOT = Path(__file__).resolve().parents[1]
LOADTUNE = "loadtune==0.3.0"
# as in its README's example; its command line's default of 100 doubles what it costs
LOADTUNE_STEPS = 50
# the tutorial's search has none
_GRID_BUDGET_S = 3600.0


class PacedTrainee:
    """A step that waits ``step_s`` seconds, as a host for its device."""

    # batches stay where they are
    device = torch.device("cpu")
    overlaps = False

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

    def preserved_state(self) -> AbstractContextManager[None]:
        """Nothing changes."""
        return nullcontext()

    def demand(self, batch: HostBatch, limit_s: float) -> StepRun:
        """Steps on ``batch`` over and over."""
        return self._run(itertools.repeat(batch), limit_s)

    def deliver(self, feed: Backend, skip: int, limit_s: float) -> StepRun:
        """Steps on ``feed``, as ``StepBenchmark`` has it."""
        with closing(cast(Any, iter(feed))) as batches:
            begin = time.perf_counter()
            for _ in range(skip + 1):
                next(batches)
                time.sleep(self.step_s)
                if time.perf_counter() - begin > limit_s / 3:
                    break
            return self._run(batches, limit_s)

    def _run(self, batches: Iterator[HostBatch], limit_s: float) -> StepRun:
        images: list[int] = []
        seconds: list[float] = []
        waits: list[float] = []
        cpu = time.process_time()
        begin = time.perf_counter()
        last = begin
        while len(images) < 2 or last - begin < limit_s:
            images.append(len(next(batches).labels))
            got = time.perf_counter()
            time.sleep(self.step_s)
            now = time.perf_counter()
            waits.append(got - last)
            seconds.append(now - last)
            last = now
        return StepRun(
            tuple(images), tuple(seconds), sum(waits) / sum(seconds), time.process_time() - cpu
        )


def trained(step: Step, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[int]:
    """Trains on ``batches``, and gives the images of each step when it is done."""
    step.model.train()
    for done, (images, labels) in enumerate(batches, 1):
        step(images, labels)
        # as training reads its loss
        if done % 10 == 0:
            step.read()
        yield len(labels)


@dataclass(slots=True)
class Rig:
    """One workload, ready to be chosen for and measured.

    Attributes:
        limits: what every strategy is told to have.
    """

    workload: Workload
    dataset: FillableDataset
    world: World
    limits: Limits = field(init=False)
    config: Config = field(init=False)
    _step: Step | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        found = limits.measure()
        cores = self.workload.cores
        self.limits = found if cores is None else replace(found, cores=float(cores))
        size = self.dataset.image_size
        batch_size = self.workload.batch_size
        self.config = Config(
            data=DataConfig(image_size=size), loader=LoaderConfig(batch_size=batch_size)
        )
        if self.workload.step_s is None:
            state = make_state(self.config, CLASSES, self.world, len(self.dataset) // batch_size)
            self._step = Step(state)

    @property
    def cores(self) -> int:
        """Whole cores, at least one."""
        return max(1, int(self.limits.cores))

    @property
    def most(self) -> int:
        """The most workers that any strategy or the oracle may take."""
        return 2 * self.cores

    @property
    def own(self) -> FeedSettings:
        """What a user gets who sets nothing."""
        return self.feeds().settings(self.limits)

    @property
    def trainee(self) -> StepBenchmark:
        """The consumer as tuning sees it."""
        if self._step is None:
            assert self.workload.step_s is not None
            return cast(StepBenchmark, PacedTrainee(self.workload.step_s))
        return TrainingBenchmark(self._step)

    def feeds(self, seed: int = 0) -> Feeds:
        """Returns feeds as ``train.py`` makes them; ``seed`` alone decides the samples."""
        # a feed uses of it what every fillable data set has
        dataset = cast(ImageDataset, self.dataset)
        splits = Splits(dataset, dataset, tuple(map(str, range(CLASSES))), self.workload.name, "")
        return Feeds(splits, replace(self.config, seed=seed), self.world)

    def settings(self, setting: Setting, timeout_s: float) -> FeedSettings:
        """``setting`` as a feed takes it."""
        workers = setting.num_workers
        return replace(
            self.own, num_workers=workers, prefetch_factor=setting.prefetch_factor or None,
            persistent_workers=workers > 0, timeout_s=timeout_s, backend=setting.backend,
        )  # fmt: skip

    def steps(self, feed: Backend) -> Iterator[int]:
        """The images of each step on ``feed``, when it is done."""
        if self._step is None:
            assert self.workload.step_s is not None
            for batch in feed:
                time.sleep(self.workload.step_s)
                yield len(batch.labels)
            return
        with closing(device_batches(feed, self.config, self.world.device)) as batches:
            yield from trained(self._step, batches)

    def demand(self) -> float:
        """Images/s that the consumer takes with batches at hand."""
        feed = self.feeds().probe(
            replace(self.own, num_workers=0, prefetch_factor=None, persistent_workers=False)
        )
        with self.trainee.preserved_state(), closing(cast(Any, iter(feed))) as batches:
            run = self.trainee.demand(next(batches), 2.0)
        return sum(run.images) / sum(run.seconds)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a strategy chose; ``setting`` is None if it found none, ``note`` says more."""

    setting: Setting | None
    seconds: float
    note: str = ""


class MissingError(Exception):
    """A strategy that cannot be had on this machine; the text says why."""


Strategy = Callable[[Rig, Path], Choice]


def _tuned(name: TunerName, budget_s: float | None, rig: Rig, folder: Path) -> Choice:
    config = TunerConfig(name=name, max_workers=rig.most)
    if budget_s is not None:
        config.budget_s = budget_s
    begin = time.perf_counter()
    with console.speaking(False):
        report = tune(rig.feeds(), rig.trainee, rig.own, config, rig.limits, rig.world)
    seconds = time.perf_counter() - begin
    chosen = report.settings
    setting = Setting.of(chosen.num_workers, chosen.prefetch_factor, chosen.backend)
    return Choice(setting, seconds, f"{report.sentence} ({len(report.trials)} measurements)")


def _own(rig: Rig, folder: Path) -> Choice:
    """What a user gets who sets nothing."""
    own = rig.own
    return Choice(Setting.of(own.num_workers, own.prefetch_factor, own.backend), 0.0)


def _rule(workers: Callable[[Rig], int], rig: Rig, folder: Path) -> Choice:
    return Choice(Setting.of(min(rig.most, workers(rig)), None), 0.0)


def _loadtune(rig: Rig, folder: Path) -> Choice:
    """Asks ``loadtune tune`` for its best setting.

    Raises:
        MissingError: there is no uv, or the package cannot be had.
    """
    if shutil.which("uv") is None:
        raise MissingError("loadtune: needs uv, to have it without installing it here")
    # Python that has loadtune beside this project's environment
    python = ["uv", "run", "--quiet", "--no-sync", "--with", LOADTUNE, "python"]
    tried = subprocess.run(
        [*python, "-c", "import loadtune"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tried.returncode != 0:
        raise MissingError(f"loadtune: {' '.join(tried.stderr.split())[-200:]}")
    # a file that makes the workload; the number of cores is the only limit that loadtune looks at
    file = folder / f"loadtune_{rig.workload.name}.py"
    count = ""
    if rig.workload.cores is not None:
        count = f"os.cpu_count = lambda: {rig.cores}\n"
    file.write_text(
        f"import os, sys\n{count}sys.path.insert(0, {str(ROOT)!r})\n"
        "from scripts.tuner_strategies import loadtune_workload\n\n\n"
        f"def get_workload():\n    return loadtune_workload({rig.workload.name!r}, "
        f"{str(folder)!r})\n"
    )
    command = [*python, "-m", "loadtune.cli", "tune", str(file), "--no-plots"]
    command += ["--steps", str(LOADTUNE_STEPS), "--out", str(folder / "loadtune.md")]
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode != 0:
        return Choice(None, seconds, note=" ".join((done.stdout + done.stderr).split())[-300:])
    return Choice(
        loadtune_choice(done.stdout, rig.most), seconds, note=" ".join(done.stdout.split())[-300:]
    )


def loadtune_choice(said: str, most: int) -> Setting:
    """Returns the setting that loadtune's last line names, or no workers."""
    match = re.search(r"best overall: workers=(\d+)(?:, prefetch=(\d+))?", said)
    if match is None:
        return Setting.of(0, None)
    return Setting.of(min(most, int(match[1])), int(match[2] or 0))


class _Samples(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """A fillable data set as torch's DataLoader knows them."""

    def __init__(self, dataset: FillableDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        size = self.dataset.image_size
        image = torch.empty((3, size, size), dtype=torch.uint8)
        return image, self.dataset.fill(0, index, image.numpy())


def loadtune_workload(name: str, folder: str) -> Any:
    """Returns workload ``name`` as loadtune wants it, for processes of its own."""
    from loadtune import Workload as Theirs  # type: ignore[import-not-found]

    workload = WORKLOADS[name]
    dataset = workload.make(Path(folder))
    real = workload.step_s is None
    data = DataConfig(image_size=dataset.image_size)
    mean, scale = (
        torch.tensor(values).mul(255).view(1, 3, 1, 1) for values in (data.mean, data.std)
    )

    # the consumer: a sleep, or the harness's own step as a plain loop has it
    def step(
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: tuple[Tensor, Tensor],
        device: torch.device,
    ) -> Tensor:
        if workload.step_s is not None:
            time.sleep(workload.step_s)
            return torch.zeros(())
        loss = F.cross_entropy(
            model(batch[0].to(device).sub(mean).div_(scale)), batch[1].to(device)
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Theirs(
        name=name,
        make_dataset=lambda: _Samples(dataset),
        make_model=lambda: (
            models.build(ModelConfig(), CLASSES, image_size=data.image_size)
            if real
            else nn.Linear(1, 1)
        ),
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        train_step=step,
        default_batch_size=workload.batch_size,
    )


STRATEGIES: dict[str, Strategy] = {
    "own": _own,
    # its suggested_max_num_workers for one rank
    "lightning": partial(_rule, lambda rig: max(1, rig.cores - 1)),
    "all_cores": partial(_rule, lambda rig: rig.cores),
    "auto": partial(_tuned, TunerName.auto, None),
    "grid": partial(_tuned, TunerName.grid, _GRID_BUDGET_S),
    "loadtune": _loadtune,
}
# the strategy whose choice is asked for several times
REPEATED = "auto"


def candidates(rig: Rig) -> list[Setting]:
    """Returns what the oracle looks at: all workers and forms at two prefetch factors.

    Arrays have no workers.
    """
    forms = rig.feeds().backends
    counts = range(1, rig.most + 1)
    alone = {Setting.of(0, None, form) for form in {PROCESSES, *forms} & {PROCESSES, ARRAYS}}
    shared = [form for form in forms if form != ARRAYS]
    return sorted(
        alone | {Setting.of(n, k, form) for form in shared for n in counts for k in (2, 4)}
    )
