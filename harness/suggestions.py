"""Suggestions correct mistyped flags, settings, choices and values."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress

import yaml  # type: ignore[import-untyped]
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

# the dotted names of all settings, filled in by ``config``
SETTINGS: list[str] = []
# settings and hints: their names in other programs
_HERE = {
    "model.name": "a arch",
    "loader.batch_size": "b bs",
    "loader.num_workers": "j workers",
    "optim.lr": "learning_rate",
    "optim.weight_decay": "wd",
    "optim.label_smoothing": "smoothing",
    "data.image_size": "img_size input_size",
    "data.root": "path dir data_dir data_path",
    "write model.weights=DEFAULT, with a torchvision network such as model=resnet18": "pretrained",
    "write trainer.precision=bf16 or trainer.precision=fp16": "amp fp16",
    "write optim=adamw or optim=sgd": "opt optimizer",
    "write schedule=cosine, schedule=step or schedule=constant": "scheduler",
    "write data=NAME, or data=imagefolder data.root=FOLDER for your own images": "dataset",
    "omit it; the data determines the number of classes": "num_classes",
    "a run always writes a TensorBoard event file, metrics.jsonl and report.html; for Weights & "
    "Biases write watch.wandb=online": "wandb logger",
    "write run.name=NAME for the folder outputs/NAME, or hydra.run.dir=FOLDER": (
        "output_dir run.dir checkpoint.dir"
    ),
    "write dist=spawn for all GPUs, or dist=spawn dist.nprocs=N": "gpus devices",
    "write mode=evaluate resume=PATH": "evaluate",
}
_OTHER_NAMES = {name: here for here, names in _HERE.items() for name in names.split()}


def refused_flag(text: str, following: Sequence[str]) -> str:
    """Returns the message for an unknown flag, such as ``--lr 0.1``.

    ``following`` contains the arguments after it.
    """
    flag, _, value = text.partition("=")
    name = flag.lstrip("-").replace("-", "_")
    meant = _meant(name)
    if not meant or " " in meant[0]:
        return f"{flag}: write settings as NAME=VALUE, without dashes{_hint(name)}"
    if following and not re.match("-|.*=", following[0]):
        value = value or following[0]
    return f"{flag}: write settings without dashes: {meant[0]}={value or 'VALUE'}"


def _hint(name: str) -> str:
    """Returns the hint after "unknown setting": a correction, a guess, or a pointer to --help."""
    meant = _meant(name) or ["see --help"]
    return f"; {meant[0]}" if " " in meant[0] else f"; did you mean {' or '.join(meant)}?"


def _meant(name: str) -> list[str]:
    """Returns at most three settings that ``name`` may mean, or a hint.

    Other programs' names come first, then settings with the same last part, then the most similar
    name in the same group, then in any group.
    """
    group, _, last = name.rpartition(".")
    if other := _OTHER_NAMES.get(name) or _OTHER_NAMES.get(last):
        return [other]
    if f"{name}.name" in SETTINGS:
        return [f"{name}.name"]
    if same := [path for path in SETTINGS if path.rpartition(".")[2] == last]:
        depth = min(path.count(".") for path in same)
        return [path for path in same if path.count(".") == depth][:3]
    neighbors = [path for path in SETTINGS if path.rpartition(".")[0] == group]
    for paths in (neighbors, SETTINGS):
        by_last = {path.rpartition(".")[2]: path for path in paths}
        if near := difflib.get_close_matches(last, by_last, n=1, cutoff=0.7):
            return [by_last[near[0]]]
    return []


def nearest(value: str, known: Sequence[str]) -> str:
    """Returns ``"; did you mean ...?"`` with the most similar names, or an empty string."""
    # keeps the first of several names that differ only in case, as in torch and timm
    by_name = {name.lower(): name for name in reversed(known)}
    near = difflib.get_close_matches(value.lower(), by_name, n=3)
    return f"; did you mean {', '.join(map(by_name.__getitem__, near))}?" if near else ""


def explain(error: BaseException | None) -> str | None:
    """Returns one line for an error from Hydra or OmegaConf: setting, reason and remedy.

    Returns None for other errors.
    """
    # takes a tenth of a second, so only done after an error
    from hydra.errors import HydraException, MissingConfigException

    if isinstance(error, yaml.YAMLError):
        # an error in a config file, with its line
        said = " ".join(str(getattr(error, "problem", None) or error).split())
        mark = getattr(error, "problem_mark", None)
        return said if mark is None else f"{mark.name}, line {mark.line + 1}: {said}"
    # OmegaConf raises another kind of error for a number that is too long
    keys = re.findall(r"full_key: (\S+)", str(error))
    if not keys and not isinstance(error, HydraException | OmegaConfBaseException):
        return None
    if several := re.match(r"Ambiguous value for argument '(.*)'", str(error)):
        return f"{several[1]}: add -m to run each value{_as_text(several[1])}"
    override = getattr(error, "override", "")
    # the wrapped error says more
    if isinstance(error, HydraException) and (wrapped := explain(error.__cause__)):
        return wrapped + _as_text(override)
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, value = str(error.missing_cfg_file).rpartition("/")
        return no_choice(group, value, error.options)
    name = getattr(error, "full_key", None) or next(iter(keys), "")
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        return f"{name}: unknown setting{_hint(name)}"
    # other messages, without the lines that name Python types
    text = re.sub(r"(?m)^\s*(full_key|object_type|reference_type)\b.*", "", str(error))
    said = " ".join(text.split())
    if override:
        name = override
        said += _as_text(name) if "=" in name else _hint(name)
    if mistyped := re.search(r"Invalid value '([^']+)', expected one of \[(.*?)\]", said):
        said += nearest(mistyped[1], mistyped[2].split(", "))
    elif "is not a ListConfig" in said:
        said = f"not a list; write {name}=[...]"
    elif name.startswith("loader.") and "'auto'" in said:
        said += "; to tune it, write loader.autotune=true"
    return said if name in said else f"{name}: {said}"


def override(name: str, value: str) -> str:
    """Returns a setting for Hydra, whatever characters its value contains."""
    # commas, equals signs and tildes are syntax
    is_plain = re.fullmatch(r"[\w./+@-]+", value, re.ASCII)
    return f"{name}={value}" if is_plain else quoted(name, value)


def typed(name: str, value: object) -> str:
    """Returns a setting as typed in a shell."""
    return shell_word(override(name, str(value)))


def quoted(name: str, value: str) -> str:
    """Returns a setting whose value Hydra reads as plain text, whatever its characters."""
    # backslashes are special only before a quote, including the closing one
    escaped = re.sub(r"(\\*)('|\Z)", lambda m: 2 * m[1] + m[2].replace("'", r"\'"), value)
    return f"{name}='{escaped}'"


def shell_word(text: str) -> str:
    """Returns ``text`` as one word for a shell, with unprintable characters escaped."""
    if text.isprintable():
        return shlex.quote(text)
    signs = [
        c if c.isprintable() and c not in "'\\" else "".join(rf"\x{b:02x}" for b in os.fsencode(c))
        for c in text
    ]
    return f"$'{''.join(signs)}'"


def _as_text(override: str) -> str:
    """Returns a hint on quoting an ``override`` whose value is plain text, if that helps.

    In Hydra's grammar, commas, equals signs and parentheses are syntax.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    name, equals, value = override.partition("=")
    closing = {"{": "}", "[": "]"}.get(value[:1], "")
    if not value.endswith(closing):
        # a shell has split it at spaces
        return f"; write the whole setting in quotes: '{override} ...{closing}'"
    plain = quoted(name, value)
    with suppress(HydraException):
        if equals and OverridesParser.create().parse_override(plain).value() == value:
            is_simple = value.isprintable() and not re.search(r'["$`\\!]', value)
            shells = f'"{plain}"' if is_simple else shell_word(plain)
            return f"; as plain text, write {shells}"
    return ""


def no_choice(group: str, value: str, options: Sequence[str]) -> str:
    """Returns the error message for a ``GROUP=VALUE`` that is not one of ``options``."""
    listed = f"the choices are: {', '.join(options) or 'none'}"
    if len(options) > 12:
        listed = f"there are {len(options)}, such as {', '.join(options[:3])}"
    more = nearest(value, options)
    if group == "loader" and value == "auto":
        more = "; to tune the loader, write loader.autotune=true"
    elif group == "data":
        more = f"; for your own images write data=imagefolder data.root=FOLDER{more}"
    return f"{group}={value}: no such choice; {listed}{more}"
