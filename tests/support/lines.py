"""Which statements of some files ran: those in functions, as importing a file runs all others."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any


class Lines:
    """Notes the lines of ``files`` that run while it watches, new threads included."""

    def __init__(self, files: list[Path]) -> None:
        self._seen: dict[str, set[int]] = {str(file): set() for file in files}

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._called)
        threading.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)
            threading.settrace(None)  # type: ignore[arg-type]

    def missed(self) -> dict[str, set[str]]:
        """By file the first lines, as text, of statements that did not run."""
        found = {}
        for file, seen in self._seen.items():
            text = Path(file).read_text().splitlines()
            found[Path(file).name] = {
                text[span[0] - 1].strip() for span in _statements(file) if not seen & set(span)
            }
        return found

    def _called(self, frame: FrameType, event: str, arg: object) -> Any:
        seen = self._seen.get(frame.f_code.co_filename)
        if seen is None:
            return None
        note = seen.add

        def line(frame: FrameType, event: str, arg: object) -> Any:
            note(frame.f_lineno)
            return line

        return line


def _statements(file: str) -> Iterator[range]:
    """The lines of each statement in a function; of one that holds others, those before them."""
    functions = (
        node
        for node in ast.walk(ast.parse(Path(file).read_text()))
        if isinstance(node, ast.FunctionDef)
    )
    for node in (
        node for function in functions for body in function.body for node in ast.walk(body)
    ):
        told = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if (
            isinstance(node, ast.stmt)
            and not told
            and not isinstance(node, ast.Try | ast.FunctionDef)
        ):
            inner = getattr(node, "body", None)
            yield range(
                node.lineno,
                max(node.lineno, inner[0].lineno - 1 if inner else node.end_lineno or 0) + 1,
            )
