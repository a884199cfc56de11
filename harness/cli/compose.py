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
from ..config import CONF, MAPPINGS, Config, ConfigError, choices, shown, typed_settings, walk

# settings that are paths
_PATHS = ("data.root", "resume", "model.weights", "hydra.run.dir", "hydra.sweep.dir")
# text and choices: their annotations are text
_TEXTS = {path for path, _, leaf in walk(Config()) if re.match("str|(?!Any)[A-Z]", str(leaf.type))}
_TEXTS.update(_PATHS)

# the settings for this process's sweep
sweeps: list[DictConfig] = []


class Begun(Callback):
    """Records a sweep's settings when it starts."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Keeps ``config``."""
        sweeps.append(config)


# named like Hydra's own, which a launcher would otherwise register too
class FileConfigSource(file_config_source.FileConfigSource):
    """Config files that keep text as written and whose user-defined groups may set anything.

    Hydra would turn the name 12e5 into 1200000.0, and put the settings in ``mygroup/`` into a
    section with that name, which does not exist, unless the file begins with
    ``# @package _global_``.
    """

    def load_config(self, config_path: str) -> ConfigResult:
        """Returns the file ``config_path`` in this folder, such as ``experiment/mine``."""
        file = Path(self.path, self._normalize_file_name(config_path))
        # some Windows editors start files with a byte order mark
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
            if not isinstance(tree, yaml.MappingNode):
                raise ConfigError(f"{file} has no settings; write one 'NAME: VALUE' per line")
            _tag_texts(tree, (header["package"] or group).removeprefix("_global_"))
            settings = loader.construct_document(tree)
        place = f"{self.scheme()}://{self.path}"
        return ConfigResult(self.provider, place, OmegaConf.create(settings), header)


def _tag_texts(node: Any, path: str) -> None:
    """Tags the numbers and booleans in text settings in ``node`` as text."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            # << merges keys into its parent
            name = "" if key.value == "<<" else f".{key.value}"
            _tag_texts(value, f"{path}{name}".lstrip("."))
    elif path in _TEXTS and re.search(r":(int|float|bool)$", node.tag):
        node.tag = "tag:yaml.org,2002:str"


def cli_overrides(chosen: HydraConf) -> tuple[str, ...]:
    """Returns the command line's settings.

    The flags for other config folders or files come first, then the overrides.
    """
    places = {source.provider: source.path for source in chosen.runtime.config_sources}
    flags = (
        ("path", places.get("main"), str(CONF)),
        ("name", chosen.job.config_name, "config"),
        ("dir", places.get("command-line"), None),
    )
    others = [f"--config-{name}={value}" for name, value, usual in flags if value != usual]
    # as written: reading the items from the list itself would resolve them
    overrides: Any = OmegaConf.to_container(chosen.overrides.task)
    return (*others, *overrides)


def args_parser() -> ArgumentParser:
    """Returns Hydra's command-line parser."""
    kind: Any = ArgumentParser
    # Python 3.14 rejects one of Hydra's help texts, which is rendered lazily
    kind._check_help = lambda *_: None
    try:
        return get_args_parser()
    finally:
        del kind._check_help


def prepared(arguments: list[str]) -> Namespace:
    """Parses the command line's ``arguments`` with Hydra's own parser.

    A ``--config-path`` is relative to the current folder; Hydra would use its caller's folder.
    Flags may appear anywhere. ``model=`` accepts any name that ``model.name=`` accepts.

    Raises:
        ConfigError: a flag is unknown, such as ``--lr 0.1``.
    """
    parser = args_parser()
    # the default function would print the usage
    parser.error = _refused  # type: ignore[method-assign]
    # torch.distributed.launch and DeepSpeed add this flag and also set the variable
    added = f"--local-rank={os.environ.get('LOCAL_RANK')}"
    arguments = [text for text in arguments if text.replace("_", "-") != added]
    read, unknown = parser.parse_known_intermixed_args(arguments)
    if read.experimental_rerun:
        _refused("--experimental-rerun unpickles a file")
    if unknown:
        following = arguments[arguments.index(unknown[0]) + 1 :]
        raise ConfigError(suggestions.refused_flag(unknown[0], following))
    # pkg://... is Hydra's syntax
    if read.config_path and "://" not in read.config_path:
        read.config_path = str(Path.cwd() / read.config_path)
    # the user's config folders may have their own networks
    folders = [Path(folder) for folder in (read.config_path, read.config_dir) if folder]
    networks = [file.stem for at in (CONF, *folders) for file in at.glob("model/*.yaml")]
    # only a sweep lists several values
    grammar = f"['\"]|(range|interval)\\({'' if read.multirun else '|,'}"
    read.overrides = [_as_written(text, networks, grammar) for text in read.overrides]
    return read


def _as_written(text: str, networks: Sequence[str], grammar: str) -> str:
    """Returns a setting for Hydra; ``model=X`` with X not in ``networks`` becomes ``model.name=X``.

    ``~`` in paths is expanded, because shells do not expand it after ``=``. Text and choices are
    quoted if Hydra would read them as numbers: 1.50 as 1.5, and ``mode=2`` as the second choice.
    Values that match ``grammar`` are left to Hydra.
    """
    name, equals, value = text.partition("=")
    if value.startswith("~") and name.lstrip("+") in _PATHS:
        # a sweep lists several paths
        value = ",".join(map(os.path.expanduser, value.split(",")))
    elif name == "model" and not {*value.split(",")} <= {*networks}:
        name = "model.name"
    elif name.lstrip("+") in _TEXTS and not re.search(grammar, value):
        number = r"(?<![^,(])([+-]?[\d_.]+(e[+-]?\d+)?|true|false|inf|nan)(?![^,)])"
        value = re.sub(number, r"'\1'", value, flags=re.I)
    return f"{name}{equals}{value}"


def _refused(message: str) -> NoReturn:
    raise ConfigError(f"{message}; see --help")


_HELP = """wellfed: train an image classifier without starving the GPU.

  wellfed loader.autotune=true                          the generated dataset, tuned.
  wellfed data=imagefolder data.root=FOLDER             your own images.
  wellfed mode=predict model.weights=RUN data.root=DIR  predicted classes for other images.
  wellfed mode=export model.weights=RUN                 the network as a single file.
  wellfed -m loader.num_workers=0,1,2                   one run per value.
  wellfed page multirun/DATE/TIME                       one page for all runs in a sweep.
  wellfed compare outputs/first outputs/second          runs side by side, as a table.
  wellfed --version                                     the versions of wellfed, torch and Python.

In a checkout, python train.py accepts the same arguments.

A run writes its files to outputs/ in the current folder.

Choices that set several values:
"""


def help_text(config: Config) -> str:
    """Returns the ``--help`` text: commands, choices, and all settings with their values."""
    lines = []
    for name in sorted(path.name for path in CONF.iterdir() if path.is_dir()):
        values = choices(name)
        if name == "model":
            values.append("any torchvision classifier, timm/NAME, or model.name=my_module:build")
        if len(values) > 1:
            lines.append(f"  {name}= {', '.join(values)}")
    lines.append(
        "\nAll settings with their current values; add data=cifar10, for example, to see its "
        "changes."
    )
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
    """Registers the schema, the help page (if ``helps``), and defaults for folders and sweepers.

    The defaults replace Hydra's own instead of being in ``conf/config.yaml``, so they also apply to
    a run that starts from another run's ``.hydra`` folder.
    """
    if helps:
        # listing every choice would take a second, and the help page omits the list
        Hydra.format_config_groups = lambda *_: ""  # type: ignore[method-assign]

    def help_page(*, _root_: DictConfig) -> str:
        # Hydra resolves this for every run, which takes 15 ms each time
        return help_text(typed_settings(_root_)).replace("$", "$$") if helps else ""

    # the names that conf/config.yaml and the defaults below use
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
        # job.run writes .hydra, once the folder belongs to this run
        output_subdir=None,
    )
    store.store(group="hydra", name="config", node=node, provider="hydra")
    ranks = os.environ.get("WORLD_SIZE", "")
    # RANK alone is not enough, because another launcher may have set it
    started = ranks.isdecimal() and ("TORCHELASTIC_RUN_ID" in os.environ or int(ranks) > 1)
    store.store(group="dist", name="default", node={"name": "torchrun" if started else "single"})
    # plugins register their sweepers
    Plugins.instance()
    SourcesRegistry.instance().types["file"] = FileConfigSource
    for sweeper in store.repo["hydra"]["sweeper"].values():
        # sampler groups have no node
        stored = getattr(sweeper, "node", {})
        if "direction" in stored:
            # of the best top-1 accuracy, which a job returns
            stored["direction"] = "maximize"
