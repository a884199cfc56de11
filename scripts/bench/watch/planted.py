"""Plants bottlenecks in real runs, often on an emulated device.

    uv run python -m scripts.bench.watch.planted --runs 3 --write

plants each bottleneck several times with random sizes, and writes the diagnoses to
scripts/bench/results/planted.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from omegaconf import DictConfig, OmegaConf

from harness import config as schema
from harness.cli.job import Job, main_worker
from harness.config import Config, ConfigError
from harness.runtime import distributed
from scripts.bench.tables import PAGES, ROOT, machine, machine_line, markdown, write
from scripts.bench.watch import control_groups
from scripts.bench.watch import planted_acts as acts
from scripts.bench.watch.control_groups import group_of
from scripts.bench.watch.planted_data import BATCH, SIDE, Memory, SlowDisk, images


def rank_worker(local_rank: int, job: tuple[Job, float]) -> None:
    """Runs one rank of two; the rank that ``size`` chooses has a slow disk."""
    run, size = job
    slow = local_rank == int(size) % 2
    with patch(
        "harness.data.datasets.load", lambda *_: images(SlowDisk(size / 1e3) if slow else Memory())
    ):
        main_worker(local_rank, run)


def here(plant: Plant, size: float, job: Job) -> None:
    """Runs in this process; only planted programs are seen beside the run."""
    seen = (
        contextlib.nullcontext()
        if plant.bottleneck == "neighbors"
        else patch("harness.report.evidence.taken", lambda _: None)
    )
    with seen, plant.act(size):
        main_worker(0, job)


def in_ranks(plant: Plant, size: float, job: Job) -> None:
    """Runs in two new processes."""
    distributed.launch(rank_worker, (job, size), job.config)


def in_group(plant: Plant, size: float, job: Job) -> None:
    """Runs in a new process in a control group; skips the test if that fails."""
    with plant.group(size) as group:
        command = [
            sys.executable,
            __file__,
            "--only",
            plant.name,
            "--size",
            str(size),
            "--folder",
            str(job.folder),
        ]
        env = os.environ | {acts.GROUP: str(group), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=110, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def throttled_disk(megabytes_per_s: float) -> Iterator[Path]:
    """Yields a control group with limited reads from the disk of temporary files."""
    with group_of("blkio") as group:
        device = os.stat(tempfile.gettempdir()).st_dev
        limit = f"{os.major(device)}:{os.minor(device)} {round(megabytes_per_s * 1e6)}"
        try:
            (group / "blkio.throttle.read_bps_device").write_text(limit)
        except OSError as error:
            pytest.skip(f"cannot throttle reads of {tempfile.gettempdir()}: {error}")
        yield group


def memory_group(size: float) -> AbstractContextManager[Path]:
    """Returns a control group for memory; the run itself sets its limit."""
    return group_of("memory")


@dataclass(frozen=True, slots=True)
class Plant:
    """A bottleneck.

    Attributes:
        name: name of the bottleneck.
        bottleneck: the expected verdict.
        act: context manager that plants it with a size.
        low: the least size drawn.
        high: the largest; equal to ``low`` for a fixed size.
        unit: unit of the size.
        overrides: settings.
        start: starts the run.
        group: makes the run's control group for a size.
    """

    name: str
    bottleneck: str
    act: Callable[[float], AbstractContextManager[None]]
    low: float
    high: float
    unit: str
    overrides: tuple[str, ...] = ()
    start: Callable[[Plant, float, Job], None] = here
    group: Callable[[float], AbstractContextManager[Path]] = lambda size: contextlib.nullcontext(
        Path()
    )

    def draw(self, rng: random.Random) -> float:
        """Returns a log-uniform size."""
        return float(self.low * (self.high / self.low) ** rng.random())

    def run(self, size: float, folder: Path) -> dict[str, Any]:
        """Returns the report of a run with the bottleneck."""
        folder.mkdir(parents=True, exist_ok=True)
        self.start(self, size, Job(composed(*self.overrides), folder, ()))
        report: dict[str, Any] = json.loads((folder / "report.json").read_text())
        return report


def composed(*overrides: str) -> Config:
    """Returns the settings of a short run on small images; later overrides win."""
    common = (
        "data.name=planted", f"data.image_size={SIDE}", "device=cpu", f"loader.batch_size={BATCH}",
        "loader.backend=processes", "loader.num_workers=2",
        "trainer.epochs=1", "trainer.max_steps=50", "checkpoint.enabled=false",
        "watch.sample_s=0.2",
    )  # fmt: skip
    merged = OmegaConf.merge(
        OmegaConf.structured(Config), OmegaConf.from_dotlist([*common, *overrides])
    )
    assert isinstance(merged, DictConfig)
    return schema.load(merged)


FEW = "trainer.max_steps=25"
# validation workers would need additional memory
SMALL = (
    "trainer.max_steps=400",
    "loader.val.num_workers=0",
)
ONE = ("loader.num_workers=1",)
LONG = ("loader.num_workers=0", "trainer.max_steps=15")
TWO_RANKS = (*ONE, "dist.name=spawn", "dist.nprocs=2", FEW)
ON_GPU = ("device=cuda", "loader.num_workers=0", "loader.pin_memory=false")
PLANTS = (
    Plant("slow disk", "storage", acts.slow_disk, 25, 80, "ms a read", (FEW,)),
    Plant("slow disk, async device", "storage", acts.async_slow_disk, 25, 80, "ms a read", (FEW,)),
    Plant(
        "cold files", "storage", acts.cold_files, 20, 80, "MB/s", (FEW,), in_group, throttled_disk
    ),
    Plant("heavy decode", "decode", acts.heavy_decode, 500, 1000, "pixels a side"),
    Plant("one slow transform", "augment", acts.slow_transform, 25, 80, "ms a sample", (FEW,)),
    Plant("slow collate", "collate", acts.slow_collate, 100, 320, "ms a batch", (FEW,)),
    Plant(
        "too few workers", "workers", acts.heavy_decode, 2500, 2500, "pixels a side", (*ONE, FEW)
    ),
    Plant("huge batches", "transport", acts.huge_batches, 32, 128, "MB a batch"),
    Plant("pageable copies", "copy", acts.pageable_copies, 32, 128, "MB a batch", ON_GPU),
    Plant("slow step", "compute", acts.slow_step, 250, 500, "ms a step", LONG),
    Plant("slow launches", "launch", acts.slow_launches, 60, 120, "launches of 4 ms", LONG),
    Plant("slow rank", "rank", acts.slow_disk, 25, 80, "ms a read", TWO_RANKS, in_ranks),
    Plant("quota", "quota", acts.quota, 0.3, 0.6, "processors", (), in_group, control_groups.quota),
    Plant("collections", "host", acts.collections, 200, 800, "thousand objects", (FEW,)),
    Plant(
        "slow logging",
        "host",
        acts.slow_logging,
        100,
        300,
        "ms a window",
        (FEW, "watch.window_steps=2"),
    ),
    Plant("slow callback", "host", acts.slow_callback, 50, 50, "ms a step", (FEW,)),
    Plant(
        "tiny memory",
        "memory",
        acts.tiny_memory,
        0.2,
        0.4,
        "of the files in memory",
        SMALL,
        in_group,
        memory_group,
    ),
    Plant("neighbors", "neighbors", acts.neighbors, 1.4, 1.6, "cores of 2"),
    Plant("nothing", "balanced", acts.balanced, 250, 500, "ms a step", (*LONG, *ONE)),
)


def main(argv: list[str] | None = None) -> None:
    """Plants the chosen bottlenecks, and prints or writes the runs' verdicts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="substring of the plants' names (default: all)")
    parser.add_argument("--runs", type=int, default=1, help="runs per plant")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(2**32), help="seed of the sizes"
    )
    parser.add_argument("--write", action="store_true", help="write results/planted.md")
    parser.add_argument("--size", type=float, help="fixed size of the plant (default: random)")
    parser.add_argument("--folder", type=Path, help="folder of a single run in this process")
    a = parser.parse_args(argv)
    chosen = [plant for plant in PLANTS if (a.only or "") in plant.name]
    if a.folder:
        dataclasses.replace(chosen[0], start=here).run(a.size, a.folder)
        return
    rng = random.Random(a.seed)
    rows = []
    for plant in chosen:
        rows.append(row(plant, [a.size or plant.draw(rng) for _ in range(a.runs)]))
        print(f"{' | '.join(rows[-1].values())}", flush=True)
    text = (
        f"# Planted bottlenecks\n\n{machine_line(machine())}\n\n{a.runs} runs of each, sizes "
        f"drawn with seed {a.seed}.\n\n"
    )
    if a.write:
        write(PAGES / "planted.md", f"{text}{markdown(rows)}\n")


def row(plant: Plant, sizes: list[float]) -> dict[str, str]:
    """Returns a table row: how many runs gave the right verdict, and the last one's sentence."""
    said: list[dict[str, Any]] = []
    skipped = ""
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            try:
                said.append(plant.run(size, Path(folder))["verdict"])
            except (pytest.skip.Exception, ConfigError) as error:
                skipped = str(error)
        if said and said[-1]["bottleneck"] != plant.bottleneck:
            print(f"{plant.name}, {size:.3g} {plant.unit}: {said[-1]}", file=sys.stderr, flush=True)
    right = sum(verdict["bottleneck"] == plant.bottleneck for verdict in said)
    span = f"{plant.low:g} to {plant.high:g}" if plant.high > plant.low else f"{plant.low:g}"
    return {
        "planted": plant.name,
        "size": f"{span} {plant.unit}",
        "expected": plant.bottleneck,
        "right": f"{right} of {len(said)}" if said else f"skipped: {skipped}",
        "what the last one said": said[-1]["sentence"] if said else "",
    }


if __name__ == "__main__":
    # import by name, so that workers find the plant
    from scripts.bench.watch import planted

    planted.main()
