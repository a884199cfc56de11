"""The script of docs/cluster.md under a real Slurm: a job that is stopped goes on bitwise."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import trained
from run_state import digest, lines
from slurm import Slurm, script, until

RUN = (
    "data=digits", "device=cpu", "loader.num_workers=0", "trainer.num_threads=1",
    "checkpoint.every_steps=20",
)  # fmt: skip
EPOCHS = 25

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(Slurm.missing()), reason=Slurm.missing() or "there is Slurm"),
]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """A cluster of one node."""
    # a short path, for the sockets
    with tempfile.TemporaryDirectory() as base, Slurm(Path(base)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The state of the run that nothing stops."""
    place = tmp_path_factory.mktemp("whole")
    done = trained(place, *RUN, f"trainer.epochs={EPOCHS}", "run.name=x", timeout_s=600)
    assert done.returncode == 0, done.stderr
    return digest(place / "outputs/x")


def trains(slurm: Slurm, job: str, more: int = 1) -> None:
    """Waits for so many more logged lines."""
    place = slurm.work / f"outputs/job-{job}"
    before = len(lines(place))
    until(lambda: len(lines(place)) >= before + more, f"steps: {slurm.said(job)[-2000:]}", 240)


@pytest.mark.parametrize("each_task", [False, True], ids=["torchrun", "tasks"])
def test_a_job_that_is_stopped_goes_on(slurm: Slurm, whole: str, each_task: bool) -> None:
    """Requeued by hand, pre-empted, at its time limit: the weights are those of a whole run."""
    job = slurm.submit(script(each_task), *RUN, f"trainer.epochs={EPOCHS}")
    trains(slurm, job)
    slurm.ask("scontrol", "requeue", job)
    slurm.start_again(job, 1)
    trains(slurm, job)
    slurm.preempt()
    slurm.start_again(job, 2)
    trains(slurm, job)
    # what Slurm does before a time limit, which it counts in minutes
    slurm.ask("scancel", "--signal=USR1", "--batch", job)
    slurm.start_again(job, 3)
    assert slurm.end(job, 600) == "COMPLETED", slurm.said(job)[-3000:]
    assert slurm.fact(job, "Restarts") == "3"
    assert digest(slurm.work / f"outputs/job-{job}") == whole
    assert slurm.said(job).count("resumed ") == 3
