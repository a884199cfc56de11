"""Rejects idioms that the writing rules replace, in documents, messages and docstrings."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECTS = "torch|torchvision|timm|Python|Pillow|PIL|numpy|NVIDIA|Apex|Lightning"
# each with its replacement
PATTERNS = {
    "resume, continue or keep": r"\b(go|goes|going|went|gone)\s+on\b",
    "no longer, or the present tense": r"\bany\s+more\b",
    "wellfed's, or an adjective": r"\b[Oo]urs\b",
    "your own": r"\bof\s+yours\b",
    "a noun compound": rf"\bof\s+({PROJECTS})'s\b(?! [\w`])",
    "fix or repair": r"\b[Mm]end(s|ed|ing)?\b",
    "also or in addition": r"\b[Bb]esides\b",
    "due to": r"\b[Ff]or\s+want\s+of\b",
    "preloaded, or available": r"\bat\s+hand\b",
    "US spelling": (
        r"(?i)\b\w*(colour|neighbour|behaviour|favour|(normal|optim|util|initial|synchron)is[ei]"
        r"|centre|grey|labell(ed|ing)|signalled)\w*"
    ),
}
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
MODULES = [*sorted((ROOT / "harness").rglob("*.py")), *sorted((ROOT / "scripts").rglob("*.py"))]


@functools.cache
def texts() -> list[tuple[Path, int, str]]:
    """Returns each document, string literal and docstring, with its file and first line."""
    found = [(path, 1, path.read_text(encoding="utf-8")) for path in DOCUMENTS]
    return found + [
        (path, node.lineno, node.value)
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


@pytest.mark.parametrize("better", PATTERNS)
def test_no_idiom_is_left(better: str) -> None:
    """The message lists the places and what to write instead."""
    pattern = re.compile(PATTERNS[better])
    found = [
        f"{path.relative_to(ROOT)}:{line + text.count(chr(10), 0, hit.start())}: {hit[0]}"
        for path, line, text in texts()
        for hit in pattern.finditer(text)
    ]
    assert not found, f"write {better}:\n" + "\n".join(found)
