"""The user's own files of settings, and text on the command line."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from harness.cli import compose
from harness.config import Config

Composed = Callable[..., Config]


@pytest.mark.parametrize("written", ["12e5", "0x10", "1:30", "1_000", "007", "1.50", "on", "No"])
@pytest.mark.parametrize("path", ["data.root", "model.weights"])
def test_text_of_a_file_stays_as_it_is_written(
    composed: Composed, tmp_path: Path, path: str, written: str
) -> None:
    """YAML would make numbers and truth values of names."""
    group, name = path.split(".")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(
        f"# @package _global_\n{group}: {{{name}: {written}}}\n"
    )
    found = composed(f"hydra.searchpath=[{tmp_path}]", "experiment=mine")
    assert attrgetter(path)(found) == written


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        # saved by an editor of Windows
        ("\ufeff# @package _global_\r\nseed: 7\r\n", {"seed": 7}),
        ("seed: 0x10\ntrainer: {max_steps: 1_000, deterministic: on}\n",
         {"seed": 16, "trainer.max_steps": 1000, "trainer.deterministic": True}),
        ("run: {<<: &mine {name: 7e5}}\nmodel: {<<: *mine, name: 1e1}\noptim: {lr: 1e-3}\n",
         {"run.name": "7e5", "model.name": "1e1", "optim.lr": 0.001}),
        ("defaults: [sub/more]\n", {"seed": 3, "data.name": "1e1"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("group", ["experiment", "+mine"])
def test_a_group_of_the_users_sets_anything(
    composed: Composed, tmp_path: Path, group: str, content: str, expected: dict[str, Any]
) -> None:
    """With and without the line ``# @package _global_``; numbers and truth values are typed."""
    folder = tmp_path / group.lstrip("+")
    (folder / "sub").mkdir(parents=True)
    (folder / "x.yaml").write_text(content)
    (folder / "sub/more.yaml").write_text("seed: 3\ndata: {name: 1e1}\n")
    found = composed(f"hydra.searchpath=[{tmp_path}]", f"{group}=x")
    assert {path: attrgetter(path)(found) for path in expected} == expected


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("7e5,8e2", ["7e5", "8e2"]),
        ("choice(1.50,a)", ["1.50", "a"]),
        ("range(1,3)", ["1", "2"]),
        ("'1,2',b", ["1,2", "b"]),
    ],
)
def test_names_of_a_sweep_stay_as_they_are_typed(typed: str, names: list[str]) -> None:
    """Hydra would make numbers of them."""
    (override,) = compose.prepared(["-m", f"run.name={typed}"]).overrides
    read = OverridesParser.create().parse_override(override).sweep_string_iterator()
    assert [each.strip("'") for each in read] == names


def test_a_comma_is_a_name_unless_it_sweeps() -> None:
    """Advice on such a folder quotes what was typed."""
    assert compose.prepared(["data.root=2018,2019"]).overrides == ["data.root=2018,2019"]
