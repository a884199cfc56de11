"""Generates the architecture page from ``harness/``: rooms, files, the user's own parts, ways.

The ways come from a traced run, which takes half a minute::

    uv run python -m scripts.docs.architecture_page
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from textwrap import dedent

import harness
from harness.config import Config, walk
from scripts import walks
from scripts.bench.tables import write

ROOT = Path(__file__).resolve().parents[2]
HARNESS = ROOT / "harness"
PAGE = ROOT / "docs" / "contributing" / "architecture.md"
# below each page: the user's part; its setting, option or import; its receiver in harness/
DOORS = """
how-to/own-model-and-data.md
network | model.name=module:function | training.models:build
data set or source | data.name=module:function | data.own:open_own
augmentation of an image | augment.own=module:function | data.own:OwnAugment
augmentation of a batch | augment.own_batch=module:function | data.augment:BatchAugment
optimizer | optim.name=module:function | training.optimizer:make_optimizer
loss | optim.loss=module:function | training.losses:make_loss
callbacks | callbacks=[module:Class] | training.callbacks:made
reference/cli.md
settings folder | --config-dir=FOLDER | cli.compose:prepared
how-to/watch-a-script.md
loop over one loader | wellfed.watched | hooks.own:watched
loop in a block | wellfed.watching | hooks.own:watching
Lightning Trainer | wellfed.hooks.lightning | hooks.lightning:WellfedCallback
Hugging Face Trainer | wellfed.hooks.transformers | hooks.transformers:WellfedCallback
`ImageFolder` | wellfed.faster | hooks.faster:faster
how-to/instrument-your-loop.md
`DataLoader` to tune | wellfed.tune | tuning.library:tune
`DataLoader` to copy ahead | wellfed.DataPrefetcher | feed.prefetcher:DataPrefetcher
loop to time | wellfed.StepClock | clock.clock:StepClock
how-to/predict-and-export.md
code around a trained network | wellfed.load | inference.loaded:load
"""
# the ways that lead from lower rooms to higher ones
RISING = ("sample to step", "step time to TensorBoard")
TOP = """# Architecture

`scripts/docs/architecture_page.py` draws this page from the code of `harness/`.

```
{}
```

## Rooms

A room imports only rooms on lower lines. Rooms on one line never import each other.
`uv run lint-imports` checks both rules.

| line | room | task | may import |
|---|---|---|---|
{}

## Where your own part goes in

A setting names your function as `module:function`, which `call` in runtime/user_code.py imports
and calls. Your own training loop imports the names of `wellfed`.

| your own | setting or name | receiver | described in |
|---|---|---|---|
{}

## Files
{}
"""
TRACED = """
## Ways through the code

A run on a CPU with `loader.backend=threads` was traced for the functions of each way. Files follow
the way, functions the alphabet. Functions without a docstring are only counted.
"""


def layers() -> list[list[str]]:
    """Returns the rooms on each line, from the top down."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = project["tool"]["importlinter"]["contracts"][0]
    return [line.split(" | ") for line in contract["layers"]]


def task(file: str, function: str = "") -> str:
    """Returns the first docstring sentence of a file of ``harness/`` or a function in it.

    A special method without a docstring has that of its class, any other function "".
    """
    module = ast.parse((HARNESS / file).read_text(encoding="utf-8"))
    kinds = (ast.ClassDef, ast.FunctionDef)
    body, text = module.body, ast.get_docstring(module)
    for name in function.replace("<locals>.", "").split(".") if function else ():
        found = [each for each in body if isinstance(each, kinds) and each.name == name]
        if not found:
            raise LookupError(f"{file} has no {function}")
        body = found[0].body
        text = ast.get_docstring(found[0]) or (text if name.endswith("__") else "")
    if text is None:
        raise LookupError(f"{file} has no docstring")
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph)[0].replace("``", "`").replace("|", "\\|")


def rooms() -> Iterator[str]:
    """Yields a row per room, with the rooms that it may import."""
    lines = layers()
    for i, (names, below) in enumerate(zip(lines, [*lines[1:], []], strict=True)):
        lower = " and below" if i + 2 < len(lines) else ""
        may = ", ".join(f"`{name}`" for name in below) + lower if below else "no room"
        for name in names:
            file = f"{name}/__init__.py" if (HARNESS / name).is_dir() else f"{name}.py"
            yield f"| {i + 1} | `{name}` | {task(file)} | {may} |"


def files() -> Iterator[str]:
    """Yields a table of the files of each room."""
    for name in chain.from_iterable(layers()):
        paths = sorted((HARNESS / name).rglob("*.py"), key=lambda path: (path.parent, path))
        if paths:
            yield f"\n### {name}\n\n| file | task |\n|---|---|"
        for path in paths[1:]:
            file = path.relative_to(HARNESS).as_posix()
            shown = file.removeprefix(f"{name}/").removesuffix("__init__.py")
            yield f"| [{shown}](../../harness/{file}) | {task(file)} |"


def doors() -> Iterator[str]:
    """Yields a row per user part; raises if its name or receiver is gone."""
    settings = {name for name, *_ in walk(Config())}
    page = ""
    for line in DOORS.strip().splitlines():
        if " | " not in line:
            page = line
            continue
        part, name, receiver = line.split(" | ")
        module, function = receiver.split(":")
        file = f"{module.replace('.', '/')}.py"
        task(file, function)
        # the callbacks need a package that is not in the dev tools
        if name != f"wellfed.{module}":
            found = getattr(import_module(f"harness.{module}"), function)
            place, _, own = name.partition(".")
            if place == "wellfed" and getattr(harness, own) is not found:
                raise LookupError(f"{name} is not {receiver}")
        if ":" in name and name.partition("=")[0] not in settings:
            raise LookupError(f"{name}: no such setting")
        link = f"[{Path(page).name}](../{page})"
        yield f"| {part} | `{name}` | `{function}` in {file} | {link} |"


def drawn() -> str:
    """Returns the page up to the ways."""
    way = re.findall(r"::\n\n(.*?)\n\n", harness.__doc__ or "", re.DOTALL)[0]
    return TOP.format(dedent(way), *("\n".join(rows()) for rows in (rooms, doors, files)))


def page() -> str:
    """Returns the whole page, with the ways of a traced run."""
    order = list(chain.from_iterable(layers()))
    lines = [drawn() + TRACED]
    for way, names in walks.walks(ROOT).items():
        sign = -1 if way in RISING else 1
        ranks = {name: sign * order.index(re.split(r"/|\.py", name)[0]) for name in names}
        found = [name.split(":") for name in sorted(names, key=lambda name: (ranks[name], name))]
        count = len({file for file, _ in found})
        lines.append(f"### {way}\n\n{len(found)} functions in {count} files.\n")
        lines.append("| file | function | task |\n|---|---|---|")
        rows = ((file, name, task(file, name)) for file, name in found)
        lines += [f"| {file} | `{name}` | {text} |" for file, name, text in rows if text]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    write(PAGE, page())
    print(PAGE.relative_to(ROOT))
