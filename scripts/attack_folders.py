"""Run folders, checkpoints and remembered answers, with odd values in every place of them."""

from __future__ import annotations

import hashlib
import html
import io
import itertools
import json
import math
import random
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf

from harness.cli import job
from harness.report.compare.__main__ import main as compare
from harness.report.page.__main__ import main as page
from harness.report.page.plugin import StallsPlugin
from harness.training import checkpoint_read
from scripts import fuzz_data, fuzz_runs
from scripts.attack_case import Case, End, inside, quiet
from scripts.attack_values import checked, register, trained
from scripts.fuzz_reader import Reader

_SCRIPT = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>"
_JSON: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, -0.0, 1.5, 1e308, 1e-320, 10**30, -(10**30), 10**400, math.nan,
    math.inf, -math.inf, "", "x", "1", _SCRIPT, "\x1b[31m\n\x07", "\u2028\u2029", "\ud800",
    "x" * 100_000, "|a|b\\|", "${x} $title", [], [1], [None], [[]], ["x"] * 3, {}, {"a": 1},
    {"": None}, {_SCRIPT: _SCRIPT}, {"__proto__": {"a": 1}}, {"\ud800": "\ud800"}, {"x" * 5000: 1},
    [{"median": 1}], "NaN", "Infinity", "=1+1",
)  # fmt: skip
_GONE = object()
_SMALL = (
    "data=digits", "data.image_size=16", "data.eval_resize=16", "loader.batch_size=8",
    "device=cpu", "trainer.num_threads=1", "loader.num_workers=0",
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the way to each node, the whole first; of a long list, to two of its items."""
    yield path
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = [*enumerate(value)]
        if len(items) > 20:
            items = [items[0], items[-1]]
    for key, item in items:
        yield from places(item, (*path, key))


def replaced(value: Any, path: Sequence[Any], odd: Any) -> Any:
    """Returns ``value`` with ``odd`` in one place of it."""
    if not path:
        return odd
    key, *rest = path
    changed = dict(value) if isinstance(value, dict) else list(value)
    if odd is _GONE and not rest:
        del changed[key]
    else:
        changed[key] = replaced(value[key], rest, odd)
    return type(value)(changed) if isinstance(value, tuple) else changed


def _strict(text: str) -> Any:
    def no(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=no)


def genuine(place: Path) -> Path:
    """Returns the folder of a run that was made for it, with all that a run may leave."""
    register()
    made = place / "outputs/genuine"
    overrides = (
        *_SMALL,
        "trainer.max_steps=40",
        "watch.window_steps=5",
        "checkpoint.every_steps=20",
    )
    with inside(), quiet():
        config = checked(overrides)
        settings = {"config.yaml": OmegaConf.to_yaml(OmegaConf.structured(config))}
        job.run(0, job.Job(config, made, overrides, settings))
    report = json.loads((made / "report.json").read_text())
    known = {**fuzz_runs.REPORT, **report}
    (made / "report.json").write_text(json.dumps(known | {"error": None}))
    (made / "tuning.json").write_text(json.dumps(fuzz_runs.TUNING))
    return made


def _told(text: str, begins: tuple[str, ...]) -> str:
    """Returns what is wrong with the lines that a command printed."""
    for line in text.splitlines():
        if not line.startswith(begins):
            return f"a line of stderr: {line[:200]!r}"
    # a table has lines of its own
    if bad := re.search(r"[^\n\x20-\x7e\x80-\U0010ffff]|[\x80-\x9f\u2028\u202e]", text):
        return f"a control character was printed: {text[max(0, bad.start() - 40) :][:120]!r}"
    return ""


def _called(main: Callable[[Sequence[str]], int], arguments: Sequence[str], codes: set[int]) -> str:
    with quiet() as text:
        code = main(arguments)
    if code not in codes:
        return f"exit code {code}: {text.getvalue()[-200:]}"
    return ""


def _printed(main: Any, arguments: Sequence[str], codes: set[int]) -> tuple[str, str, str]:
    """Returns what is wrong, stdout, and the line of an error."""
    import contextlib

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    wrong = "" if code in codes else f"exit code {code}"
    wrong = wrong or _told(err.getvalue(), ("error: ", "note: ", "regression: "))
    wrong = wrong or _told(out.getvalue(), ("",))
    return wrong, out.getvalue(), err.getvalue()


def _served(root: Path) -> str:
    """Returns what is wrong with what the tab is given."""
    plugin = StallsPlugin(
        SimpleNamespace(logdir=str(root), flags=SimpleNamespace(logdir_spec=None))
    )
    apps = plugin.get_plugin_apps()
    for path, query in (("/runs", ""), ("/run", "name=run"), ("/run", "name=../../etc")):
        status: list[str] = []
        (body,) = apps[path]({"QUERY_STRING": query}, lambda code, _, s=status: s.append(code))
        _strict(body.decode())
        if status[0].startswith("5"):
            return f"{path}: {status[0]}: {body[:200]!r}"
    return ""


def shown(root: Path, other: Path) -> End:
    """Makes the page of ``root``, compares it with ``other``, and serves both."""
    wrong, _, error = _printed(page, [str(root)], {0, 2})
    if wrong:
        return End(wrong=f"page: {wrong}")
    if (root / "report.html").exists():
        text = (root / "report.html").read_text()
        data = re.search(r"(?s)<script[^>]*application/json[^>]*>(.*?)</script>", text)
        if data is None or "<" in data[1]:
            return End(wrong="page: a text of the run may end its element")
        _strict(html.unescape(data[1]))
        if text.count("alert(1)") != data[1].count("alert(1)"):
            return End(wrong="page: a text of the run lies outside of its data")
    for more in ((), ("--json",), ("--fail-beyond", "speed=0.95", "stall=+0.05", "top1=-0.01")):
        for folders in ([str(other), str(root)], [str(root), str(other)]):
            wrong, out, told = _printed(compare, [*folders, *more], {0, 1, 2})
            if more == ("--json",) and not wrong:
                _strict(out)
            if wrong:
                return End(wrong=f"compare {' '.join(more)}: {wrong}")
            error = error or told
    if wrong := _served(root):
        return End(wrong=f"tab: {wrong}")
    return End(error.strip()[:600])


def folders(seed: int, place: Path) -> Iterator[Case]:
    """Run folders with odd values in each place, and with odd names."""
    made = genuine(place)
    root = place / "shown"
    shutil.copytree(made, root / "run")
    rng = random.Random(f"folders {seed}")
    wholes = {
        name: (made / name).read_bytes() for name in ("report.json", "tuning.json", "metrics.jsonl")
    }

    def tried(name: str, data: bytes) -> End:
        (root / "run" / name).write_bytes(data)
        try:
            return shown(root, made)
        finally:
            (root / "run" / name).write_bytes(wholes[name])

    def named(name: str) -> End:
        with inside() as there:
            shutil.copytree(made, there / "runs" / name)
            return shown(there / "runs", made)

    names = (
        "\x1b[31mred", "a\nb", "\udcff", _SCRIPT.replace("/", "\u2215"), "${x}", "$title", "%s",
        " ", "-x", "--json", "a|b", "\u202eabc", "\x7f", "\t", "n" * 255, "'", '"', "\\", "a,b",
        "\u2028", "\x9b31m",
    )  # fmt: skip
    for name in names:
        yield Case(f"a run's folder named {ascii(name)[:80]}", partial(named, name))
    lines = wholes["metrics.jsonl"].splitlines()
    walked: list[tuple[str, Any, tuple[Any, ...]]] = []
    for name in ("report.json", "tuning.json"):
        document = json.loads(wholes[name])
        walked += [(name, document, path) for path in places(document)]
    line = json.loads(lines[0])
    walked += [("metrics.jsonl", line, path) for path in places(line)]
    while True:
        for name, document, path in rng.sample(walked, len(walked)):
            odd = rng.choice((*_JSON, _GONE if path else None))
            data = json.dumps(replaced(document, path, odd)).encode()
            if name == "metrics.jsonl":
                data = b"\n".join([data, *lines[1:], b""])
            what = "gone" if odd is _GONE else ascii(odd)[:60]
            yield Case(f"{name}: {'/'.join(map(str, path))} = {what}", partial(tried, name, data))


_VALUES: tuple[Any, ...] = (
    *fuzz_runs._ODD_VALUES, -1, 2**63, 2**31, 10**30, "\x1b[31m", "x" * 5000, -math.inf, 1e308,
    True, False, [None], (1,), torch.zeros(0, 3), torch.ones(1, dtype=torch.int64),
    torch.ones(3, dtype=torch.bfloat16), _GONE, _GONE,
)  # fmt: skip


def _saved(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _sealed(path: Path, data: bytes, step: int, epoch: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    record = checkpoint_read.Record(path, step, epoch, None, hashlib.sha256(data).hexdigest())
    path.with_suffix(".json").write_bytes(checkpoint_read.sealed(record))


def _odd_tensors(held: Any, rng: random.Random) -> Any:
    """Returns an odd value for the place of ``held``: often a tensor that is nearly right."""
    if isinstance(held, torch.Tensor) and rng.random() < 0.6:
        changes: tuple[Callable[[torch.Tensor], Any], ...] = (
            lambda t: t[:-1] if t.ndim else t[None], lambda t: t.half(), lambda t: t.double(),
            lambda t: t.int(), lambda t: t.bool(), lambda t: t.to(torch.complex64),
            lambda t: t.to_sparse(), lambda t: t.flatten(), lambda t: t.to("meta"),
            lambda t: t * float("nan"), lambda t: t[None],
            lambda t: t.T.contiguous().T if t.ndim == 2 else t.clone(),
            lambda t: t.new_zeros(()).expand(t.shape), lambda t: t.tolist(),
            lambda t: torch.nn.Parameter(t.float()),
        )  # fmt: skip
        return rng.choice(changes)(held)
    return rng.choice(_VALUES)


def _at(value: Any, path: Sequence[Any]) -> Any:
    for key in path:
        value = value[key]
    return value


def checkpoints(seed: int, place: Path) -> Iterator[Case]:
    """Checkpoints with the right digest and an odd value in one place, by each way to load them."""
    made = genuine(place)
    found = checkpoint_read.read(made)
    record = found.record
    whole = found.state
    assert record is not None
    read = fuzz_runs.checkpoint_file(_made(place / "small")).read
    small = [
        torch.load(io.BytesIO(data)) for data in fuzz_runs.checkpoint_file(place / "small").seeds
    ]
    rng = random.Random(f"checkpoints {seed}")

    def units(data: bytes) -> End:
        with quiet():
            return End(read(data))

    def by_run(data: bytes, more: Sequence[str]) -> End:
        with inside() as there:
            path = there / f"checkpoints/step-{record.step}.pt"
            _sealed(path, data, record.step, record.epoch)
            overrides = [*_SMALL, *(text.replace("PATH", str(path)) for text in more)]
            with quiet():
                config = checked(overrides)
            return trained(config, overrides)

    ways = (
        ("resume=PATH", "trainer.max_steps=42"), ("mode=evaluate", "resume=PATH"),
        ("model.weights=PATH", "trainer.max_steps=2"), ("mode=evaluate", "model.weights=PATH"),
        ("resume=PATH", "trainer.max_steps=42", "loader.batch_size=16", "trainer.precision=bf16"),
    )  # fmt: skip
    for number in itertools.count():
        by_units = number % 3 != 0
        state = small[number % 2] if by_units else whole
        path = rng.choice([*places(state)])
        odd = _odd_tensors(_at(state, path), rng)
        if odd is _GONE and not path:
            odd = None
        data = _saved(replaced(state, path, odd))
        said = "gone" if odd is _GONE else " ".join(ascii(odd).split())[:60]
        said = f"checkpoint: {'/'.join(map(str, path))} = {said}"
        if by_units:
            yield Case(f"{said} (read and take over)", partial(units, data))
        else:
            way = rng.choice(ways)
            yield Case(f"{said} ({' '.join(way)})", partial(by_run, data, way))


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _walked(name: str, reader: Reader, rng: random.Random) -> Iterator[Case]:
    """Yields a file of JSON with each place replaced, and with the right digest."""
    document = json.loads(reader.seeds[0])

    def tried(data: bytes) -> End:
        with quiet():
            sealed = reader.seal(data) if reader.seal else data
            return End(reader.read(sealed))

    while True:
        for path in places(document):
            odd = rng.choice(_JSON) if rng.random() < 0.85 or not path else _GONE
            data = json.dumps(replaced(document, path, odd)).encode()
            what = "gone" if odd is _GONE else ascii(odd)[:60]
            try:
                # what has no place for a digest cannot be sealed
                if reader.seal:
                    reader.seal(data)
            except Exception:
                continue
            yield Case(f"{name}: {'/'.join(map(str, path))} = {what}", partial(tried, data))


def remembered(seed: int, place: Path) -> Iterator[Case]:
    """Records of checkpoints and the list of generated images."""
    rng = random.Random(f"remembered {seed}")
    each = [
        _walked("record", fuzz_runs.record(_made(place / "record")), rng),
        _walked("shapes.json", fuzz_data.shapes_file(_made(place / "shapes")), rng),
    ]
    while True:
        yield from (next(walk) for walk in each)
        yield next(each[0])
