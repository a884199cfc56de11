r"""Measures the cost of loading, compared with other loaders and with decoding only.

Every row is measured in a separate process, once per round; rounds alternate the order of rows, and
one row is measured twice as a control. The other loaders are not dependencies of this project; the
page lists those that cannot be imported. To install all of them:

    uv run --with timm --with torchcodec --with spdl --with nvidia-dali-cuda120 --with ffcv \
        python -m scripts.bench.loader.run
    uv run python -m scripts.bench.loader.run --part arrays,cache
    uv run python -m scripts.bench.loader.run --table

ffcv is compiled on the spot and needs a C++ compiler, pkg-config, OpenCV and libturbojpeg with
their headers (Debian: libopencv-dev libturbojpeg0-dev). Each measurement is a line of the results
file; existing lines with the same commit, workers and seconds are not measured again, and a table
uses only one such combination.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.runtime import limits
from scripts.bench.loader.data import cifar_like, jpegs, warm
from scripts.bench.loader.page import FILTERS, KINDS, NORMALIZED, UNCACHED, show
from scripts.bench.loader.peers import DECODE, EXAMPLES, PEERS
from scripts.bench.loader.score import AGAIN, BARE, KEY
from scripts.bench.loader.turn import FailedError, ask
from scripts.bench.tables import PAGES, ROOT, Results, listed, machine, tell, write

PAGE = PAGES / "loader.md"
# side of the crops on which a small network is trained, in pixels
_SMALL = 48


@dataclass(frozen=True, slots=True)
class Row:
    """A row of measurements.

    Attributes:
        name: label of the table row.
        measure: key in ``in_use.MEASURES``.
        arguments: its arguments.
        once: only in the first round, for constant or slow measurements.
    """

    name: str
    measure: str
    arguments: dict[str, Any] = field(default_factory=dict)
    once: bool = False


@dataclass(frozen=True, slots=True)
class Setup:
    """Location of the data, and amount of measurement.

    Attributes:
        commit: the commit under test.
        folder: for generated data.
        workers: of every loader, processes or threads.
        seconds: least window of one measurement.
    """

    commit: str
    folder: Path
    workers: int
    seconds: float

    @property
    def key(self) -> dict[str, Any]:
        """The properties that comparable measurements of a row share."""
        return {name: getattr(self, name) for name in KEY}

    @property
    def jpegs(self) -> dict[str, Any]:
        """The arguments of a measurement on the JPEG files."""
        return {"root": str(jpegs(self.folder)), "seconds": self.seconds}

    @property
    def arrays(self) -> dict[str, Any]:
        """The arguments of a measurement on the small arrays."""
        cifar_like(self.folder)
        return {"folder": str(self.folder), "seconds": self.seconds}


def jpeg(s: Setup) -> Iterator[Row]:
    """Wellfed's backends and the peers."""
    common = s.jpegs | {"workers": s.workers}
    for name in (DECODE, *PEERS):
        yield Row(name, "peer", common | {"row": name})
    for name, form in (
        ("processes", "processes"),
        ("threads", "threads"),
        ("threads" + AGAIN, "threads"),
    ):
        yield Row(name, "form", common | {"form": form})
    yield Row("pixels", "pixels", {"root": common["root"]}, once=True)


def filters(s: Setup) -> Iterator[Row]:
    """Bilinear and bicubic crops, beside timm's loader."""
    common = s.jpegs | {"workers": s.workers}
    for kind in KINDS:
        for name in FILTERS:
            told = common | {"interpolation": name, "trains": kind == KINDS[0]}
            yield Row(f"{kind}, {name}", "filtered", told | {"own": True})
            if PEERS["timm"].missing() is None:
                yield Row(f"timm, {kind}, {name}", "filtered", told | {"own": False})
    told = common | {"interpolation": FILTERS[0], "trains": True, "own": True}
    yield Row(f"{KINDS[0]}, {FILTERS[0]}{AGAIN}", "filtered", told)


def arrays(s: Setup) -> Iterator[Row]:
    """Arrays in memory."""
    for name, workers, pictures in (
        ("per item", 0, True),
        ("per item, workers", s.workers, True),
        ("per item, v2", 0, False),
    ):
        yield Row(name, "per_item", s.arrays | {"workers": workers, "pictures": pictures})
    yield Row("processes", "arrays", s.arrays | {"form": "processes", "workers": s.workers})
    for name in ("arrays", NORMALIZED, "arrays" + AGAIN):
        yield Row(
            name,
            "arrays",
            s.arrays | {"form": "arrays", "workers": 0, "normalized": name == NORMALIZED},
        )
    yield Row("equal", "equal", {"folder": str(s.folder), "form": "arrays"}, once=True)


def cache(s: Setup) -> Iterator[Row]:
    """The cache of decoded pixels."""
    kept = (
        (UNCACHED, "none"),
        ("threads, ram", "ram"),
        ("threads, disk", "disk"),
        ("processes, ram", "ram"),
    )
    for name, where in (*kept, (UNCACHED + AGAIN, "none")):
        form = name.removesuffix(AGAIN).partition(",")[0]
        yield Row(name, "passes", s.jpegs | {"form": form, "workers": s.workers, "cache": where})


def train(s: Setup) -> Iterator[Row]:
    """Training on the feeds."""
    common = s.jpegs | {"side": _SMALL}
    yield Row("step alone", "step", common)
    yield Row("feed old", "recipe", common | {"workers": s.workers})
    yield Row("feed new", "form", common | {"form": "threads", "workers": s.workers})
    for name, counts in (
        (EXAMPLES, range(2 * s.workers + 1)),
        ("threads", range(1, s.workers + 1)),
    ):
        for count in counts:
            yield Row(f"train {name} {count}", "training", common | {"row": name, "workers": count})
    others = [*range(1, 2 * s.workers + 1)]
    for name, share in (("device, fast", 0.95), ("device, slow", 0.2)):
        yield Row(
            name,
            "paced",
            s.jpegs | {"form": "threads", "workers": s.workers, "share": share, "others": others},
        )


def start(s: Setup) -> Iterator[Row]:
    """First batches, and memory."""
    common = {"root": s.jpegs["root"], "folder": s.arrays["folder"]}
    yield Row(BARE, "start", common | {"row": BARE, "workers": 0})
    for name in ("threads", "processes", EXAMPLES):
        for count in dict.fromkeys((s.workers, 8)):
            yield Row(f"{name}, {count}", "start", common | {"row": name, "workers": count})
    yield Row("arrays", "start", common | {"row": "arrays", "workers": 0})


PARTS: dict[str, Callable[[Setup], Iterator[Row]]] = {
    part.__name__: part for part in (jpeg, filters, arrays, cache, train, start)
}
# 3 of the others
_ROUNDS = {"jpeg": 4, "train": 2}


def run(part: str, setup: Setup, rounds: int, results: Results, deadline: float) -> bool:
    """Measures what the results lack of ``part``; returns False if time is up."""
    rows = [*PARTS[part](setup)]
    absent = {
        name: why for name, peer in PEERS.items() if part == "jpeg" and (why := peer.missing())
    }
    for name, why in absent.items():
        results.add(kind="missing", part=part, row=name, **setup.key, reason=why)
    for number in range(rounds):
        for row in rows if number % 2 == 0 else reversed(rows):
            there = {"part": part, "row": row.name, "round": number, **setup.key}
            if row.name in absent or (row.once and number) or results.has(kind="turn", **there):
                continue
            if time.monotonic() > deadline:
                return False
            _measure(row, there, setup, results)
    return True


def _measure(row: Row, there: dict[str, Any], setup: Setup, results: Results) -> None:
    """Adds a line with the key ``there``: the result, or why there is none."""
    told = row.arguments | ({"back": there["round"] % 2 == 1} if row.measure == "paced" else {})
    served = "processes" in (told.get("form"), told.get("row"))
    try:
        found = ask(row.measure, str(setup.folder / "cache"), serves=served, **told)
    except (FailedError, OSError) as error:
        results.add(kind="missing", **there, reason=str(error).rstrip("."))
    else:
        results.add(kind="turn", **there, **found)
    tell(json.dumps(results.lines[-1])[:300])


def _commit() -> str:
    """Returns the commit of the working tree, which may have changes; empty without one."""
    # no git
    with suppress(FileNotFoundError):
        told = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(
            told, cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
    return ""


def _versions() -> list[str]:
    own = [f"{name} {metadata.version(name)}" for name in ("numpy", "pillow", "simplejpeg")]
    return own + sorted(
        {peer.version() for peer in PEERS.values() if peer.module and peer.missing() is None}
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Compare wellfed's loaders with those of other projects.",
        epilog="\n".join(f"{name:8} {part.__doc__}" for name, part in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--part", help="comma-separated parts, from those below (default: all)")
    add(
        "--rounds",
        type=int,
        help="rounds of each part (jpeg 4, train 2, others 3)",
    )
    add("--seconds", type=float, default=3.0, help="least window of one measurement (default 3)")
    add(
        "--workers",
        type=int,
        default=max(1, int(limits.measure().cores)),
        help="workers of every loader (default: usable cores)",
    )
    add(
        "--results",
        type=Path,
        default=Path("outputs/loader.jsonl"),
        help="file of all measurements, which is appended to",
    )
    add(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "wellfed-loader",
        help="folder for generated data",
    )
    add("--minutes", type=float, default=float("inf"), help="stop after this many minutes")
    add("--table", action="store_true", help="only print existing results")
    add(
        "--write",
        action="store_true",
        help=f"also write it to {PAGE.relative_to(ROOT)}, with the results beside it",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    a = parser.parse_args(argv)
    parts = listed(parser, "--part", a.part, [*PARTS])
    results = Results(a.results)
    # measure what the results lack
    if not a.table:
        a.folder.mkdir(parents=True, exist_ok=True)
        setup = Setup(_commit(), a.folder.resolve(), a.workers, a.seconds)
        warm(jpegs(setup.folder))
        deadline = time.monotonic() + 60 * a.minutes
        today = datetime.now(UTC).date().isoformat()
        try:
            for part in parts:
                results.add(
                    kind="machine",
                    date=today,
                    load=os.getloadavg()[0],
                    machine=machine(),
                    versions=_versions(),
                )
                if not run(part, setup, a.rounds or _ROUNDS.get(part, 3), results, deadline):
                    tell("time is up; run again to continue")
                    break
        except KeyboardInterrupt:
            return 130
    # show all results
    page = show(results.lines)
    print(page)
    if a.write:
        write(PAGE, page)
        write(
            PAGE.with_suffix(".jsonl"), "".join(json.dumps(line) + "\n" for line in results.lines)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
