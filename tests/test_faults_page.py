"""What failure-handling.md says is held, is held by something that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.hostile.chaos.run import PARTS
from tests.hostile.fuzz.readers import READERS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/contributing/failure-handling.md"
TEXT = PAGE.read_text(encoding="utf-8")
KNOWN = {"chaos": PARTS, "fuzz": READERS}
# where a page has the results of a part or a reader
RESULTS = {"chaos": r"--parts (?:\w+,)*{}\b", "fuzz": r"(?m)^\| {} +\|"}
UNHELD = ("not built: ", "needs ")


def rows(text: str) -> list[tuple[str, str, str]]:
    """The rows of all tables: what fails, what happens, and what holds it."""
    found = []
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith("|---") and "| held by |" not in line:
            fault, happens, held = line.removeprefix("| ").removesuffix(" |").split(" | ")
            found.append((fault, happens, held))
    return found


def missing(held: str) -> list[str]:
    """What ``held`` names and is not there; itself where it names nothing."""
    wrong = []
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", held)
    parts = re.findall(r"`tests/hostile/(\w+)/run\.py` (?:part|reader) `([^`]+)`", held)
    for path, name in tests:
        file = ROOT / path
        if not file.is_file() or not re.search(rf"^def {name}\(", file.read_text(), re.M):
            wrong.append(f"{path}::{name}")
    for script, part in parts:
        if part not in KNOWN.get(script, ()):
            wrong.append(f"{script} {part}")
    for script, part, page in re.findall(
        r"\[`tests/hostile/(\w+)/run\.py` \w+ `([^`]+)`\]\(([\w/.]+)\)", held
    ):
        results = (PAGE.parent / page).read_text(encoding="utf-8")
        if not re.search(RESULTS[script].format(re.escape(part)), results):
            wrong.append(f"{page} without {part}")
    # a citation in another form would not be looked at
    if held.count("`") != 2 * len(tests) + 4 * len(parts) or not (tests or parts):
        wrong.append(held)
    return wrong


def test_the_page_has_its_tables() -> None:
    """Every table is found, and no row stands twice."""
    found = rows(TEXT)
    assert len(found) > 140 and TEXT.count("| held by |") == 14
    assert len({fault for fault, _, _ in found}) == len(found)
    assert all(cell.strip() for row in found for cell in row)


@pytest.mark.parametrize("row", rows(TEXT), ids=lambda row: row[0][:40])
def test_each_row_is_held(row: tuple[str, str, str]) -> None:
    """By tests and parts of scripts that exist, or it says why there is none."""
    fault, happens, held = row
    assert fault and happens.endswith((".", '"'))
    if held.startswith(UNHELD):
        assert len(held) > 20
    else:
        assert missing(held) == []
