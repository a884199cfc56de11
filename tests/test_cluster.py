"""The script of docs/how-to/clusters.md under a real Slurm: a stopped job resumes bitwise."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import ROOT
from run_state import digest, lines
from slurm import Slurm, script, until

RUN = (
    "data=digits", "model=small", "device=cpu", "loader.num_workers=0", "trainer.num_threads=1",
    "checkpoint.every_steps=20",
)  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(Slurm.missing()), reason=Slurm.missing() or "there is Slurm"),
]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """A cluster of one node."""
    # a short path, for the sockets
    with tempfile.TemporaryDirectory() as base, Slurm(Path(base)) as cluster:
        yield cluster


def trains(slurm: Slurm, job: str) -> None:
    """Waits for another logged line."""
    place = slurm.work / f"outputs/job-{job}"
    before = len(lines(place))
    until(lambda: len(lines(place)) > before, f"steps: {slurm.said(job)[-2000:]}", 120)


@pytest.mark.parametrize("each_task", [False, True], ids=["torchrun", "tasks"])
def test_a_job_that_is_stopped_resumes(slurm: Slurm, tmp_path: Path, each_task: bool) -> None:
    """Signaled, requeued and pre-empted: the weights are those of a run that nothing stops."""
    run = (*RUN, f"trainer.epochs={5 if each_task else 15}")
    whole = subprocess.Popen(
        [sys.executable, ROOT / "train.py", *run, "run.name=x"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )
    job = slurm.submit(script(each_task), *run)
    stops: list[Callable[[], object]] = [
        # as Slurm does before a time limit; it looks at those every 30 s
        lambda: slurm.ask("scancel", "--signal=USR1", "--batch", job),
        lambda: slurm.ask("scontrol", "requeue", job),
        slurm.preempt,
    ]
    restarts = 0
    for stop in stops[: 1 if each_task else None]:
        trains(slurm, job)
        stop()
        slurm.start_again(job, restarts := restarts + 1)
    assert slurm.end(job) == "COMPLETED", slurm.said(job)[-3000:]
    assert whole.wait(120) == 0
    assert digest(slurm.work / f"outputs/job-{job}") == digest(tmp_path / "outputs/x")
    assert slurm.said(job).count("resumed ") == restarts
