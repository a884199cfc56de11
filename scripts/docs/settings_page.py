"""Generates the settings page from the schema in ``harness/config.py`` and the values in ``conf/``.

The values are those that Hydra composes without overrides::

    uv run python -m scripts.docs.settings_page
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from harness import config as schema
from harness.cli.compose import register
from scripts.bench.tables import write

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
PAGE = ROOT / "docs" / "reference" / "settings.md"
HEAD = """# Settings

Every setting with its default and its meaning. On the command line, write a setting as `name=value`
and a list as `[1,2]`. `null` means no value. `scripts/docs/settings_page.py` generates this page.

## Choices

A choice sets several values at once, and a data set may bring an augmentation. What you type wins:
`wellfed data=cifar10 loader.batch_size=128`. The files are in `conf/`. The defaults below are those
of `data=shapes`; add `--cfg job` to a command to see what another choice sets.
"""
SIGNS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def composed() -> tuple[schema.Config, Mapping[str, str | None]]:
    """Returns the settings without overrides, and the choice of each group by name."""
    register()
    for name in ("wellfed.run_dir", "wellfed.sweep_dir"):
        OmegaConf.register_new_resolver(name, lambda *_: "", replace=True)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        whole = compose("config", return_hydra_config=True)
        return schema.load(compose("config")), dict(whole.hydra.runtime.choices)


def choices(chosen: Mapping[str, str | None]) -> Iterator[str]:
    """Yields a row per group in ``conf/`` with more than one choice."""
    for folder in sorted(path for path in CONF.iterdir() if path.is_dir()):
        names = [f"`{path.stem}`{_comment(path)}" for path in sorted(folder.glob("*.yaml"))]
        if len(names) > 1:
            yield (
                f"| `{folder.name}=` | `{chosen.get(folder.name) or 'null'}` | "
                f"{'<br>'.join(names)} |"
            )


def _comment(path: Path) -> str:
    lines = [
        line[2:] for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# ")
    ]
    said = [line for line in lines if not line.startswith(("@package", "wellfed ", "torchrun "))]
    # up to the first line that ends a sentence
    count = next((place for place, line in enumerate(said, 1) if line.endswith(".")), 1)
    text = " ".join(said[:count]).replace("<", "&lt;")
    return f": {text}" if text else ""


def _limits(value: Any, meta: Mapping[str, Any]) -> str:
    if isinstance(value, Enum):
        return " Choices: " + ", ".join(f"`{member.name}`" for member in type(value)) + "."
    found = [f"{sign} {meta[name]}" for name, sign in SIGNS.items() if name in meta]
    if not found:
        return ""
    return f" Range: {', '.join(found)}."


def page() -> str:
    """Returns the whole page."""
    config, chosen = composed()
    lines = [HEAD, "| group | default | choices |", "|---|---|---|", *choices(chosen)]
    for section, settings in groupby(
        schema.walk(config), key=lambda found: found[0].rpartition(".")[0]
    ):
        lines += [
            "",
            f"## {section or 'The run'}",
            "",
            "| setting | default | meaning |",
            "|---|---|---|",
        ]
        for name, value, declared in settings:
            meta = declared.metadata
            text = f"{meta['text']}{_limits(value, meta)}".replace("|", "\\|")
            shown = str(value).lower() if isinstance(value, bool) else schema.shown(value)
            lines.append(f"| `{name}` | `{shown}` | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write(PAGE, page())
    print(PAGE.relative_to(ROOT))
