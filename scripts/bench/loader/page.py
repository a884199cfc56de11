"""Makes the page of ``run.py``: a table for each part, and its claims."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from scripts.bench.loader.peers import DECODE, EXAMPLES, PEERS
from scripts.bench.loader.score import AGAIN, BARE, Part, collect, cpu_ms, rate
from scripts.bench.tables import Line, Sample, machine_line, markdown

Row = dict[str, object]
NORMALIZED = "arrays, normalized"
UNCACHED = "threads"
# ratio of rates; closer ones cannot be distinguished here
_NOISE = 0.98


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim, whether it holds, and the evidence."""

    text: str
    holds: bool
    figures: str

    def __str__(self) -> str:
        return f"- {'YES' if self.holds else 'NO'}: {self.text}: {self.figures}."


Piece = list[Row] | str | Claim


def _cost_rows(
    part: Part, about: Mapping[str, str], unit: float, to: str, limit: str | None
) -> Iterator[Row]:
    """Yields each loader's cost per image, also relative to ``to`` and ``limit``."""
    name = "ms" if unit == 1 else "us"

    def against(other: str, row: str) -> str:
        if not part.has(other, row):
            return "-"
        return f"{part.ratio(other, row, cpu_ms).median:.2f}"

    for row in part.rows:
        if "cpu_s" not in next(iter(part.rows[row].values())):
            continue
        cells: Row = {
            "loader": row, "what": about.get(row.removesuffix(AGAIN), ""),
            f"CPU {name} an image": Sample.of([unit * value for value in part.values(row, cpu_ms)]),
            "images/s": f"{part.middle(row, rate):.0f}",
            "bound": f"{1e3 * part.cores / part.middle(row, cpu_ms):.0f}",
            f"x {to}": against(to, row),
        }  # fmt: skip
        if limit is not None:
            cells["of full decode"] = against(limit, row)
        yield cells | {"n": len(part.rows[row])}


def _control(part: Part, row: str) -> str:
    if not part.has(row, row + AGAIN):
        return ""
    return f"A/A ({row} against itself): {part.ratio(row + AGAIN, row, cpu_ms)}."


def _at_least(
    part: Part, text: str, over: str | None, under: str | None, wanted: float
) -> Iterator[Claim]:
    """Yields the claim that ``over`` costs at least ``wanted`` times as much as ``under``."""
    if over is not None and under is not None and part.has(over, under):
        found = part.ratio(over, under, cpu_ms)
        yield Claim(
            f"{text}: at least {wanted:g}",
            found.median >= wanted,
            f"{over} over {under}: {found}, n = {found.n}",
        )


_OURS = {
    "processes": "worker processes, whole batches",
    "threads": "decode threads into a ring of batches",
}
_ABOUT = (
    {name: peer.about for name, peer in PEERS.items()}
    | _OURS
    | {DECODE: "simplejpeg, from memory, nothing else"}
)


def jpeg(part: Part) -> Iterator[Piece]:
    """JPEG files at 224 pixels, compared with the peers."""
    yield [*_cost_rows(part, _ABOUT, 1.0, EXAMPLES, DECODE)]
    yield _control(part, "threads")
    best = part.least(_OURS, cpu_ms)
    rival = part.least(PEERS, cpu_ms)
    yield from _at_least(part, "times cheaper than pytorch/examples", EXAMPLES, best, 2.5)
    missing = [peer for peer in PEERS if peer not in part.rows]
    among = (
        f"the best of {len(PEERS) - len(missing)} peers"
        + f" (missing: {', '.join(missing)})" * bool(missing)
    )
    yield from _at_least(part, f"times cheaper than {among}", rival, best, 1.3)
    yield from _at_least(part, "share of full decode on the same cores", DECODE, best, 0.72)
    for line in part.rows.get("pixels", {}).values():
        figures = (
            f"{line['error']:.3f} in the mean, {line['largest']:.3f} in the worst of "
            f"{line['images']} images"
        )
        yield Claim(
            "mean absolute error against PIL's crop and resize at most 0.1 gray level",
            line["error"] <= 0.1,
            figures,
        )


KINDS = ("train", "evaluate")
FILTERS = ("bilinear", "bicubic")


def filters(part: Part) -> Iterator[Piece]:
    """The same files with threads, bilinear and bicubic, in training and evaluation."""
    first = f"{KINDS[0]}, {FILTERS[0]}"
    yield [*_cost_rows(part, {}, 1.0, first, None)]
    yield _control(part, first)
    for kind in KINDS:
        plain, cubic = (f"{kind}, {name}" for name in FILTERS)
        pairs = ((cubic, plain), (plain, f"timm, {plain}"), (cubic, f"timm, {cubic}"))
        for over, under in (pair for pair in pairs if part.has(*pair)):
            speed, cost = (part.ratio(over, under, figure) for figure in (rate, cpu_ms))
            yield f"{over} over {under}: images/s {speed}, CPU {cost}, n = {speed.n}."


_ARRAYS = {
    "per item": "PIL, no workers", "per item, workers": "PIL, worker processes",
    "per item, v2": "v2 on tensors, no workers",
    "processes": "worker processes, whole batches",
    "arrays": "crop, flip and gather a batch at a time",
    NORMALIZED: "the same up to normalized floats, as the recipe gives them",
}  # fmt: skip


def arrays(part: Part) -> Iterator[Piece]:
    """50,000 arrays of 32 x 32 pixels: pad, crop, flip."""
    yield [*_cost_rows(part, _ARRAYS, 1e3, "per item", None)]
    yield _control(part, "arrays")
    usual = part.least(("per item", "per item, workers"), cpu_ms)
    if usual is not None and part.has(usual, NORMALIZED):
        found = part.ratio(usual, NORMALIZED, cpu_ms)
        yield f"Normalized floats of both: {usual} over {NORMALIZED}: {found}, n = {found.n}."
    text = (
        "uint8 batches, times cheaper per core than the recipe's normalized floats, image by image"
    )
    yield from _at_least(part, text, usual, "arrays", 60)
    for line in part.rows.get("equal", {}).values():
        figures = f"{line['same']} of {line['images']} images"
        yield Claim(
            "bit-equal to PIL's pad, crop and flip", 0 < line["same"] == line["images"], figures
        )


def cache(part: Part) -> Iterator[Piece]:
    """The same files, decoded earlier: data.cache, in the second and later passes."""
    later = {
        row: Sample.of(part.values(row, lambda line: cpu_ms(line["later"]))) for row in part.rows
    }
    yield [
        cells | {"later: CPU ms": later[str(cells["loader"])]}
        for cells in _cost_rows(part, {}, 1.0, UNCACHED, None)
    ]
    yield _control(part, UNCACHED)
    cached = [row for row in part.rows if "," in row]
    yield from _at_least(
        part, "second pass: times cheaper than without", UNCACHED, part.least(cached, cpu_ms), 5
    )
    digests = {line["digest"] for rounds in part.rows.values() for line in rounds.values()}
    if cached and part.has(UNCACHED):
        figures = (
            f"{len(digests)} digest{'s' * (len(digests) > 1)} of a pass over {len(part.rows)} rows"
        )
        yield Claim("pixels bit-equal to the uncached feed's", len(digests) == 1, figures)


def train(part: Part) -> Iterator[Piece]:
    """Training, and a device whose steps sleep."""
    trained = [row for row in part.rows if row.startswith("train ")]
    feeds = [row for row in ("step alone", "feed old", "feed new") if part.has(row)]
    yield [{
        "what": row, "CPU ms an image": Sample.of(part.values(row, cpu_ms)),
        "images/s": f"{part.middle(row, rate):.0f}", "n": len(part.rows[row]),
    } for row in (*feeds, *trained)]  # fmt: skip
    # whole training, on their loader and on ours
    old, new = ([row for row in trained if (EXAMPLES in row) is theirs] for theirs in (True, False))
    if len(feeds) == 3 and old and new:
        yield _end_to_end(part, old, new)
    # a sleeping device, which the old feed keeps waiting or not
    for row, wanted, text in (
        (
            "device, fast",
            2.0,
            (
                "images/s with a sleeping device where the old feed binds, times the old feed's: "
                "at least 2"
            ),
        ),
        (
            "device, slow",
            _NOISE,
            f"never slower where nothing binds, within noise: at least {_NOISE:g}",
        ),
    ):
        if part.has(row):
            lines = [*part.rows[row].values()]
            names = lines[0]["rates"]
            theirs = [name for name in names if EXAMPLES in name]
            ours = next(name for name in names if name not in theirs and not name.endswith(AGAIN))
            rates = [line["rates"] for line in lines]
            ratios = [found[ours] / max(found[name] for name in theirs) for found in rates]
            rivals = {name: median(found[name] for found in rates) for name in theirs}
            figures = (
                f"{Sample.of(ratios)}, n = {len(ratios)}; it takes {lines[0]['demand']:.0f} "
                f"images/s in the first round; the old feed is best as {_best(rivals)}"
            )
            yield Claim(text, median(ratios) >= wanted, figures)


def _end_to_end(part: Part, old: Sequence[str], new: Sequence[str]) -> Claim:
    """Compares training's images/s with the bound from the costs of feeds and step."""
    step, before, after = (
        part.middle(row, cpu_ms) for row in ("step alone", "feed old", "feed new")
    )
    slow, fast = (max(rows, key=lambda row: part.middle(row, rate)) for rows in (old, new))
    rival = _best({row: part.middle(row, rate) for row in old})
    gained = part.ratio(fast, slow, rate)
    possible = (before + step) / (after + step)
    text = (
        "training images/s against pytorch/examples' loader at its best: at least 0.9 of "
        "(L_old + T) / (L_new + T)"
    )
    binds = "; but L_old < 2 T, so that nothing is to be shown" * (before < 2 * step)
    figures = (
        f"{fast} over {rival}: {gained}, possible {possible:.2f}: "
        f"{gained.median / possible:.2f}{binds}"
    )
    return Claim(text, gained.median >= 0.9 * possible and not binds, figures)


def _best(rates: Mapping[str, float]) -> str:
    """Returns the row with the best rate; notes if it had the most workers of all."""
    best = max(rates, key=lambda row: rates[row])
    most = max(rates, key=lambda row: int(row.rpartition(" ")[2]))
    return best + " (the most workers that were tried)" * (best == most)


def start(part: Part) -> Iterator[Piece]:
    """Time to the first batch, and memory."""
    loaders = [row for row in part.rows if row != BARE]
    added = {row: part.added(row, _memory_mb) for row in loaders if part.has(BARE, row)}
    yield [{
        "loader": row, "s to the first batch": Sample.of(part.values(row, _first_s)),
        "MB of all processes": Sample.of(part.values(row, _memory_mb)),
        "MB that it adds": added.get(row, "-"), "n": len(part.rows[row]),
    } for row in loaders]  # fmt: skip
    for row in (row for row in loaders if row.startswith(("threads", "arrays"))):
        found = Sample.of(part.values(row, _first_s))
        yield Claim(
            f"{row}: start to first batch at most 0.3 s",
            found.median <= 0.3,
            f"{found}, n = {found.n}",
        )
    many = added.get("processes, 8")
    few = added.get("threads, 8")
    if many is not None and few is not None:
        figures = f"{many} MB over {few} MB, n = {few.n}"
        yield Claim(
            "memory that 8 processes add over what 8 threads add: at least 3",
            many.median >= 3 * few.median,
            figures,
        )


def _first_s(line: Line) -> float:
    return float(line["first_s"])


def _memory_mb(line: Line) -> float:
    return float(line["memory_mb"])


PAGES: dict[str, Callable[[Part], Iterator[Piece]]] = {
    page.__name__: page for page in (jpeg, filters, arrays, cache, train, start)
}


NOTES = """## How to read it

- Every measurement is a process of its own, once a round; rounds go there and back through the
  rows. Figures are medians (quartiles) over the rounds, ratios are taken within a round first. Rows
  named `again` are controls: the same as the row of that name.
- CPU: user and system time of the whole process tree, from /proc, between two batches of a loader
  that runs steadily, divided by the images in between: without imports, the start of workers and
  full buffers. Images/s: of the same window by the clock, nothing consuming. Bound: what that much
  CPU time allows with all cores full.
- JPEG files: 2000 generated pictures with the spectrum of photographs, in ImageNet's common sizes
  (461 x 396 in the mean), quality 92 to 96, 4:2:0, 104 KB in the mean, in the page cache. All rows
  give shuffled batches of 128 random resized crops (area 0.08 to 1, ratio 3/4 to 4/3), mirrored
  half the time, with a filter that is antialiased (FFCV's averages areas), as uint8,
  pytorch/examples as normalized floats. All have as many workers or threads as there are cores.
- Full decode: the same bytes, in memory, decoded whole by simplejpeg in as many threads into a
  buffer that is used again.
- filters: the same files by the threads form and by timm's loader, whose filter is Pillow's.
  `evaluate` is a resize of the shorter side to 256 and a center crop, of the same images.
- Arrays: 50,000 of 32 x 32 pixels, generated; the recipe is torchvision's for CIFAR-10.
- cache: the first pass fills it; figures are of the second pass, whole, from its beginning with
  empty buffers. Later: a whole number of passes from the third on. Pixels are compared by the
  digest of one more pass, with the second one's crops.
- train: the project's small network on crops of 48 pixels of the same files. `feed old` is
  pytorch/examples' loader alone, `feed new` the threads form alone, `step alone` the step with its
  normalization, repeated on one batch. The old feed is tried with up to twice as many workers as
  there are cores. The sleeping device takes 0.95 and 0.2 of what the new feed supplies when nothing
  consumes.
- start: from `iter()`, everything imported, the files listed and the loader made, to its first
  batch. Memory: the proportional set of the whole tree when every worker has made three batches;
  what it adds: beyond that of a process that has imported the same and loads nothing."""


def show(lines: Sequence[Line]) -> str:
    """Returns all results as Markdown."""
    parts = collect(lines)
    machines = [line for line in lines if line["kind"] == "machine"]
    told = dict.fromkeys(
        f"{line['date']}: {machine_line(line['machine'])}; {', '.join(line['versions'])}"
        for line in machines
    )
    page = ["# Loaders beside each other: what was measured", *told]
    if machines:
        loads = [line["load"] for line in machines]
        page.append(
            f"Load average when a part of the benchmark began: {min(loads):.1f} to "
            f"{max(loads):.1f}."
        )
    for name, make in PAGES.items():
        if name in parts:
            part = parts[name]
            page.append(f"## {name}: {(make.__doc__ or '').rstrip('.')}")
            page.append(
                f"Commit {part.key['commit'] or 'unknown'}; {part.key['workers']} workers; windows "
                f"of {part.key['seconds']:g} s at least."
            )
            page += _pieces(make(part))
            page += [f"Not measured: {row}: {reason}." for row, reason in part.missing.items()]
    return "\n\n".join([*page, NOTES]) + "\n"


def _pieces(pieces: Iterable[Piece]) -> Iterator[str]:
    """Tables and sentences, then all claims as one list."""
    claims: list[str] = []
    for piece in pieces:
        if isinstance(piece, Claim):
            claims.append(str(piece))
        elif piece:
            yield markdown(piece) if isinstance(piece, list) else piece
    if claims:
        yield "\n".join(claims)
