"""A user's own function: found by its name, called, and every mistake is one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from harness.config import ConfigError
from harness.runtime import user_code

Write = Callable[[str, str], None]
MINE = """
number = 3

def build(count, **more):
    return count, more

def plain(count, size=0):
    return count, size

def bad(count):
    message = f"no {count}\\nof them"
    raise ValueError(message)

def refuse():
    from harness.runtime.errors import DataError
    raise DataError("data.root=/x: no such folder")

class Maker:
    build = staticmethod(build)
"""


@pytest.mark.parametrize(
    ("name", "found"),
    [
        pytest.param("mine:build", (2, {"size": 5}), id="takes all by name"),
        pytest.param("mine:plain", (2, 5), id="takes one by name"),
        pytest.param("mine:Maker.build", (2, {"size": 5}), id="within a class"),
        pytest.param("builtins:str", "2", id="takes none"),
    ],
)
def test_a_function_is_given_what_it_takes(write_module: Write, name: str, found: Any) -> None:
    """The fixed arguments, and those of the others that it has a name for."""
    write_module("mine", MINE)
    assert user_code.call("model.name", name, 2, size=5) == found


def test_a_missing_module_is_refused_without_importing_any(write_module: Write) -> None:
    """Before a folder is made, and before the data set is."""
    write_module("his", "raise RuntimeError")
    user_code.check("model.name", "his:build")
    user_code.check("model.name", "resnet18")
    with pytest.raises(ConfigError, match="data.name=hers.more:build: .*no module hers in the"):
        user_code.check("data.name", "hers.more:build")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        pytest.param(
            "his:build",
            "there is no module his in the current folder or the environment",
            id="no module",
        ),
        pytest.param(
            "json.his:build",
            "there is no module json.his in the current folder or the environment",
            id="no submodule",
        ),
        pytest.param(
            "mine:built",
            r"no built in /.*/mine.py; did you mean build\?",
            id="no function",
        ),
        pytest.param("mine:", "no function in /.*/mine.py; write mine:FUNCTION", id="no name"),
        pytest.param(
            "mine:number",
            r"number is of type int, not a function \(/.*/mine.py\)",
            id="not callable",
        ),
        pytest.param("mine:bad", r"failed with ValueError: no 2 \(mine.py:12\)", id="raises"),
        pytest.param(
            "mine:refuse",
            r"failed with TypeError: refuse\(\) takes 0 .* 1 was given \(mine.py:14\)",
            id="other arguments",
        ),
        pytest.param(
            "broken:build",
            r"importing broken failed with ZeroDivisionError: .* \(broken.py:1\)",
            id="broken",
        ),
        pytest.param(
            "needy:build",
            r"importing needy failed with ModuleNotFoundError: .*his.* \(needy.py:1\)",
            id="needs more",
        ),
        pytest.param(
            ":build", "importing  failed with ValueError: Empty module name", id="no module's name"
        ),
    ],
)
def test_a_mistake_is_one_line(write_module: Write, name: str, error: str) -> None:
    """It names the setting as typed, and the place in the user's file where there is one."""
    for module, text in (("mine", MINE), ("broken", "1 / 0"), ("needy", "import his")):
        write_module(module, text)
    with pytest.raises(ConfigError, match=f"^model.name={re.escape(name)}: {error}$"):
        user_code.call("model.name", name, 2)


def test_a_digest_changes_with_the_file(write_module: Write) -> None:
    """Another function of the same file has the same, a changed file another."""
    digests = []
    for text in (MINE, MINE, f"{MINE}# changed\n"):
        write_module("mine", text)
        user_code.call("model.name", "mine:build", 2)
        digests.append(user_code.digest("mine:build"))
    assert digests[0] == digests[1] != digests[2]
