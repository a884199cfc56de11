"""The cache of a user without a home."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from harness.data.storage import cache_root


def test_a_user_without_name_and_home_has_an_absolute_cache_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No error, and no folder below the current one."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "WELLFED_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert cache_root() == Path("/~/.cache/wellfed")
