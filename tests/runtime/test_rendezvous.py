"""One folder for all ranks of torchrun, through the store that torchrun keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from harness.config import ConfigError
from harness.runtime.folder import shared


@pytest.fixture(autouse=True)
def _outside(monkeypatch: pytest.MonkeyPatch) -> None:
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


def never(before: str | None) -> str:
    raise AssertionError("only the first rank makes it")


def test_without_torchrun_it_is_made_here() -> None:
    """A run of one process makes its own."""
    assert shared(lambda _: "here") == "here"


def test_every_rank_has_what_the_first_made(torchrun: pytest.MonkeyPatch) -> None:
    """The first rank makes it; the others get it without making anything."""
    torchrun.setenv("RANK", "0")
    assert shared(lambda _: "outputs/x") == "outputs/x"
    torchrun.setenv("RANK", "1")
    assert shared(never) == "outputs/x"


def test_a_restart_makes_its_own(torchrun: pytest.MonkeyPatch) -> None:
    """When torchrun restarts its workers they do not find what the workers before them had."""
    for restart, made in (("0", "first"), ("1", "second")):
        torchrun.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        torchrun.setenv("RANK", "0")
        shared(lambda _, made=made: made)  # type: ignore[misc]
        torchrun.setenv("RANK", "1")
        assert shared(never) == made


def test_what_lasts_is_given_to_the_restart(torchrun: pytest.MonkeyPatch) -> None:
    """The first rank is told what it made before, also where it failed in between; the others hear
    of this restart alone.
    """
    given: list[str | None] = []

    def make(before: str | None) -> str:
        given.append(before)
        if len(given) == 2:
            raise ConfigError("outputs: read-only")
        return f"folder {len(given)}"

    for restart in ("0", "1", "2"):
        torchrun.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        for rank in ("0", "1"):
            torchrun.setenv("RANK", rank)
            with (
                pytest.raises(ConfigError, match="^outputs: read-only$")
                if restart == "1"
                else nullcontext()
            ):
                made = shared(make if rank == "0" else never)
        assert restart == "1" or made == f"folder {len(given)}"
    assert given == [None, "folder 1", "folder 1"]


def test_the_first_ranks_failure_is_everyones(torchrun: pytest.MonkeyPatch) -> None:
    """Where the first rank cannot make it, the others fail at once with its text instead of
    waiting.
    """

    def fail(before: str | None) -> str:
        raise ConfigError("outputs: read-only")

    for rank in ("0", "1"):
        torchrun.setenv("RANK", rank)
        with pytest.raises(ConfigError, match="^outputs: read-only$"):
            shared(fail)


def test_another_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher without a store cannot share a folder: the way out is run.name."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    with pytest.raises(ConfigError, match="^run.name=null: .*set run.name"):
        shared(never)
