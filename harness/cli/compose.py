"""Reads the command line, composes the settings with Hydra and prints the help."""

from __future__ import annotations

import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped]
from hydra._internal.core_plugins import file_config_source
from hydra._internal.hydra import Hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf, JobConf, RunDir, SweepDir
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader

from .. import suggestions
from ..config import (
    CONF,
    MAPPINGS,
    Config,
    ConfigError,
    choices,
    shown,
    typed_settings,
    walk,
)

# settings that are paths
_PATHS = ("data.root", "resume", "model.weights", "hydra.run.dir", "hydra.sweep.dir")
# text and choices, whose annotations are text
_TEXTS = {path for path, _, leaf in walk(Config()) if re.match("str|(?!Any)[A-Z]", str(leaf.type))}
_TEXTS.update(_PATHS)

# the settings of this process' sweep
sweeps: list[DictConfig] = []


class Begun(Callback):
    """Notes the settings of a sweep that begins."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Keeps ``config``."""
        sweeps.append(config)


# by the name of Hydra's own, which a launcher would else register beside it
class FileConfigSource(file_config_source.FileConfigSource):
    """Files of settings: text stays as it was written, and a group of the user's may set anything.

    Hydra would make 1200000.0 of the name 12e5. It puts the settings of ``mygroup/`` below that
    name unless the file begins with ``# @package _global_``, and there is no such section.
    """

    def load_config(self, config_path: str) -> ConfigResult:
        """Returns the file ``config_path`` of this folder, such as ``experiment/mine``."""
        file = Path(self.path, self._normalize_file_name(config_path))
        # Windows editors begin a file with a mark
        with file.open(encoding="utf-8-sig") as text:
            header = self._get_header_dict(text.read())
            text.seek(0)
            loader = get_yaml_loader()(text)
            tree = loader.get_single_node()
        group = os.path.dirname(config_path).replace("/", ".")
        if group.partition(".")[0] not in {"", "hydra", *Config.__dataclass_fields__}:
            header["package"] = header["package"] or "_global_"
        settings: Any = {}
        if tree:
            _tag_texts(tree, (header["package"] or group).removeprefix("_global_"))
            settings = loader.construct_document(tree)
        place = f"{self.scheme()}://{self.path}"
        return ConfigResult(self.provider, place, OmegaConf.create(settings), header)


def _tag_texts(node: Any, path: str) -> None:
    """Tags the numbers and truth values of text settings in ``node`` as text."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            # what << merges stands beside its own
            name = "" if key.value == "<<" else f".{key.value}"
            _tag_texts(value, f"{path}{name}".lstrip("."))
    elif path in _TEXTS and re.search(r":(int|float|bool)$", node.tag):
        node.tag = "tag:yaml.org,2002:str"


def cli_overrides(chosen: HydraConf) -> tuple[str, ...]:
    """Returns what the command line asked for.

    First the flags that name other folders or files of settings, then the overrides.
    """
    places = {source.provider: source.path for source in chosen.runtime.config_sources}
    flags = {"path": places.get("main"), "name": chosen.job.config_name}
    flags["dir"] = places.get("command-line")
    usual = {"path": str(CONF), "name": "config", "dir": None}
    others = [f"--config-{name}={flags[name]}" for name in flags if flags[name] != usual[name]]
    # as they were written: an item of the list itself is resolved
    overrides: Any = OmegaConf.to_container(chosen.overrides.task)
    return (*others, *overrides)


def args_parser() -> ArgumentParser:
    """Returns Hydra's parser of the command line."""
    kind: Any = ArgumentParser
    # Python 3.14 refuses a help text of Hydra's, which is made only when it is shown
    kind._check_help = lambda *_: None
    try:
        found: ArgumentParser = get_args_parser()
    finally:
        del kind._check_help
    return found


def prepared(arguments: list[str]) -> Namespace:
    """Returns the command line's ``arguments`` as Hydra's own parser reads them.

    A ``--config-path`` is in the current folder; Hydra would look beside its caller. Flags may
    stand anywhere. ``model=`` takes any name that ``model.name=`` takes.

    Raises:
        ConfigError: a flag that there is not, such as ``--lr 0.1``.
    """
    parser = args_parser()
    # its own would print its usage
    parser.error = _refused  # type: ignore[method-assign]
    # torch.distributed.launch and DeepSpeed add it, and set the variable too
    added = f"--local-rank={os.environ.get('LOCAL_RANK')}"
    arguments = [text for text in arguments if text.replace("_", "-") != added]
    read, unknown = parser.parse_known_intermixed_args(arguments)
    if read.experimental_rerun:
        _refused("--experimental-rerun unpickles a file")
    if unknown:
        following = arguments[arguments.index(unknown[0]) + 1 :]
        raise ConfigError(suggestions.refused_flag(unknown[0], following))
    # pkg://... is Hydra's
    if read.config_path and "://" not in read.config_path:
        read.config_path = str(Path.cwd() / read.config_path)
    # a folder of the user's may have networks of its own
    folders = [Path(folder) for folder in (read.config_path, read.config_dir) if folder]
    networks = [file.stem for at in (CONF, *folders) for file in at.glob("model/*.yaml")]
    # only a sweep lists several values
    grammar = f"['\"]|(range|interval)\\({'' if read.multirun else '|,'}"
    read.overrides = [_as_written(text, networks, grammar) for text in read.overrides]
    return read


def _as_written(text: str, networks: Sequence[str], grammar: str) -> str:
    """Returns a setting as Hydra takes it; ``model=`` with none of ``networks`` is a name.

    ``~`` is the home folder in paths, which no shell puts there. Text and choices are quoted where
    Hydra would take them for numbers: 1.50 for 1.5, and ``mode=2`` for the second choice. A value
    in which ``grammar`` is found is left to Hydra's.
    """
    name, equals, value = text.partition("=")
    if value.startswith("~") and name.lstrip("+") in _PATHS:
        # a sweep lists several
        value = ",".join(map(os.path.expanduser, value.split(",")))
    elif name == "model" and not {*value.split(",")} <= {*networks}:
        name = "model.name"
    elif name.lstrip("+") in _TEXTS and not re.search(grammar, value):
        number = r"(?<![^,(])([+-]?[\d_.]+(e[+-]?\d+)?|true|false|inf|nan)(?![^,)])"
        value = re.sub(number, r"'\1'", value, flags=re.I)
    return f"{name}{equals}{value}"


def _refused(message: str) -> NoReturn:
    raise ConfigError(f"{message}; see --help")


_HELP = """train.py: train an image classifier on a feed that keeps the device busy.

  python train.py loader.autotune=true                  the generated data set, tuned.
  python train.py data=imagefolder data.root=FOLDER     your own images.
  python train.py mode=predict resume=RUN data.root=DIR the classes of other images.
  python train.py mode=export resume=RUN                the network as one file.
  python train.py -m loader.num_workers=0,1,2           one run for each value.
  python train.py page multirun/DATE/TIME               one page for all runs of a sweep.
  python train.py compare outputs/first outputs/second  runs side by side, as a table.
  python train.py --version                             the versions of wellfed, torch and Python.

Where the project is installed, the command wellfed takes the same words, in any folder.

A run leaves its files in outputs/ in the folder where it is started.

Choices that bring values of their own:
"""


_SETTINGS = """
Every setting with its value as this command line has it; add data=cifar10 to see what that changes.
"""


def help_text(config: Config) -> str:
    """Returns the page of ``--help``: the calls, the choices, every setting with its value."""
    lines = []
    for name in sorted(path.name for path in CONF.iterdir() if path.is_dir()):
        values = choices(name)
        if name == "model":
            values += [
                "any classifier of torchvision",
                "timm/NAME",
                "or model.name=my_module:build",
            ]
        if len(values) > 1:
            lines.append(f"  {name}= {', '.join(values)}")
    lines.append(_SETTINGS.rstrip())
    for section, settings in groupby(
        walk(config), lambda leaf: leaf[0].rpartition(".")[0] or "run"
    ):
        lines += ["", f"{section}:"]
        for path, value, declared in settings:
            options = ""
            if isinstance(value, Enum):
                options = f" [{' | '.join(member.name for member in type(value))}]"
            lines.append(f"  {path}={shown(value)}{options}\n      {declared.metadata['text']}")
    return _HELP + "\n".join(lines)


def register(*, helps: bool = False) -> None:
    """Gives Hydra the schema, the help page where it ``helps``, defaults for folders and sweepers.

    The last replace Hydra's own rather than standing in ``conf/config.yaml``: they also hold for a
    run that starts from the ``.hydra`` folder of another.
    """
    if helps:
        # lists of every choice, which the help page lacks, would take a second
        Hydra.format_config_groups = lambda *_: ""  # type: ignore[method-assign]

    def help_page(*, _root_: DictConfig) -> str:
        # Hydra resolves this for every run, which would cost each 15 ms
        return help_text(typed_settings(_root_)).replace("$", "$$") if helps else ""

    # every name that conf/config.yaml and the defaults below refer to
    store = ConfigStore.instance()
    schema = OmegaConf.structured(Config)
    for path in MAPPINGS:
        # any key may be added
        OmegaConf.select(schema, path)._set_flag("struct", False)
    store.store(name="schema", node=schema)
    OmegaConf.register_new_resolver("wellfed.help", help_page, replace=True)
    store.store(group="hydra/help", name="wellfed", node={"template": "${wellfed.help:}"})
    node = HydraConf(
        defaults=[
            *HydraConf().defaults,
            {"override help": "wellfed"},
            {"override job_logging": "none"},
            {"override hydra_logging": "none"},
        ],
        run=RunDir(dir="${wellfed.run_dir:}"),
        sweep=SweepDir(dir="${wellfed.sweep_dir:${run.name}}", subdir="${hydra.job.num}"),
        job=JobConf(name="train", chdir=False),
        callbacks={"wellfed": {"_target_": f"{__name__}.{Begun.__name__}"}},
        # job.run writes .hydra, once the folder is known to be this run's
        output_subdir=None,
    )
    store.store(group="hydra", name="config", node=node, provider="hydra")
    ranks = os.environ.get("WORLD_SIZE", "")
    # not by RANK alone, which another launcher may have left
    started = ranks.isdecimal() and ("TORCHELASTIC_RUN_ID" in os.environ or int(ranks) > 1)
    store.store(group="dist", name="default", node={"name": "torchrun" if started else "single"})
    # plugins store theirs
    Plugins.instance()
    SourcesRegistry.instance().types["file"] = FileConfigSource
    for sweeper in store.repo["hydra"]["sweeper"].values():
        # none in a group of samplers
        stored = getattr(sweeper, "node", {})
        if "direction" in stored:
            # of the best top-1 that a job returns
            stored["direction"] = "maximize"
