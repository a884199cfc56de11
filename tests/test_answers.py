"""What a new user types by guess, and what the command line answers."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from commands import trained
from torchvision import models as zoo

from harness import answers, job
from harness import config as schema
from harness.config import Config, ConfigError, ModelConfig
from harness.data.datasets import DATASETS, FAKE
from harness.runtime.errors import CheckpointError, described

ROOT = Path(__file__).parents[1]
Composed = Callable[..., Config]

# The table of guesses in a new user's first day: what was typed, and what the answer must begin
# with.
GUESSES = [
    ("--lr 0.1", "--lr: settings are written without dashes: optim.lr=0.1"),
    ("--lr=0.1", "--lr: settings are written without dashes: optim.lr=0.1"),
    ("--batch-size 32", "--batch-size: settings are written without dashes: loader.batch_size=32"),
    (
        "--pretrained",
        (
            "--pretrained: settings are written NAME=VALUE, without dashes; write "
            "model.weights=DEFAULT"
        ),
    ),
    ("--nonsense", "--nonsense: settings are written NAME=VALUE, without dashes; see --help"),
    ("-seed 3", "-seed: settings are written without dashes: seed=3"),
    ("-j 4", "-j: settings are written without dashes: loader.num_workers=4"),
    ("lr=0.1", "lr: unknown setting; did you mean optim.lr?"),
    ("trainer.lr=0.1", "trainer.lr: unknown setting; did you mean optim.lr?"),
    ("trainer.foo=1", "trainer.foo: unknown setting; see --help"),
    ("trainer.max_epochs=3", "trainer.max_epochs: unknown setting; did you mean trainer.epochs?"),
    ("loader=null", "loader=null: no such choice; there are: default"),
    ("augment.color_jitter=0.4", "augment.color_jitter: needs a list; write "),
    ("optim.lr=0.1,0.2", "optim.lr=0.1,0.2: several values; add -m for one run of each, or "),
    ("epochs=3", "epochs: unknown setting; did you mean trainer.epochs?"),
    ("batch_size=32", "batch_size: unknown setting; did you mean loader.batch_size?"),
    ("root=/x", "root: unknown setting; did you mean data.root?"),
    ("backend=x", "backend: unknown setting; did you mean loader.backend or dist.backend?"),
    ("model=vit_b_61", "model=vit_b_61: no such choice; there are "),
    ("model.name=resnet51", "model.name=resnet51: unknown; did you mean resnet50, resnet18"),
    ("optim=adam", "optim=adam: no such choice; there are: adamw, sgd; did you mean adamw?"),
    (
        "optim.name=adam",
        "optim.name: Invalid value 'adam', expected one of [sgd, adamw]; did you mean adamw?",
    ),
    (
        "optim.name=adamw",
        (
            "optim.nesterov=true: has an effect with sgd alone; write optim=adamw, "
            "which brings its own"
        ),
    ),
    (
        "loader.num_workers=auto",
        (
            "loader.num_workers: Value 'auto' of type 'str' could not be "
            "converted to Integer; to have it"
        ),
    ),
    (
        "data=mnist",
        (
            "data=mnist: no such choice; there are: cifar10, cifar100, digits, fake, "
            "imagefolder, imagenet, own, "
        ),
    ),
    (
        "data=ImageFolder",
        "data=ImageFolder: no such choice; there are: cifar10, cifar100, digits, fake, "
        "imagefolder, imagenet, own, shapes; for your own images write data=imagefolder "
        "data.root=FOLDER; did you mean imagefolder, imagenet?",
    ),
    (
        "data.name=cifar-10",
        "data.name=cifar-10: no such data set; choose from cifar10, cifar100, "
        "digits, fake, imagefolder, "
        "imagenet, shapes; did you mean cifar10",
    ),
    (
        "wandb=true",
        "wandb: unknown setting; a run writes TensorBoard's event file",
    ),
    (
        "logger=wandb",
        "logger: unknown setting; a run writes TensorBoard's event file",
    ),
    ("pretrained=true", "pretrained: unknown setting; write model.weights=DEFAULT"),
    ("model.pretrained=true", "model.pretrained: unknown setting; write model.weights=DEFAULT"),
    (
        "num_classes=4",
        (
            "num_classes: unknown setting; leave it out; the number of classes is taken "
            "from the data"
        ),
    ),
    (
        "model.num_classes=4",
        (
            "model.num_classes: unknown setting; leave it out; the number of "
            "classes is taken from the data"
        ),
    ),
    (
        "data.num_classes=4",
        (
            "data.num_classes: unknown setting; leave it out; the number of "
            "classes is taken from the data"
        ),
    ),
    ("optimizer=adamw", "optimizer: unknown setting; write optim=adamw or optim=sgd"),
    ("data.path=/x", "data.path: unknown setting; did you mean data.root?"),
    ("data.dir=/x", "data.dir: unknown setting; did you mean data.root?"),
    (
        "trainer.amp=true",
        "trainer.amp: unknown setting; write trainer.precision=bf16 or trainer.precision=fp16",
    ),
    (
        "loader=auto",
        (
            "loader=auto: no such choice; there are: default; to have the loader's "
            "settings found, write loader.auto"
        ),
    ),
    (
        "output_dir=/x",
        (
            "output_dir: unknown setting; write run.name=NAME for the folder "
            "outputs/NAME, or hydra.run.dir=FOLDER"
        ),
    ),
    (
        "run.dir=/x",
        (
            "run.dir: unknown setting; write run.name=NAME for the folder outputs/NAME, or "
            "hydra.run.dir=FOLDER"
        ),
    ),
    (
        "mode=eval",
        (
            "mode: Invalid value 'eval', expected one of [train, evaluate, diagnose, verify, "
            "predict, export]; did you mean evaluate?"
        ),
    ),
    ("hydra/launcher=nope", "hydra/launcher=nope: no such choice; there are: basic"),
    (
        "data.root=a=b",
        "data.root=a=b: the value cannot be read; quote it twice: \"data.root='a=b'\"",
    ),
    ("lr", "lr: settings are written NAME=VALUE; did you mean optim.lr?"),
]


def answer(composed: Composed, *arguments: str) -> tuple[str, int]:
    """The line and the exit code that refuse a command line."""
    # whatever library refuses, the user sees one line
    with pytest.raises(Exception) as caught:  # noqa: PT011
        job.check(composed(*schema.prepared(list(arguments))))
    known = described(caught.value)
    assert known is not None, caught.value
    return known


@pytest.mark.parametrize(("typed", "text"), GUESSES, ids=[typed for typed, _ in GUESSES])
def test_a_guess_is_answered_with_what_to_write(composed: Composed, typed: str, text: str) -> None:
    """A user who guesses reads in one line what to type instead."""
    line, code = answer(composed, *typed.split())
    assert line.startswith(text), line
    assert code == 2
    assert "\n" not in line


def test_of_many_choices_the_nearest_are_named() -> None:
    """A list of 80 networks is no answer: three of them and those that may be meant are."""
    options = [f"net{i}" for i in range(20)]
    said = answers.no_choice("model", "net_19", options)
    assert (
        said
        == "model=net_19: no such choice; there are 20, such as net0, net1, net2; did you mean "
        "net19, net9, net1?"
    )


@pytest.mark.parametrize("name", ["vit_b_16", "efficientnet_b0", "resnet34", "resnet50", "small"])
def test_model_takes_every_classifier_of_torchvision(composed: Composed, name: str) -> None:
    """model=NAME works for torchvision's names as for the short forms."""
    assert composed(*schema.prepared([f"model={name}"])).model.name == name


def test_a_command_line_without_a_setting() -> None:
    """It asks for what conf/ says."""
    assert schema.prepared([]) == []


def test_model_takes_a_name_of_timms(composed: Composed) -> None:
    """As torchvision's; a dot is before the name of weights. A sweep may have several."""
    name = "timm/convnext_tiny.in12k_ft_in1k"
    assert composed(*schema.prepared([f"model={name}", "seed=1"])).model.name == name
    schema.prepared(["-m", f"model=small,timm/resnet18,{name}"])
    assert composed("model=timm/resnet18").model.name == "timm/resnet18"


def test_timm_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the commands that install it."""
    monkeypatch.setattr(schema.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="timm: .*uv sync --extra timm"):
        schema.check_model(ModelConfig(name="timm/resnet18"), ["small"])


def test_torchvisions_names_are_known_without_importing_it() -> None:
    """The names read from torchvision's source are those that it lists itself."""
    assert schema.classifiers() == sorted(zoo.list_models(module=zoo))


def test_every_data_set_has_its_values_in_conf() -> None:
    """The names that are checked early are those that can be opened."""
    assert schema.choices("data") == sorted([*DATASETS, FAKE, "own"])


def test_the_home_folder_may_be_written_as_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves the tilde after an equals sign alone; Hydra's deletion is left alone."""
    monkeypatch.setenv("HOME", "/home/me")
    assert schema.prepared(
        ["data.root=~/x,~/y", "resume=~", "~experiment", "a=b~c", "run.name=~"]
    ) == [
        "data.root=/home/me/x,/home/me/y",
        "resume=/home/me",
        "~experiment",
        "a=b~c",
        "run.name=~",
    ]


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("--multirun", "--multirun"),
        ("-m", "--multirun"),
        ("--cfg job", "--cfg=job"),
        ("--multi", "--multirun"),
        ("--config-path=/x", "--config-path=/x"),
        ("-cn x", "--config-name=x"),
        ("--help", "--help"),
        ("--info", "--info=all"),
    ],
)
def test_flags_of_hydra_pass(flags: str, found: str) -> None:
    """Hydra's own flags, their short forms and beginnings are those that Hydra takes."""
    assert schema.prepared(flags.split()) == [found]


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("resume=nowhere", "resume=nowhere: no such checkpoint; use null, auto or a path"),
        (
            "model.weights=default",
            "model.weights=default: no such file; use null, DEFAULT or a path",
        ),
    ],
)
def test_files_that_are_not_there_are_refused_at_once(
    composed: Composed, typed: str, text: str
) -> None:
    """A checkpoint or weights that are not there end the run before torch is imported."""
    with pytest.raises(CheckpointError, match=f"^{text}$"):
        job.check(composed(typed))


def test_weights_that_a_resumed_run_does_not_read_may_be_gone(
    composed: Composed, tmp_path: Path
) -> None:
    """A run that goes on takes its weights from its checkpoint."""
    job.check(composed(f"resume={tmp_path}", "model.weights=gone.pt"))


def test_a_name_of_a_layout_unknown_here_is_left_to_torchvision(
    composed: Composed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torchvision's names cannot be read from its source, none is refused early."""
    monkeypatch.setattr(schema, "classifiers", list)
    job.check(composed("model.name=resnet51"))


def ran(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``train.py`` in a process in which importing torch is an error."""
    (cwd / "torch.py").write_text("raise ImportError('torch was imported')")
    path = os.pathsep.join([str(cwd), str(ROOT)])
    return trained(cwd, *arguments, PYTHONPATH=path)


@pytest.mark.parametrize(
    "typed",
    ["model.name=resnet51", "data.name=cifar11", "model.weights=nope", "resume=nope", "--lr 1"],
)
def test_a_wrong_name_costs_neither_torch_nor_a_folder(tmp_path: Path, typed: str) -> None:
    """Names are checked before torch is imported and before the run's folder is made."""
    done = ran(tmp_path, *typed.split())
    assert done.returncode in (2, 4)
    assert done.stderr.startswith("error: ") and "torch was imported" not in done.stderr
    assert not (tmp_path / "outputs").exists()


def test_version_is_the_projects_own(tmp_path: Path) -> None:
    """--version says wellfed's, torch's and Python's version, and imports no torch."""
    done = ran(tmp_path, "--version")
    versions = (
        f"wellfed {metadata.version('wellfed')}, torch {metadata.version('torch')}, Python "
        f"{platform.python_version()}"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{versions}\n", "")


def test_help_shows_what_a_run_would_use(tmp_path: Path) -> None:
    """--help has the composed values, those of a named data set, and the choices."""
    plain = ran(tmp_path, "--help")
    cifar = ran(tmp_path, "data=cifar10", "--help")
    assert (plain.returncode, plain.stderr) == (cifar.returncode, cifar.stderr) == (0, "")
    for text in (
        "  trainer.epochs=5\n",
        "  optim.weight_decay=0.0005\n",
        "  optim.nesterov=true\n",
        "  augment.scale=[0.5,1.0]\n",
        "  data= cifar10, cifar100, digits, fake, imagefolder, imagenet, own, shapes\n",
        (
            "  model= resnet18, resnet50, small, any classifier of torchvision, "
            "timm/NAME, or model.name=my_module:build\n"
        ),
        "A run leaves its files in outputs/ in the folder where it is started.\n",
    ):
        assert text in plain.stdout
    for text in ("  data.name=cifar10\n", "  data.image_size=32\n", "  augment.crop=pad ["):
        assert text in cifar.stdout
