"""Preempts a job of a real Slurm at random moments, and compares its weights with a whole run's.

The job is the script of docs/how-to/clusters.md on one rank; first, a time limit stops it once.
The exit code is 1 if a requirement is not met. Needs root and slurm-wlm.

    uv run python -m scripts.bench.preempted --write
"""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Self

from scripts.bench.tables import (
    PAGES,
    ROOT,
    Sample,
    machine,
    machine_line,
    markdown,
    parser,
    tell,
    write,
)
from tests.support.run_state import digest, lines, wrong_lines
from tests.support.slurm import Slurm, script, until

PAGE = PAGES / "preempted.md"
# evaluations and saves last long enough to be hit
_MODEL = """
from torch import nn

def build(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 512), nn.ReLU(),
                         nn.Linear(512, num_classes))
"""
_RUN = (
    "data=shapes", "data.image_size=32", "data.generate.train_images=1000",
    "data.generate.val_images=2000", "augment.hflip=0.5", "device=cpu", "loader.num_workers=0",
    "loader.batch_size=16", "optim.lr=0.01", "trainer.num_threads=1", "checkpoint.every_steps=5",
    "model.name=wide:build",
)  # fmt: skip
_AIMS = ("start", "evaluation", "saving")
# what torchrun logs at SIGTERM
_SIGNAL = "Received 15 death signal"


@dataclass
class Job:
    """The job; its output is read from the start of its current attempt."""

    slurm: Slurm
    number: str
    from_byte: int = 0
    saving: bool = False
    met: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.slurm.work / f"outputs/job-{self.number}"

    def said(self) -> str:
        """Returns the output of this attempt."""
        return self.slurm.said(self.number)[self.from_byte :]

    def phase(self) -> str:
        """Returns the run's phase, or its phase when the signal came."""
        told = self.said().split(_SIGNAL)[0]
        if "training:" not in told:
            return "start"
        # the line of an epoch's last step, then that of its evaluation
        *_, last = re.findall(r"training: |\d of \d+ steps in |: top-1 ", told)
        if last.endswith("in "):
            return "evaluation"
        return "saving" if self.saving else "training"

    def look(self) -> Self:
        """Notes whether a save is under way."""
        with suppress(FileNotFoundError):
            names = os.listdir(self.folder / "checkpoints")
            self.saving = any(not name.endswith((".pt", ".json")) for name in names)
        return self

    def wait_for(self, aim: str | None, moments: random.Random) -> None:
        """Waits for a phase, or for up to 60 steps and a second."""
        until(lambda: aim == "start" or "training:" in self.said(), "the first step", 300)
        if aim is None:
            least = len(lines(self.folder)) + moments.randint(0, 12)
            until(lambda: len(lines(self.folder)) >= least, "steps", 120)
            time.sleep(moments.random())
        elif aim != "start":
            until(lambda: self.look().phase() == aim, aim, 120)

    def preempt(self) -> float:
        """Preempts the job; returns the seconds until the node was free."""
        began_s = time.monotonic()
        other = self.slurm.submit(
            "#!/bin/bash\ntrue\n", options=("--partition=high", "--output=/dev/null")
        )
        looks = count(1)
        while _SIGNAL not in self.said():
            self.look()
            time.sleep(0.002)
            # torchrun may not have started yet
            if next(looks) % 100 == 0 and self.slurm.fact(other, "JobState") != "PENDING":
                break
        self.met.append(self.phase())
        until(lambda: self.slurm.fact(other, "JobState") != "PENDING", "a free node", 90)
        return time.monotonic() - began_s

    def start_again(self, restarts: int) -> None:
        """Starts the next attempt."""
        self.slurm.start_again(self.number, restarts)
        self.from_byte = len(self.slurm.said(self.number))


def measure(base: Path, n: int, seed: int, epochs: int) -> dict[str, object]:
    """Runs the job and an uninterrupted run in ``base``; returns the table's row."""
    moments = random.Random(seed)
    aims = [*_AIMS, *[None] * (n - len(_AIMS))]
    moments.shuffle(aims)
    (base / "cluster").mkdir()
    with Slurm(base / "cluster") as slurm:
        for place in (slurm.work, base):
            (place / "wide.py").write_text(_MODEL)
        settings = (*_RUN, f"trainer.epochs={epochs}")
        whole = subprocess.Popen(
            [sys.executable, ROOT / "train.py", *settings, "run.name=whole"],
            cwd=base,
            stdout=subprocess.DEVNULL,
        )
        # only one run generates the images
        until(lambda: (base / "outputs/whole/metrics.jsonl").exists(), "images", 300)
        job = Job(slurm, slurm.submit(script(), *settings))
        # Slurm looks at time limits every 30 s
        began_s = time.monotonic()
        job.wait_for(None, moments)
        # within the 120 s of the script
        minutes = int((time.monotonic() - began_s) / 60) + 2
        slurm.change(job.number, f"TimeLimit={minutes}")
        job.start_again(1)
        slurm.change(job.number, "TimeLimit=600")
        freed_s = []
        for i, aim in enumerate(aims):
            job.wait_for(aim, moments)
            freed_s.append(job.preempt())
            tell(f"{i + 1} of {n}: aimed at {aim}, hit {job.met[-1]}, {freed_s[-1]:.1f} s")
            job.start_again(i + 2)
        state = slurm.end(job.number, 900)
        wrong = [] if state == "COMPLETED" else [f"the job ended as {state}"]
        if whole.wait(900) or digest(job.folder) != digest(base / "outputs/whole"):
            wrong.append("other weights")
        wrong += wrong_lines(job.folder)
        resumed = slurm.said(job.number).count("resumed ")
    counts = Counter(job.met)
    wrong += [f"none in {phase}" for phase in (*_AIMS, "training") if not counts[phase]]
    found = [f"{times} in {phase}" for phase, times in sorted(counts.items())]
    return {
        "n": n,
        "required": "completed; weights, optimizer and random states bitwise identical to the "
        "uninterrupted run's; TensorBoard equal to metrics.jsonl; each phase hit",
        "pre-empted": ", ".join(found),
        "resumed from a checkpoint": resumed,
        "seconds until the node was free, median (quartiles)": Sample.of(freed_s),
        "at most": f"{max(freed_s):.1f}",
        "found": "; ".join(wrong) or "as required",
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(str(__doc__).splitlines()[0], PAGE, json=False)
    add = options.add_argument
    add("--n", type=int, default=20, help="preemptions")
    add("--seed", type=int, default=0, help="seed of the moments")
    add("--epochs", type=int, default=50, help="epochs of the run; enough for all preemptions")
    a = options.parse_args(argv)
    if missing := Slurm.missing():
        options.error(missing)
    # a short path, for Slurm's sockets
    with tempfile.TemporaryDirectory() as base:
        row = measure(Path(base), a.n, a.seed, a.epochs)
    version = subprocess.run(
        ["slurmctld", "-V"], capture_output=True, text=True, check=False
    ).stdout.strip()
    command = shlex.join(["uv", "run", "python", "-m", "scripts.bench.preempted", *sys.argv[1:]])
    text = (
        "# A job that Slurm preempts\n\n"
        f"{machine_line(machine())}; {version}\n\n`{command}`, {datetime.now(UTC):%d %B %Y}.\n\n"
        "The script of [clusters.md](../../../docs/how-to/clusters.md) runs under a real Slurm "
        "of one node, on one rank. A job in a higher-priority partition takes the node "
        "at seeded random moments; three of them are aimed at the start, an evaluation and a "
        "save. First, a time limit stops the run once.\n\n"
        f"{markdown([{'': key, 'value': value} for key, value in row.items()])}\n"
    )
    print(text)
    if a.write:
        write(PAGE, text)
    return int(row["found"] != "as required")


if __name__ == "__main__":
    sys.exit(main())
