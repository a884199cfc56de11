"""What the command line answers to what was mistyped: flags, unknown settings and choices, values
of another type.
"""

from __future__ import annotations

import difflib
import os
import platform
import re
from collections.abc import Sequence

from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

_LONG_FLAGS = (
    "--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--shell-completion",
    "--config-path", "--config-name", "--config-dir", "--experimental-rerun", "--info",
)  # fmt: skip
_SHORT_FLAGS = ("-h", "-c", "-p", "-r", "-m", "-s", "-i")
_MOST_CHOICES = 12  # that are all listed

# Settings that are paths.
_PATHS = ("data.root", "resume", "model.weights", "hydra.run.dir", "hydra.sweep.dir")
# Names of other programs, and what they are called here.
_OTHER_NAMES = {
    "a": "model.name",
    "arch": "model.name",
    "b": "loader.batch_size",
    "bs": "loader.batch_size",
    "j": "loader.num_workers",
    "workers": "loader.num_workers",
    "learning_rate": "optim.lr",
    "wd": "optim.weight_decay",
    "smoothing": "optim.label_smoothing",
    "img_size": "data.image_size",
    "input_size": "data.image_size",
    "path": "data.root",
    "dir": "data.root",
    "data_dir": "data.root",
    "data_path": "data.root",
}
_AUTOCAST = "write trainer.precision=bf16 or trainer.precision=fp16"
_FOLDER = "write run.name=NAME for the folder outputs/NAME, or hydra.run.dir=FOLDER"
_LOGGERS = (
    "there is no such logger; a run writes TensorBoard's event file, metrics.jsonl and "
    "report.html by itself"
)
_PROCESSES = "write dist=spawn for all GPUs, or dist=spawn dist.nprocs=N"
# Names whose answer is more than another name.
_ANSWERS = {
    "pretrained": (
        "write model.weights=DEFAULT, with a network of torchvision such as model=resnet18"
    ),
    "amp": _AUTOCAST,
    "fp16": _AUTOCAST,
    "optimizer": "write optim=adamw or optim=sgd",
    "opt": "write optim=adamw or optim=sgd",
    "scheduler": "write schedule=cosine, schedule=step or schedule=constant",
    "dataset": "write data=NAME, or data=imagefolder data.root=FOLDER for your own images",
    "num_classes": "leave it out; the number of classes is taken from the data",
    "wandb": _LOGGERS,
    "logger": _LOGGERS,
    "output_dir": _FOLDER,
    "run.dir": _FOLDER,
    "checkpoint.dir": _FOLDER,
    "gpus": _PROCESSES,
    "devices": _PROCESSES,
    "evaluate": "write mode=evaluate resume=PATH",
}


def version(own: str) -> str:
    """Returns the versions of wellfed, which is ``own``, of torch and Python, without importing
    torch.
    """
    from importlib import metadata  # takes 30 ms

    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "(not installed)"
    return f"wellfed {own}, torch {torch}, Python {platform.python_version()}"


def expanded(arguments: Sequence[str]) -> list[str]:
    """Returns ``arguments`` with the home folder for ``~`` in the settings that are paths, where no
    shell writes it.
    """
    found = []
    for text in arguments:
        name, equals, value = text.partition("=")
        if equals and name.lstrip("+") in _PATHS:
            # a sweep lists several
            value = ",".join(map(os.path.expanduser, value.split(",")))
        found.append(f"{name}{equals}{value}")
    return found


def refused_flag(arguments: Sequence[str], settings: Sequence[str]) -> str | None:
    """Returns what to say of the first flag that there is not, such as ``--lr 0.1``; None: there is
    none.

    ``settings`` are the dotted names of all settings.
    """
    for text, following in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, equals, value = text.partition("=")
        if not re.fullmatch(r"--?[A-Za-z][\w-]*", flag) or _is_hydras(flag):
            continue
        name = flag.lstrip("-").replace("-", "_")
        if not equals and following[:1] != "-" and "=" not in following:
            value = following
        if name not in _ANSWERS and (meant := _meant(name, settings)):
            return f"{flag}: settings are written without dashes: {meant[0]}={value or 'VALUE'}"
        return f"{flag}: settings are written NAME=VALUE, without dashes{_hint(name, settings)}"
    return None


def _is_hydras(flag: str) -> bool:
    if flag.startswith("--"):
        return any(known.startswith(flag) for known in _LONG_FLAGS)
    return flag.startswith(_SHORT_FLAGS)


def _hint(name: str, settings: Sequence[str]) -> str:
    """Returns what follows "unknown setting" of ``name``: what to write, what may be meant, or
    where to look.
    """
    answer = _ANSWERS.get(name) or _ANSWERS.get(name.rpartition(".")[2])
    if answer:
        return f"; {answer}"
    meant = _meant(name, settings)
    return f"; did you mean {' or '.join(meant)}?" if meant else "; see --help"


def _meant(name: str, settings: Sequence[str]) -> list[str]:
    """Returns at most three settings that ``name`` may stand for.

    Those of the same last part come first, then other programs' names, then the most similar name
    of the same group, then of any.
    """
    group, _, last = name.rpartition(".")
    same = [path for path in settings if path.rpartition(".")[2] == last]
    if same:
        depth = min(path.count(".") for path in same)
        return [path for path in same if path.count(".") == depth][:3]
    if last in _OTHER_NAMES:
        return [_OTHER_NAMES[last]]
    neighbours = [path for path in settings if path.rpartition(".")[0] == group]
    for paths in (neighbours, settings):
        by_last = {path.rpartition(".")[2]: path for path in paths}
        if near := difflib.get_close_matches(last, by_last, n=1, cutoff=0.7):
            return [by_last[near[0]]]
    return []


def nearest(value: str, known: Sequence[str]) -> str:
    """Returns ``"; did you mean ...?"`` with the most similar names, whatever their case; empty
    without any.
    """
    plain = {re.sub(r"[-_.]", "", name).lower(): name for name in known}
    near = difflib.get_close_matches(re.sub(r"[-_.]", "", value).lower(), plain, n=3)
    return f"; did you mean {', '.join(plain[name] for name in near)}?" if near else ""


def is_refusal(error: BaseException) -> bool:
    """Whether Hydra or OmegaConf refused the settings."""
    return isinstance(error, HydraException | OmegaConfBaseException)


def explain(error: BaseException, settings: Sequence[str]) -> str:
    """Returns one line for a refusal by Hydra or OmegaConf: the setting, what is wrong and the way
    out.

    ``settings`` are the dotted names of all settings.
    """
    text = str(error).strip()
    name = getattr(error, "full_key", None) or _first(r"full_key: (\S+)", text) or ""
    unknown = _first(r"Could not override '([^']+)'", text) or _first(
        r"Key '([^']+)' (?:is )?not in", text
    )
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override, settings)
    if isinstance(error, HydraException) and error.__cause__ is not None and unknown is None:
        return (
            explain(error.__cause__, settings) if isinstance(error.__cause__, Exception) else text
        )
    if unknown:
        full = name if name.endswith(unknown) else unknown
        return f"{full}: unknown setting{_hint(full, settings)}"
    if required := _first(r"field '([^']+)' is not Optional", text):
        return f"{required}=null: needs a value"
    choice = re.search(
        r"Could not find '([^']+)/([^/']+)'(?:.*?Available options in '[^']+':(.*?))?(?:Config "
        r"search path|$)",
        text,
        re.S,
    )
    if choice:
        return _no_choice(choice[1], choice[2], (choice[3] or "").split())
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = " ".join(
        line for line in lines if not re.match(r"(full_key|object_type|reference_type)\b", line)
    )
    said += _better_value(name, said)
    return f"{name}: {said}" if name and name not in said else said


def _unreadable(override: str, settings: Sequence[str]) -> str:
    name, equals, value = override.partition("=")
    if not equals:
        return f"{override}: settings are written NAME=VALUE{_hint(name, settings)}"
    plain = value.replace("'", "")
    return f"""{override}: the value cannot be read; quote it twice: "{name}='{plain}'\""""


def _no_choice(group: str, value: str, options: Sequence[str]) -> str:
    listed = f"there are: {', '.join(options) or 'none'}"
    if len(options) > _MOST_CHOICES:
        listed = f"there are {len(options)}, such as {', '.join(options[:3])}"
    more = nearest(value, options)
    if group == "loader" and value == "auto":
        more = "; to have the loader's settings found, write loader.autotune=true"
    elif group == "data":
        more = f"; for your own images write data=imagefolder data.root=FOLDER{more}"
    elif group.startswith("hydra/"):
        more = (
            "; others come with plugins of Hydra, such as pip install "
            f"hydra-{value}-{group.rpartition('/')[2]}"
        )
    return f"{group}={value}: no such choice; {listed}{more}"


def _better_value(name: str, said: str) -> str:
    """Returns what to add to a value that was refused, empty where nothing is known to help."""
    if choice := re.search(r"Invalid value '([^']+)', expected one of \[(.*?)\]", said):
        return nearest(choice[1], choice[2].split(", "))
    if name.startswith("loader.") and "'auto'" in said:
        return "; to have it found, write loader.autotune=true"
    return ""


def _first(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None
