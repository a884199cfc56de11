"""Checks the size of harness/ against the token budgets in pyproject.toml, [tool.wellfed.tokens].

    uv run python scripts/check_size.py

A token is a word, number, string or sign: in Python without comments, docstrings, line ends and
indentation; in C and JavaScript without comments. Prints each room's tokens and its budget.
Exits with 1 if a room exceeds its budget or has none, or a function has more than 60 lines.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
# of all rooms together
NATIVE = "c_and_javascript"
LONGEST_FUNCTION = 60
_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_TOKEN = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|`[^`]*`|\w+|[^\s\w]")
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def python_tokens(text: str) -> int:
    """Returns the number of tokens in a Python module."""
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | _FUNCTION) and ast.get_docstring(node)
    }
    return sum(
        token.type not in _LAYOUT
        and not (token.type == tokenize.STRING and token.start[0] in docstrings)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )


def native_tokens(text: str) -> int:
    """Returns the number of tokens in a C or JavaScript file."""
    return len(_TOKEN.findall(_COMMENT.sub("", text)))


def long_functions(text: str) -> list[str]:
    """Returns the functions of a Python module that exceed 60 lines."""
    return [
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, _FUNCTION)
        and (node.end_lineno or 0) - node.lineno + 1 > LONGEST_FUNCTION
    ]


def main() -> int:
    """Prints the table; returns the exit code."""
    package = ROOT / "harness"
    sizes: Counter[str] = Counter()
    faults = []
    for path in sorted(package.rglob("*")):
        inside = path.relative_to(package)
        if path.suffix == ".py":
            text = path.read_text(encoding="utf-8")
            room = inside.parts[0] if len(inside.parts) > 1 else "top_level"
            sizes[room] += python_tokens(text)
            faults += [f"{inside}: {name} is longer than 60 lines" for name in long_functions(text)]
        elif path.suffix in {".c", ".cc", ".cpp", ".h", ".js"}:
            sizes[NATIVE] += native_tokens(path.read_text(encoding="utf-8"))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    budgets = settings["tool"]["wellfed"]["tokens"]
    for room, tokens in sorted(sizes.items()):
        budget = budgets.get(room, 0)
        print(f"{room:18}{tokens:8,}{budget:8,}")
        if tokens > budget:
            faults.append(f"{room}: {tokens - budget:,} tokens over its budget")
    print(f"{'Python':18}{sizes.total() - sizes[NATIVE]:8,}")
    print("\n".join(faults), end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
