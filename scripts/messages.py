"""Gathers every sentence that a run can print into docs/messages.md.

Fields are placeholders.

Run it as ``uv run scripts/messages.py``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "messages.md"
# in a sentence
MOST_WORDS = 40
# fewer are names, keys and labels
_FEWEST_WORDS = 3
# where lists of names begin
_NAMES = ("airplane automobile", "apple aquarium_fish")
_HEAD = """# What a run can say

All texts of three words or more in the source, file by file, for reading them as a whole. `{}`
stands for what a run fills in. Some are parts of a sentence. Made by `scripts/messages.py`, and a
test fails where it is not up to date.
"""


def messages(source: str) -> Iterator[str]:
    """The texts of a module in their order, without docstrings and annotations."""
    tree = ast.parse(source)
    skipped = set()
    for node in ast.walk(tree):
        # parts of a longer text, and texts that stand alone as a statement: docstrings
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in ast.walk(node) if part is not node}
        elif isinstance(node, ast.Expr):
            skipped.add(id(node.value))
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in skipped
    ]
    for node in sorted(found, key=lambda node: (node.lineno, node.col_offset)):
        text = " ".join(_text(node).split())
        words = [word for word in text.split() if any(letter.isalpha() for letter in word)]
        if len(words) >= _FEWEST_WORDS and not text.startswith(_NAMES):
            yield text


def long_sentences(text: str) -> list[str]:
    """The sentences of ``text`` that have more than ``MOST_WORDS`` words."""
    sentences = text.replace("? ", ". ").replace(": ", ". ").split(". ")
    return [sentence for sentence in sentences if len(sentence.split()) > MOST_WORDS]


def page(root: Path = ROOT) -> str:
    """The whole page."""
    parts = [_HEAD]
    for path in sorted([root / "train.py", *(root / "harness").rglob("*.py")]):
        told = list(dict.fromkeys(messages(path.read_text(encoding="utf-8"))))
        if told:
            lines = "\n".join(
                f"- `{text}`" if "`" not in text else f"- ``{text}``" for text in told
            )
            parts.append(f"## {path.relative_to(root)}\n\n{lines}\n")
    return "\n".join(parts)


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(_text(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
