"""Flags of old launchers."""

from __future__ import annotations

import pytest

from harness.cli import compose
from harness.config import ConfigError


@pytest.mark.parametrize("flag", ["--local-rank=1", "--local_rank=1"])
def test_the_rank_that_a_launcher_adds_is_taken(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    """It is dropped where the variable says the same; typed by a user it is refused."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert compose.prepared([flag, "seed=1"]).overrides == ["seed=1"]
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ConfigError):
        compose.prepared([flag, "seed=1"])
