"""The page that ``bench_loader.py`` makes of its results: a table for each part, and whether what it is to show holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from scripts.loader_peers import DECODE, EXAMPLES, PEERS
from scripts.measured import Sample, machine_line, markdown
from scripts.tuner_score import SUFFICIENT, Line, Ratio

Row = dict[str, object]
AGAIN = " again"  # the name of a row's control ends so
NORMALISED = "arrays, normalised"
UNCACHED = "threads"
BARE = "no loader"
_NOISE = SUFFICIENT  # of a rate: less is not told from the same here


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that is to be shown, whether it holds, and the figures that say so."""

    text: str
    holds: bool
    figures: str

    def __str__(self) -> str:
        return f"- {'YES' if self.holds else 'NO'}: {self.text}: {self.figures}."


Piece = list[Row] | str | Claim


@dataclass(slots=True)
class Part:
    """The results of one part: by row and round."""

    rows: dict[str, dict[int, Line]] = field(default_factory=lambda: defaultdict(dict))
    missing: dict[str, str] = field(default_factory=dict)
    cores: float = 0.0

    def has(self, *rows: str) -> bool:
        """Whether all of these were measured, in one round at least."""
        return bool(set.intersection(*(set(self.rows.get(row, ())) for row in rows)))

    def values(self, row: str, figure: Callable[[Line], float]) -> list[float]:
        """A figure in each round."""
        return [figure(line) for line in self.rows[row].values()]

    def middle(self, row: str, figure: Callable[[Line], float]) -> float:
        """Its median."""
        return median(self.values(row, figure))

    def ratio(self, over: str, under: str, figure: Callable[[Line], float]) -> Sample:
        """Of a figure of two rows, paired by round."""
        one, other = self.rows[over], self.rows[under]
        return Sample.of([figure(one[number]) / figure(other[number]) for number in one.keys() & other.keys()])

    def added(self, row: str, figure: Callable[[Line], float]) -> Sample:
        """Of a figure beyond that of a process without a loader, paired by round."""
        one, bare = self.rows[row], self.rows[BARE]
        return Sample.of([figure(one[number]) - figure(bare[number]) for number in one.keys() & bare.keys()])

    def least(self, rows: Iterable[str], figure: Callable[[Line], float]) -> str | None:
        """The row of which the median is the least; None where none was measured."""
        return min((row for row in rows if row in self.rows), key=lambda row: self.middle(row, figure), default=None)


def collect(lines: Iterable[Line]) -> dict[str, Part]:
    """The parts, in the order of the file; a row measured in spite of an earlier failure is not missing."""
    parts: dict[str, Part] = defaultdict(Part)
    cores = 0.0
    for line in lines:
        if line["kind"] == "machine":
            cores = line["machine"]["usable_cores"]
            continue
        part = parts[line["part"]]
        part.cores = cores
        if line["kind"] == "missing":
            part.missing[line["row"]] = line["reason"]
        else:
            part.rows[line["row"]][line["round"]] = line
            part.missing.pop(line["row"], None)
    return dict(parts)


def cpu_ms(line: Line) -> float:
    """Processor time of all processes for an image."""
    return float(1e3 * line["cpu_s"] / line["images"])


def rate(line: Line) -> float:
    """Images/s by the clock."""
    return float(line["images"] / line["wall_s"])


def _cost_rows(part: Part, about: Mapping[str, str], unit: float, to: str, limit: str | None) -> Iterator[Row]:
    """A row for each loader: what an image costs, what it gives, and both against ``to`` and ``limit``."""
    name = "ms" if unit == 1 else "us"
    for row in part.rows:
        if "cpu_s" not in next(iter(part.rows[row].values())):
            continue
        cells: Row = {
            "loader": row, "what": about.get(row.removesuffix(AGAIN), ""),
            f"CPU {name} an image": Sample.of([unit * value for value in part.values(row, cpu_ms)]),
            "images/s": f"{part.middle(row, rate):.0f}", "bound": f"{1e3 * part.cores / part.middle(row, cpu_ms):.0f}",
            f"x {to}": f"{part.ratio(to, row, cpu_ms).median:.2f}" if part.has(to, row) else "-",
        }  # fmt: skip
        if limit is not None:
            cells["of full decode"] = f"{part.ratio(limit, row, cpu_ms).median:.2f}" if part.has(limit, row) else "-"
        yield cells | {"n": len(part.rows[row])}


def _control(part: Part, row: str) -> str:
    if not part.has(row, row + AGAIN):
        return ""
    return f"A/A ({row} against itself): {part.ratio(row + AGAIN, row, cpu_ms)}."


def _at_least(part: Part, text: str, over: str | None, under: str | None, wanted: float) -> Iterator[Claim]:
    """That an image costs ``over`` at least ``wanted`` times what it costs ``under``."""
    if over is not None and under is not None and part.has(over, under):
        found = part.ratio(over, under, cpu_ms)
        yield Claim(f"{text}: at least {wanted:g}", found.median >= wanted, f"{over} over {under}: {found}, n = {found.n}")


_OURS = {"processes": "worker processes, whole batches", "threads": "decode threads into a ring of batches"}
_ABOUT = {name: peer.about for name, peer in PEERS.items()} | _OURS | {DECODE: "simplejpeg, from memory, nothing else"}


def jpeg(part: Part) -> Iterator[Piece]:
    """JPEG files at 224 pixels, beside the peers."""
    yield [*_cost_rows(part, _ABOUT, 1.0, EXAMPLES, DECODE)]
    yield _control(part, "threads")
    best, rival = part.least(_OURS, cpu_ms), part.least(PEERS, cpu_ms)
    yield from _at_least(part, "times cheaper than pytorch/examples", EXAMPLES, best, 2.5)
    yield from _at_least(part, "times cheaper than the best peer", rival, best, 1.3)
    yield from _at_least(part, "share of full decode on the same cores", DECODE, best, 0.72)
    for line in part.rows.get("pixels", {}).values():
        figures = f"{line['error']:.3f} in the mean, {line['largest']:.3f} in the worst of {line['images']} images"
        yield Claim("mean absolute error against PIL's crop and resize at most 0.1 grey level", line["error"] <= 0.1, figures)


_ARRAYS = {
    "per item": "PIL, no workers", "per item, workers": "PIL, worker processes", "per item, v2": "v2 on tensors, no workers",
    "processes": "worker processes, whole batches", "arrays": "crop, flip and gather a batch at a time",
    NORMALISED: "the same up to normalised floats, as the recipe gives them",
}  # fmt: skip


def arrays(part: Part) -> Iterator[Piece]:
    """50,000 arrays of 32 x 32 pixels: pad, crop, flip."""
    yield [*_cost_rows(part, _ARRAYS, 1e3, "per item", None)]
    yield _control(part, "arrays")
    usual = part.least(("per item", "per item, workers"), cpu_ms)
    yield from _at_least(part, "times cheaper per core than the recipe, image by image", usual, "arrays", 60)
    for line in part.rows.get("equal", {}).values():
        figures = f"{line['same']} of {line['images']} images"
        yield Claim("bit-equal to PIL's pad, crop and flip", 0 < line["same"] == line["images"], figures)


def cache(part: Part) -> Iterator[Piece]:
    """The same files once they are decoded: data.cache, from the third pass on (the second one's pixels are compared)."""
    yield [*_cost_rows(part, {}, 1.0, UNCACHED, None)]
    yield _control(part, UNCACHED)
    cached = [row for row in part.rows if "," in row]
    yield from _at_least(part, "times cheaper than without", UNCACHED, part.least(cached, cpu_ms), 5)
    digests = {line["digest"] for rounds in part.rows.values() for line in rounds.values()}
    if cached and part.has(UNCACHED):
        figures = f"{len(digests)} digest{'s' * (len(digests) > 1)} of the second pass over {len(part.rows)} rows"
        yield Claim("pixels bit-equal to the uncached feed's", len(digests) == 1, figures)


def train(part: Part) -> Iterator[Piece]:
    """Training, and a device that sleeps through its steps."""
    trained = [row for row in part.rows if row.startswith("train ")]
    feeds = [row for row in ("step alone", "feed old", "feed new") if part.has(row)]
    yield [{
        "what": row, "CPU ms an image": Sample.of(part.values(row, cpu_ms)), "images/s": f"{part.middle(row, rate):.0f}",
        "n": len(part.rows[row]),
    } for row in (*feeds, *trained)]  # fmt: skip
    old, new = ([row for row in trained if (EXAMPLES in row) is theirs] for theirs in (True, False))
    if len(feeds) == 3 and old and new:
        yield _end_to_end(part, old, new)
    for row, wanted, text in (
        ("device, fast", 2.0, "images/s with a sleeping device where the old feed binds, times the old feed's: at least 2"),
        ("device, slow", _NOISE, f"never slower where nothing binds, within noise: at least {_NOISE:g}"),
    ):
        if part.has(row):
            ratios = [_ours(line) / _theirs(line) for line in part.rows[row].values()]
            line = next(iter(part.rows[row].values()))
            figures = f"{Sample.of(ratios)}, n = {len(ratios)}; it takes {line['demand']:.0f} images/s in the first round"
            yield Claim(text, median(ratios) >= wanted, figures)


def _end_to_end(part: Part, old: Sequence[str], new: Sequence[str]) -> Claim:
    """The images/s of training against what the costs of feeds and step allow."""
    step, before, after = (part.middle(row, cpu_ms) for row in ("step alone", "feed old", "feed new"))
    slow, fast = (max(rows, key=lambda row: part.middle(row, rate)) for rows in (old, new))
    gained, possible = part.ratio(fast, slow, rate), (before + step) / (after + step)
    text = "training images/s against pytorch/examples' loader at its best: at least 0.9 of (L_old + T) / (L_new + T)"
    binds = "" if before >= 2 * step else "; but L_old < 2 T, so that nothing is to be shown"
    figures = f"{fast} over {slow}: {gained}, possible {possible:.2f}: {gained.median / possible:.2f}{binds}"
    return Claim(text, gained.median >= 0.9 * possible and not binds, figures)


def _ours(line: Line) -> float:
    return float(next(value for row, value in line["rates"].items() if EXAMPLES not in row and not row.endswith(AGAIN)))


def _theirs(line: Line) -> float:
    return float(max(value for row, value in line["rates"].items() if EXAMPLES in row))


def start(part: Part) -> Iterator[Piece]:
    """To the first batch, and memory."""
    loaders = [row for row in part.rows if row != BARE]
    added = {row: part.added(row, _memory_mb) for row in loaders if part.has(BARE, row)}
    yield [{
        "loader": row, "s to the first batch": Sample.of(part.values(row, _first_s)),
        "MB of all processes": Sample.of(part.values(row, _memory_mb)), "MB that it adds": added.get(row, "-"),
        "n": len(part.rows[row]),
    } for row in loaders]  # fmt: skip
    for row in (row for row in loaders if row.startswith(("threads", "arrays"))):
        found = Sample.of(part.values(row, _first_s))
        yield Claim(f"{row}: start to first batch at most 0.3 s", found.median <= 0.3, f"{found}, n = {found.n}")
    many, few = added.get("processes, 8"), added.get("threads, 8")
    if many is not None and few is not None:
        figures = f"{many} MB over {few} MB, n = {few.n}"
        yield Claim("memory that 8 processes add over what 8 threads add: at least 3", many.median >= 3 * few.median, figures)


def _first_s(line: Line) -> float:
    return float(line["first_s"])


def _memory_mb(line: Line) -> float:
    return float(line["memory_mb"])


def index(part: Part) -> Iterator[Piece]:
    """A tree of empty files."""
    for line in part.rows.get("index", {}).values():
        later = Sample.of(line["later_s"])
        yield Claim(f"index of {line['files']} files: first build under 30 s", line["first_s"] < 30, f"{line['first_s']:.1f} s")
        yield Claim("later under 1.5 s", later.median < 1.5, f"{later} s, n = {later.n}")
        for method, found in line["readers"].items():
            growth = found["after_mb"] / found["before_mb"] - 1
            figures = f"{found['before_mb']:.1f} to {found['after_mb']:.1f} MB of its own, {growth:+.1%}"
            yield Claim(f"a worker ({method}) grows by less than 5 % over an epoch of reads", growth < 0.05, figures)


def tuner(part: Part) -> Iterator[Piece]:
    """What the tuner chooses where it may choose the form, and what it chooses of each form when that is set."""
    rows, claims = [], []
    for workload, rounds in part.rows.items():
        line = rounds[max(rounds)]
        chosen, best = line["choices"]["auto"], max(line["mean"], key=lambda setting: line["mean"][setting])
        found = Ratio.of(line["rates"][chosen], line["rates"][best])
        each = [f"{form} {setting.split()[-1]}: {line['mean'][setting]:.0f}" for form, setting in line["choices"].items()]
        rows.append({
            "workload": workload, "chosen": chosen, "best": best, "chosen / best": found, "each: images/s": ", ".join(each),
            "s": f"{line['costs_s']['auto']:.1f}",
        })  # fmt: skip
        claims.append(chosen == best or found.high >= _NOISE)
    yield rows
    yield Claim("auto chooses the best form, or one within the noise", all(claims), f"{sum(claims)} of {len(claims)} workloads")


PAGES: dict[str, Callable[[Part], Iterator[Piece]]] = {
    page.__name__: page for page in (jpeg, arrays, cache, train, start, index, tuner)
}


NOTES = """## How to read it

- Every measurement is a process of its own, once a round; rounds go there and back through the rows. Figures are medians
  (quartiles) over the rounds, ratios are taken within a round first. Rows named `again` are controls: the same as the row of
  that name.
- CPU: user and system time of the whole process tree, from /proc, between two batches of a loader that runs steadily, divided
  by the images in between: without imports, the start of workers and full buffers. Images/s: of the same window by the clock,
  nothing consuming. Bound: what that much CPU time allows with all cores full.
- JPEG files: 2000 generated pictures with the spectrum of photographs, in ImageNet's common sizes (461 x 396 in the mean),
  quality 92 to 96, 4:2:0, 104 KB in the mean, in the page cache. All rows give shuffled batches of 128 random resized crops
  (area 0.08 to 1, ratio 3/4 to 4/3), mirrored half the time, with a filter that is antialiased (FFCV's averages areas), as
  uint8, pytorch/examples as normalised floats. All have as many workers or threads as there are cores.
- Full decode: the same bytes, in memory, decoded whole by simplejpeg in as many threads into a buffer that is used again.
- Arrays: 50,000 of 32 x 32 pixels, generated; the recipe is torchvision's for CIFAR-10.
- cache: from the third pass on, a whole number of passes; the second pass is compared pixel by pixel by its digest.
- train: the project's small network on crops of 48 pixels of the same files. `feed old` is pytorch/examples' loader alone,
  `feed new` the threads form alone, `step alone` the step with its normalising on one batch over and over. The sleeping
  device takes 0.95 and 0.2 of what the new feed supplies when nothing consumes.
- start: from asking for the loader, everything imported and the files listed, to its first batch. Memory: the proportional
  set of the whole tree when every worker has made three batches; what it adds: beyond that of a process that has imported
  the same and loads nothing.
- index: files made just before, so that their folders are in memory. Memory of a worker's own (what no other process shares),
  two of them reading beside each other.
- tuner: `auto` may choose the form; the others are the tuner's choice where that form is set. All choices are then measured
  in turns; less than 2 % is not told apart."""


def show(lines: Sequence[Line]) -> str:
    """Everything that was measured, as Markdown."""
    parts, machines = collect(lines), [line for line in lines if line["kind"] == "machine"]
    told = dict.fromkeys(f"{line['date']}: {machine_line(line['machine'])}; {', '.join(line['versions'])}" for line in machines)
    page = ["# Loaders beside each other: what was measured", *told]
    if machines:
        loads = [line["load"] for line in machines]
        page.append(f"Load average when a part of the benchmark began: {min(loads):.1f} to {max(loads):.1f}.")
    for name, make in PAGES.items():
        if name in parts:
            page += [f"## {name}: {(make.__doc__ or '').rstrip('.')}", *_pieces(make(parts[name]))]
            page += [f"Not measured: {row}: {reason}." for row, reason in parts[name].missing.items()]
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
