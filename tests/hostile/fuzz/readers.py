"""The readers of files, by name, and how many changed files each is given."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from tests.hostile.fuzz import data as fuzz_data
from tests.hostile.fuzz import runs as fuzz_runs
from tests.hostile.fuzz.reader import Reader

Make = Callable[[Path], Reader]

READERS: dict[str, tuple[int, Make]] = {
    **{
        f"image, {kind}": (3000, partial(fuzz_data.images, kind))
        for kind in ("JPEG", "PNG", "WebP", "GIF", "BMP", "TIFF", "PPM")
    },
    "decoded disk cache": (1000, fuzz_data.decoded),
    "index of a tree": (1000, fuzz_data.index_file),
    "shapes.json": (1000, fuzz_data.shapes_file),
    "checkpoint's record": (1000, fuzz_runs.record),
    "checkpoint": (1000, fuzz_runs.checkpoint_file),
    **{name.rpartition("/")[2]: (500, partial(fuzz_runs.run, name)) for name in fuzz_runs.RUN},
    "file of settings": (500, fuzz_runs.settings),
}


def tried(name: str, reader: Reader, seed: int, case: int) -> str:
    """Returns what ``reader`` refused of a changed file; raises what it had not foreseen."""
    rng = random.Random(f"{seed} {name} {case}")
    data = reader.file(rng)
    with redirect_stdout(io.StringIO()):
        return reader.read(data)
