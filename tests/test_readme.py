"""What the README says works."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.config import Config

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"`((?:python|torchrun) .*?train\.py[^`]*)`", README)


def test_the_example_for_a_loop_of_ones_own_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The Python block runs as it stands and prints its figures."""
    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(compile(block, "README.md", "exec"), {})
    assert re.search(r"\d+ images/s, waiting for data \d+% of the time", capsys.readouterr().out)


def test_the_example_changes_few_lines() -> None:
    """At most ten lines of the example are ours."""
    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(re.findall(r"^.*(?:harness|clock|DataPrefetcher|batches).*$", block, re.M)) <= 10


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_composes(composed: Callable[..., Config], command: str) -> None:
    """Each command's settings exist and fit together."""
    arguments = shlex.split(command.split("train.py", 1)[1])
    overrides = [argument.split(",")[0] for argument in arguments if not argument.startswith("-") and argument != "job"]
    composed(*overrides)


def test_commands_are_found() -> None:
    """The pattern above finds the table."""
    assert len(COMMANDS) >= 15
