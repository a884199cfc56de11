"""One folder for all ranks of torchrun, through the store that torchrun keeps."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from harness.config import ConfigError
from harness.runtime.folder import run_folder


@pytest.fixture(autouse=True)
def _outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_RESTART_COUNT",
        "RANK",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The environment of a worker of torchrun, with a live store; the rank is still to be set."""
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
    )
    for name, value in {
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }.items():
        monkeypatch.setenv(name, value)
    yield monkeypatch
    del store


def started(torchrun: pytest.MonkeyPatch, rank: int, restart: int, resume: str | None) -> str:
    """The folder of one rank."""
    torchrun.setenv("RANK", str(rank))
    torchrun.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
    return run_folder(None, resume)


@pytest.mark.parametrize("resume", [None, "auto"])
def test_every_rank_has_what_the_first_made(
    torchrun: pytest.MonkeyPatch, resume: str | None
) -> None:
    """The first rank makes it; the others get it without making anything."""
    made = started(torchrun, 0, 0, resume)
    assert [started(torchrun, rank, 0, resume) for rank in (1, 2)] == [made, made]
    assert [str(path) for path in Path("outputs").glob("*/*")] == [made]


def test_a_restart_makes_its_own(torchrun: pytest.MonkeyPatch) -> None:
    """When torchrun restarts its workers they do not find what the workers before them had."""
    first, second = (
        [started(torchrun, rank, restart, None) for rank in (0, 1)] for restart in (0, 1)
    )
    assert first[0] == first[1] != second[0] == second[1]


def test_a_restart_goes_on_where_the_run_was(torchrun: pytest.MonkeyPatch) -> None:
    """With resume=auto each restart has the first start's folder, on every rank."""
    found = {started(torchrun, rank, restart, "auto") for restart in (0, 1, 2) for rank in (0, 1)}
    assert len(found) == 1


def test_another_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher without a store cannot share a folder: the way out is run.name."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    with pytest.raises(ConfigError, match="^run.name=null: .*set run.name"):
        run_folder(None)


def test_a_run_that_goes_on_has_one_folder(torchrun: pytest.MonkeyPatch) -> None:
    """The folder that the first rank sees, also on nodes that do not see it."""
    Path("outputs/x/checkpoints").mkdir(parents=True)
    first = started(torchrun, 0, 0, "outputs/x")
    Path("outputs").rename("away")
    assert first == "outputs/x" == started(torchrun, 1, 0, "outputs/x")
