"""Two nodes under torchrun: one is lost amid an epoch, and another takes its place."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import ROOT, ran
from nodes import Nodes
from run_state import digest, lines
from slurm import until

RUN = (
    "data=digits", "model=small", "device=cpu", "loader.num_workers=0", "trainer.num_threads=1",
    "trainer.epochs=8", "checkpoint.every_steps=4", "run.name=x", "resume=auto",
)  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """Two nodes without a process."""
    if missing := Nodes.missing():
        pytest.skip(missing)
    with Nodes() as made:
        yield made


def test_a_lost_node_is_replaced(nodes: Nodes, tmp_path: Path) -> None:
    """Lost with a shared folder, started again with separate ones: one state with a whole run."""
    shared, empty, place = (tmp_path / name for name in ("shared", "empty", "whole"))
    for folder in (shared, empty, place):
        folder.mkdir()
    first, second = (nodes.start(i, shared, *RUN) for i in (0, 1))
    until(lambda: bool(lines(shared / "outputs/x")) or first.poll() is not None, "steps", 240)
    nodes.kill(1)
    said = first.communicate(timeout=120)[0]
    assert first.returncode == 1 and "exitcode  : 10" in said, said
    second.communicate(timeout=20)
    # the first rank has no checkpoint, and the second reads it for both
    both = [nodes.start(i, folder, *RUN) for i, folder in enumerate((empty, shared))]
    said, other = (each.communicate(timeout=240)[0] for each in both)
    assert [each.returncode for each in both] == [0, 0], said + other
    assert "resumed " in said
    done = ran(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        ROOT / "train.py", *RUN, cwd=place, timeout_s=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert digest(empty / "outputs/x") == digest(place / "outputs/x")
