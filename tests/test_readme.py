"""What the README says works."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.config import Config

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
COMMANDS = re.findall(r"`((?:python|torchrun) .*?train\.py[^`]*)`", README)


def test_the_example_for_a_loop_of_ones_own_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The Python block runs as it stands and prints its figures."""
    exec(compile(BLOCKS[0], "README.md", "exec"), {})
    assert re.search(r"\d+ images/s, waiting for data \d+% of the time", capsys.readouterr().out)


def test_the_example_that_tunes_runs(capsys: pytest.CaptureFixture[str], kept_globals: None) -> None:
    """As it stands, and ends with a sentence about what the model takes."""
    exec(compile(BLOCKS[1], "README.md", "exec"), {})
    assert "the model takes" in capsys.readouterr().out.splitlines()[-1].lower()


@pytest.mark.parametrize(("block", "ours"), [(0, "harness|clock|DataPrefetcher|batches"), (1, "harness|report|train_step")])
def test_the_examples_change_few_lines(block: int, ours: str) -> None:
    """At most ten lines of each are ours."""
    assert 0 < len(re.findall(rf"^.*(?:{ours}).*$", BLOCKS[block], re.M)) <= 10


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_composes(composed: Callable[..., Config], command: str) -> None:
    """Each command's settings exist and fit together."""
    arguments = shlex.split(command.split("train.py", 1)[1])
    overrides = [argument.split(",")[0] for argument in arguments if not argument.startswith("-") and argument != "job"]
    composed(*overrides)


def test_commands_are_found() -> None:
    """The pattern above finds the table."""
    assert len(COMMANDS) >= 15
