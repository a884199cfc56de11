"""Writes one page for a run or for all runs of a sweep: ``wellfed page FOLDER``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ...config import ConfigError
from ...runtime.errors import printable, tell
from .document import write_sweep


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page and prints its path; returns 0, or 2 if there is no run or disk space."""
    parser = argparse.ArgumentParser(
        prog="wellfed page", description="Write report.html for a run or a sweep."
    )
    parser.add_argument(
        "folder",
        type=Path,
        help="run folder, or a folder with runs below it, such as multirun/DATE/TIME",
    )
    try:
        path, runs, notes = write_sweep(parser.parse_args(arguments).folder)
    except OSError as error:
        return tell([ConfigError(str(error))])
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    print(f"{path}: {runs} run{'s' * (runs != 1)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
