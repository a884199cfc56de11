"""Two nodes under torchrun: one is lost amid an epoch, and both start again."""

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


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Two nodes without a process."""
    if missing := Nodes.missing():
        pytest.skip(missing)
    with Nodes() as made:
        yield made


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The state of a run of two ranks that nothing stops."""
    place = tmp_path_factory.mktemp("whole")
    done = ran(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        ROOT / "train.py", *RUN, cwd=place, timeout_s=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return digest(place / "outputs/x")


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "separate"])
def test_a_lost_node_starts_again(nodes: Nodes, whole: str, tmp_path: Path, shares: bool) -> None:
    """The weights are those of a run that loses none, with and without a shared folder."""
    folders = [tmp_path / name for name in (("all", "all") if shares else ("first", "second"))]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    run = folders[0] / "outputs/x"
    first, second = (nodes.start(i, folder, *RUN) for i, folder in enumerate(folders))
    until(lambda: bool(lines(run)) or first.poll() is not None, "steps", 240)
    nodes.kill(1)
    said = first.communicate(timeout=120)[0]
    assert first.returncode == 1 and "exitcode  : 10" in said, said
    second.communicate(timeout=20)
    both = [nodes.start(i, folder, *RUN) for i, folder in enumerate(folders)]
    said = [each.communicate(timeout=240)[0] for each in both]
    assert [each.returncode for each in both] == [0, 0], said
    assert "resumed " in said[0] and digest(run) == whole
    assert shares or not list(folders[1].glob("outputs/x/checkpoints/*"))
