"""Whole runs: what a user starts, sees and finds afterwards."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from archives import write_cifar10
from commands import ran, run_here, trained
from emulator import GB, Gpu, emulated
from loopback import files, site
from pictures import write_tree
from run_state import lines
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from torch import nn

from harness import config as schema
from harness.cli import app, job
from harness.config import Config, ConfigError
from harness.data.datasets import load
from harness.feed import feeds
from harness.feed.order import Order
from harness.runtime.errors import CheckpointError, NonFiniteError
from harness.runtime.limits import Limits
from harness.training import checkpoint_read
from harness.tuning.training_steps import TrainingBenchmark

ROOT = Path(__file__).parents[1]
Composed = Callable[..., Config]
FAKE = (  # batches of 8, 8 and 4 images, and of 8 and 4 to be validated
    "data=fake", "data.image_size=32", "data.generate.train_images=20",
    "data.generate.val_images=12", "loader.batch_size=8", "loader.drop_last=false",
)  # fmt: skip


def command(*overrides: str, launcher: tuple[str, ...] = (sys.executable,)) -> list[str]:
    """The command line of a run."""
    return [*launcher, str(ROOT / "train.py"), *overrides]


def started(cwd: Path, *overrides: str) -> subprocess.Popen[str]:
    """A run in a process group of its own."""
    return subprocess.Popen(
        command(*overrides),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a tuned run of two epochs, started as a user does."""
    cwd = tmp_path_factory.mktemp("finished")
    tuned = ("loader.autotune=true", "tuner.budget_s=3", "trainer.epochs=2", "run.name=first")
    done = trained(cwd, "data=digits", *tuned)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return cwd / "outputs" / "first", done.stdout


def test_the_console_tells_what_the_user_came_for(finished: tuple[Path, str]) -> None:
    """Before and after, the way to get it again, accuracy, speed, data wait, verdict, run folder,
    TensorBoard's command.
    """
    for text in (
        "outputs/first", "tuner=auto", "\nbefore  ", "\nafter   ", "loader.", "top-1 ",
        "images/s ", "data wait ", "verdict ", "tensorboard --logdir outputs",
    ):  # fmt: skip
        assert text in finished[1]


def test_the_mistakes_are_left_to_look_at(finished: tuple[Path, str]) -> None:
    """Tables, pictures and TensorBoard's images agree with the report; the console has counts."""
    folder, said = finished
    report = json.loads((folder / "report.json").read_text())
    mistakes = json.loads((folder / "mistakes.json").read_text())
    right = sum(mistakes["classes"]["correct"])
    assert right == round(report["top1"] * 359)
    assert 359 - right == sum(count for *_, count in mistakes["kinds"])
    assert all("picture" in row for row in mistakes["mistakes"])
    assert len(json.loads((folder / "first_batch.json").read_text())) == 16
    assert "10 classes with 139 to 146 training images" in said
    assert f"top-5          {report['top5']:.4f}" in said
    read = EventAccumulator(str(folder))
    read.Reload()
    pictures = {"train/first_batch", "val/confusion"}
    if right < 359:
        pictures.add("val/mistakes")
    assert {*read.Tags()["images"]} == pictures
    assert len((folder / "confusion.csv").read_text().splitlines()) == 11


def test_the_report_holds_what_it_promises(finished: tuple[Path, str]) -> None:
    """report.json has every promised field, consistent with the run."""
    report = json.loads((finished[0] / "report.json").read_text())
    named = [report[name] for name in ("status", "epochs", "steps", "val_images")]
    assert named == ["completed", 2, 44, 359]
    assert 0 <= report["top1"] <= report["top5"] <= 1
    assert report["loss"] > 0
    assert report["images_per_s"] > 0
    assert set(report["step_ms"]) == {"median", "p95", "max"}
    assert 0 <= report["data_wait_fraction"] <= 1
    assert report["stall_basis"] == "host"
    assert report["stall_fraction"] == report["data_wait_fraction"]
    assert report["loader"]["num_workers"] >= 0
    assert report["tuning"]["seconds"] > 0
    assert set(report["verdict"]) >= {"bottleneck", "sentence"}
    assert report["environment"]["torch"] == torch.__version__


def test_the_event_file_and_the_lines_hold_the_same_tags(finished: tuple[Path, str]) -> None:
    """Every tag that a CPU can give is in both; without NVML there are no gpu/ tags."""
    in_lines = {key for line in lines(finished[0]) for key in line} - {"step", "epoch", "time_s"}
    events = EventAccumulator(str(finished[0])).Reload()
    in_events = {tag for tag in events.Tags()["scalars"] if not tag.startswith("hparam/")}
    expected = {
        "train/loss", "train/lr", "val/top1", "val/top5", "val/loss", "speed/images_per_s",
        "stall/data_fraction", "stall/data_wait_fraction", "host/cpu_fraction",
        "host/ram_used_bytes",
        *(
            f"time/{name}_ms/{part}"
            for name in ("step", "data_wait", "compute")
            for part in ("median", "p95", "max")
        ),
    }  # fmt: skip
    assert expected <= in_lines
    assert in_events == in_lines
    assert not any(tag.startswith("gpu/") for tag in in_lines) or torch.cuda.is_available()


def test_the_folder_holds_the_run_and_no_more(finished: tuple[Path, str]) -> None:
    """Log, lock, settings, figures, tuning, report, mistakes and checkpoints are there."""
    names = {path.name for path in finished[0].iterdir() if not path.name.startswith("events.")}
    assert names == {
        ".hydra", ".lock", "checkpoints", "classes.csv", "confusion.csv", "first_batch.json",
        "metrics.jsonl", "mistakes.json", "report.html", "report.json", "train.log", "tuning.json",
    }  # fmt: skip
    tuning = json.loads((finished[0] / "tuning.json").read_text())
    assert tuning["trials"]  # how many there is time for depends on the machine


@pytest.mark.slow
def test_a_saved_config_starts_the_same_run_again(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    """A run's .hydra folder is a config of its own."""
    done = trained(
        tmp_path,
        "--config-path",
        str(finished[0] / ".hydra"),
        "--config-name",
        "config",
        "trainer.max_steps=1",
        "loader.autotune=false",
        "run.name=again",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "outputs/again/report.json").read_text())["steps"] == 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, kept_globals: None) -> list[str]:
    """Trials of steps, and data sets' images, in the order in which they are made."""
    made: list[str] = []
    demand = TrainingBenchmark.demand
    pixels = feeds.InMemoryImages
    monkeypatch.setattr(
        TrainingBenchmark, "demand", lambda *args: (made.append("steps"), demand(*args))[1]
    )
    monkeypatch.setattr(
        feeds, "InMemoryImages", lambda *args: (made.append("images"), pixels(*args))[1]
    )
    return made


ONE_STEP = ("data=digits", "trainer.max_steps=1", "loader.pin_memory=false")


@pytest.mark.parametrize(
    ("gpu", "backend", "expected"),
    [
        pytest.param(True, "arrays", ["steps", "images", "images"], id="on a GPU"),
        pytest.param(False, "arrays", ["images", "images"], id="on the host"),
        pytest.param(True, "threads", [], id="not all at once"),
    ],
)
def test_images_take_of_a_gpu_what_a_step_leaves(
    composed: Composed,
    tmp_path: Path,
    made: list[str],
    gpu: bool,
    backend: str,
    expected: list[str],
) -> None:
    """Before the images of both sets are put there, a step takes what the network needs."""
    config = composed(*ONE_STEP, f"loader.backend={backend}", "loader.num_workers=0")
    with emulated(Gpu()) if gpu else nullcontext():
        report = run_here(config, tmp_path / "run")
    assert (made, report["steps"]) == (expected, 1)


@pytest.mark.parametrize("reused", [True, False], ids=["remembered", "just now"])
def test_tuning_that_made_steps_needs_no_other(
    composed: Composed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    made: list[str],
    reused: bool,
) -> None:
    """A remembered choice was made without a step in this run: one comes before the images."""

    def tuned(found: feeds.Feeds, trials: Any, config: Config, limits: Limits, *_: Any) -> Any:
        train = found.settings(limits)
        return SimpleNamespace(
            look=lambda *_: None,
            report=SimpleNamespace(
                reused=reused,
                settings=train,
                val=found.val_settings(train),
                publish=lambda writer: None,
            ),
            summary=lambda: {"seconds": 1.0, "reused": reused},
        )

    monkeypatch.setattr("harness.tuning.tuner.tuned", tuned)
    config = composed(*ONE_STEP, "loader.autotune=true", "loader.backend=arrays")
    with emulated(Gpu()):
        run_here(config, tmp_path / "run")
    assert made == ["steps"] * reused + ["images", "images"]


@pytest.mark.usefixtures("kept_globals")
def test_a_report_names_a_device_of_any_type(composed: Composed, tmp_path: Path) -> None:
    """Not CUDA's alone."""
    device = Gpu()
    device.kind = "xpu"
    with emulated(device):
        report = run_here(composed(*ONE_STEP), tmp_path / "run")
    assert report["environment"]["device"] == device.name


@pytest.mark.usefixtures("kept_globals")
def test_the_peaks_of_a_gpus_memory_are_told(
    composed: Composed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the windows, the report, its page and the last words: training's and evaluation's apart,
    of what the GPU has.
    """
    monkeypatch.setattr(Gpu, "has_streams", False)
    with emulated(Gpu(21 * GB, 22 * GB, 25 * GB)):
        report = run_here(
            composed(*FAKE, "trainer.epochs=1", "watch.window_steps=2"), tmp_path / "run"
        )
    told = [
        {name: value for name, value in line.items() if "memory_peak" in name}
        for line in lines(tmp_path / "run")
    ]
    assert told == [
        {"gpu/memory_peak_allocated_bytes": 21 * GB, "gpu/memory_peak_reserved_bytes": 30 * GB},
        {"gpu/memory_peak_allocated_bytes": 22 * GB, "gpu/memory_peak_reserved_bytes": 30 * GB},
        {"val/memory_peak_allocated_bytes": 25 * GB},
    ]
    peaks = {
        "total_bytes": 80 * GB,
        "reserved_bytes": 30 * GB,
        "training_bytes": 22 * GB,
        "evaluation_bytes": 25 * GB,
    }
    assert report["gpu_memory"] == peaks
    assert json.dumps(peaks, separators=(",", ":")) in (tmp_path / "run/report.html").read_text()
    assert "25.0 GB" in capsys.readouterr().out


@pytest.mark.usefixtures("kept_globals")
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)
@pytest.mark.parametrize(("accumulate", "steps"), [(1, 6), (2, 4)])
def test_only_whole_batches_of_training_are_compiled(
    composed: Composed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int, steps: int
) -> None:
    """Over two epochs with short batches and evaluations there is one graph, made by the first step
    and kept to the end.
    """
    graphs = []
    ran = []
    compile_ = nn.Module.compile

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return lambda *inputs: (ran.append(len(graphs)), graph(*inputs))[1]

    torch.compiler.reset()
    monkeypatch.setattr(
        nn.Module, "compile", lambda network, **how: compile_(network, backend=counted, **how)
    )
    config = composed(
        *FAKE, "trainer.compile=true", "trainer.epochs=2", f"trainer.accumulate_steps={accumulate}"
    )
    report = run_here(config, tmp_path / "run")
    assert (report["steps"], report["val_images"]) == (steps, 12)
    assert (len(graphs), ran) == (1, [1] * 4)


@pytest.mark.usefixtures("kept_globals")
def test_no_loader_setting_changes_the_weights(composed: Composed, tmp_path: Path) -> None:
    """Workers, backends, prefetching, tuning and the prefetcher's thread leave the weights after
    two epochs bitwise the same.
    """
    common = (
        "data=digits", "trainer.epochs=2", "trainer.num_threads=1", "augment.hflip=0.5",
        "augment.vflip=0.5", "augment.rotate=20", "augment.auto=trivial",
    )  # fmt: skip
    ways = {
        "plain": ("loader.num_workers=0",),
        "threads ahead": (
            "loader.num_workers=2", "loader.prefetch_factor=3", "loader.persistent_workers=false",
            "loader.start_method=spawn",
        ),
        "fresh processes": (
            "loader.backend=processes", "loader.num_workers=2", "loader.persistent_workers=false",
            "loader.device_prefetch=false",
        ),
        "arrays": ("loader.backend=arrays",),
        "tuned": ("loader.autotune=true", "tuner.budget_s=3"),
    }  # fmt: skip
    weights = {}
    for name, overrides in ways.items():
        run_here(composed(*common, *overrides), tmp_path / name)
        weights[name] = checkpoint_read.read(tmp_path / name).state["model"]
        used = json.loads((tmp_path / name / "report.json").read_text())["loader"]["backend"]
        named = [backend for backend in ("processes", "arrays") if backend in name]
        assert name == "tuned" or used == (named or ["threads"])[0]
    run_here(composed(*common, "seed=1"), tmp_path / "other")
    other = checkpoint_read.read(tmp_path / "other").state["model"]
    for key, tensor in weights.pop("plain").items():
        assert all(torch.equal(tensor, found[key]) for found in weights.values()), key
        assert not torch.equal(tensor, other[key]) or tensor.ndim == 0


@pytest.mark.usefixtures("kept_globals")
@pytest.mark.parametrize(
    "overrides",
    [
        ("resume=nowhere",),
        ("model=resnet18",),
        ("optim=adamw",),
        ("data.root={tree}", "data=imagefolder", "data.split_fraction=0.5"),
    ],
    ids=["missing", "network", "optimizer", "classes"],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    composed: Composed,
    finished: tuple[Path, str],
    tmp_path: Path,
    overrides: tuple[str, ...],
) -> None:
    """A resume that cannot be exact is an error before the first step, never a fresh start."""
    write_tree(tmp_path, tree=40)
    filled = [override.format(tree=tmp_path / "tree") for override in overrides]
    config = composed(
        "data=digits",
        f"resume={finished[0]}",
        "loader.num_workers=0",
        "loader.batch_size=16",
        *filled,
    )
    with pytest.raises(CheckpointError):
        run_here(config, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.usefixtures("kept_globals")
def test_a_resume_keeps_this_runs_rate(
    composed: Composed, finished: tuple[Path, str], tmp_path: Path
) -> None:
    """The learning rate is that of this command line, not the checkpoint's."""
    more = ("trainer.epochs=3", "loader.num_workers=0", "optim.lr=0.01", "schedule=constant")
    run_here(composed("data=digits", f"resume={finished[0]}", *more), tmp_path / "run")
    groups = checkpoint_read.read(tmp_path / "run").state["optimizer"]["param_groups"]
    assert {group["lr"] for group in groups} == {0.01}


@pytest.mark.usefixtures("kept_globals")
def test_a_finished_run_keeps_its_report(
    composed: Composed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resumed with nothing left to train, a run says so, and leaves its report and its settings."""
    short = ("trainer.epochs=1", "trainer.max_steps=22", "loader.num_workers=0")
    common = ("data=digits", *short, "run.name=x")
    before = run_here(composed(*common), tmp_path)
    capsys.readouterr()
    again = composed(*common, "resume=auto", "optim.lr=0.01")
    assert run_here(again, tmp_path) == before
    assert not (tmp_path / ".hydra").exists()
    said = capsys.readouterr().out
    assert "resuming" not in said
    assert "step 22; " in said and "trainer.epochs" in said


@pytest.mark.usefixtures("kept_globals")
def test_a_run_that_ends_within_a_window_logs_it(composed: Composed, tmp_path: Path) -> None:
    """trainer.max_steps that is no multiple of the window loses no steps, and the run is saved."""
    run_here(composed("data=digits", "trainer.max_steps=13", "loader.num_workers=0"), tmp_path)
    assert [line["step"] for line in lines(tmp_path) if "train/loss" in line] == [10, 13]
    assert checkpoint_read.read(tmp_path).record.step == 13


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "sweep"])
def test_a_folder_of_the_user_s_is_resumed_by_itself(tmp_path: Path, kind: str) -> None:
    """With resume=auto the same command first starts in hydra.run.dir or hydra.sweep.dir, and then
    resumes there.
    """
    run = ["data=digits", "device=cpu", "loader.num_workers=0", "resume=auto", "seed=1"]
    run += [f"hydra.{kind}.dir=mine", *(["-m"] if kind == "sweep" else [])]
    steps = []
    for most in (2, 4):
        done = trained(tmp_path, *run, f"trainer.max_steps={most}")
        assert done.returncode == 0, done.stderr
        (report,) = tmp_path.glob("mine/**/report.json")
        steps.append(json.loads(report.read_text())["steps"])
    assert steps == [2, 4] and "after step 2" in done.stdout


@pytest.mark.parametrize("dist", ["single", "spawn"])
def test_torchrun_with_another_launcher_is_refused(
    composed: Composed, monkeypatch: pytest.MonkeyPatch, dist: str
) -> None:
    """Processes of torchrun that are told to train alone, or to start more, are refused."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=f"dist={dist}: started by torchrun, "):
        job.check(composed("data=digits", f"dist={dist}"))


@pytest.mark.usefixtures("kept_globals")
@pytest.mark.parametrize("balance", [0.0, 1.0], ids=["each once", "balanced"])
def test_losses_that_stay_nonfinite_end_the_run(
    composed: Composed, tmp_path: Path, balance: float
) -> None:
    """A learning rate that destroys the network ends in a non-finite
    error that names the ways out.
    """
    config = composed(
        "data=digits", f"data.balance={balance}", "optim.lr=1e30", "trainer.max_nonfinite_steps=5",
        "trainer.epochs=20", "loader.num_workers=0",
    )  # fmt: skip
    with pytest.raises(NonFiniteError, match=r"in a row had a non-finite loss .* lower optim\.lr"):
        run_here(config, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["status"] == "failed"
    # the samples of the last steps, as the order gave them
    noted = json.loads((tmp_path / "nonfinite.json").read_text())
    first, last = noted["steps"]
    digits = load(config.data, config.augment, config.seed).labels
    balance_of = (digits, balance) if balance else None
    order = Order(1438, config.loader.batch_size, seed=config.seed, balance=balance_of)
    batches = [(batch % 1438).tolist() for batch in order.batches(noted["epoch"] - 1)]
    before = (noted["epoch"] - 1) * len(order)
    assert noted["batches"] == batches[first - 1 - before : last - before]
    assert len(noted["batches"]) == last - first + 1 >= 5


@pytest.mark.usefixtures("kept_globals")
def test_a_bad_image_is_named(composed: Composed, tmp_path: Path) -> None:
    """A broken file in a tree ends the run with its path and what is wrong with it, from a worker
    too.
    """
    write_tree(tmp_path / "tree", train=8, val=8)
    (tmp_path / "tree/train/b/3.jpg").write_bytes(b"")
    config = composed(
        "data=imagefolder",
        f"data.root={tmp_path / 'tree'}",
        "data.image_size=32",
        "loader.batch_size=4",
        "loader.backend=processes",
        "loader.num_workers=1",
    )
    from harness.runtime.errors import BadSample

    with pytest.raises(BadSample, match=r"tree/train/b/3\.jpg: .*empty"):
        run_here(config, tmp_path / "run")


CIFAR = ("cifar10_best", "cifar10_fast", "cifar10_resnet18", "cifar10_resnet20")
TIMMS = [f"imagenet_resnet50_{name}" for name in ("a1", "a2", "a3")]


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Base address and MD5 of an archive in CIFAR-10's published format, served over loopback."""
    folder = tmp_path_factory.mktemp("cifar")
    md5 = write_cifar10(folder, rows=8)
    archive = "cifar-10-python.tar.gz"
    with (
        pytest.MonkeyPatch.context() as patch,
        site(files({archive: (folder / archive).read_bytes()})) as served,
    ):
        patch.setenv("no_proxy", "*")
        yield served.address, md5


@pytest.mark.usefixtures("kept_globals")
@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (ROOT / "conf/experiment").glob("*.yaml"))
)
def test_every_experiment_runs_a_step(
    composed: Composed, cifar: tuple[str, str], tmp_path: Path, name: str
) -> None:
    """Each experiment composes, and makes one update on a small stand-in for its data."""
    if name in TIMMS:
        pytest.importorskip("timm", reason="needs timm: uv sync --extra timm")
    imagenet = imagenet_overrides(tmp_path)
    needs = {
        **dict.fromkeys(CIFAR, cifar_overrides(cifar, tmp_path)),
        # fp16 takes a CPU ten times as long
        "cifar10_fast": (*cifar_overrides(cifar, tmp_path), "trainer.precision=fp32"),
        "imagenet_resnet50": (*imagenet, "data.image_size=64"),
        "imagenet_resnet50_v2": (*imagenet, "data.image_size=64", "data.train_size=48"),
        **dict.fromkeys(TIMMS, (*imagenet, "data.image_size=64", "model.name=timm/test_resnet")),
        "imagenet_resnet50_a3": (
            *imagenet,
            "data.image_size=64",
            "data.train_size=48",
            "model.name=timm/test_resnet",
        ),
        "imagenet_resnet50_16epochs": (
            *imagenet,
            "data.image_size=64",
            "data.eval_resize=72",
            "data.train_size=[48,56]",
            "trainer.precision=fp32",
        ),
        "finetune_convnext": (
            *imagenet,
            "model.name=convnext_tiny",
            "model.weights=null",
            "data.image_size=32",
        ),
        "finetune_vit": (
            "data=digits",
            "model=small",
            "model.weights=null",
            "data.image_size=32",
            "loader.batch_size=32",
        ),
        # no weights are fetched
        "finetune": ("data=digits", "model=small", "model.weights=null"),
    }
    config = composed(
        f"experiment={name}", "trainer.max_steps=2", "loader.num_workers=0", *needs.get(name, ())
    )
    report = run_here(config, tmp_path / "run")
    assert (report["status"], report["steps"]) == ("completed", 2)


def cifar_overrides(cifar: tuple[str, str], folder: Path) -> tuple[str, ...]:
    """The small archive in place of the published one."""
    return (
        f"data.mirror={cifar[0]}",
        f"data.md5={cifar[1]}",
        f"data.root={folder / 'data'}",
        "loader.batch_size=8",
    )


def imagenet_overrides(folder: Path) -> tuple[str, ...]:
    """A tree of a few JPEG files in ImageNet's layout."""
    root = write_tree(folder / "imagenet", (320, 260), "JPEG", train=2, val=2)
    return (f"data.root={root}", "loader.batch_size=2")


@pytest.mark.usefixtures("kept_globals")
@pytest.mark.parametrize("way", ["spawn", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_two_ranks_share_one_run(composed: Composed, tmp_path: Path, way: str) -> None:
    """Two gloo ranks leave one folder, one event file and exact evaluation counts on a set that
    they cannot halve.

    One of the ways is tuned first, by both ranks together.
    """
    small = ("data=digits", "device=cpu", "loader.batch_size=32", "loader.num_workers=0")
    tuned = ("loader.autotune=true", "tuner.budget_s=2", "tuner.max_workers=1")
    ways = {
        "spawn": ((sys.executable,), ("dist=spawn", "dist.nprocs=2", *tuned)),
        "torchrun": (
            (str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2"),
            (),
        ),
    }
    launcher, more = ways[way]
    overrides = (*small, "trainer.epochs=1", *more)
    done = ran(*command(*overrides, launcher=launcher), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("outputs/*/*")
    assert len(list(folder.glob("events.*"))) == 1
    assert schema.saved((folder / ".hydra/config.yaml").read_bytes())["dist"]["name"] == way
    report = json.loads((folder / "report.json").read_text())
    named = [report[name] for name in ("world_size", "global_batch_size", "steps", "val_images")]
    assert named == [2, 64, 22, 359]
    assert done.stdout.count("top-1 ") == 2
    assert (folder / "tuning.json").exists() == (way == "spawn")
    alone = run_here(
        composed("data=digits", "mode=evaluate", f"resume={folder}", "device=cpu"),
        tmp_path / "alone",
    )
    assert (alone["top1"], alone["loss"]) == (report["top1"], pytest.approx(report["loss"]))


def test_a_job_returns_its_best_top1(tmp_path: Path) -> None:
    """A sweeper is given the highest of all evaluations, and None of a run that had none or, as a
    diagnosis, reported nothing.
    """
    assert app._best_top1(tmp_path) is None
    for report, best in ({"top1": 0.25, "best_top1": 0.5}, 0.5), ({"status": "interrupted"}, None):
        (tmp_path / "report.json").write_text(json.dumps(report))
        assert app._best_top1(tmp_path) == best


@pytest.mark.slow
def test_a_sweep_loses_no_job(tmp_path: Path) -> None:
    """A failing job leaves the others whole; each has its folder and a row of its own with the same
    columns.
    """
    done = trained(
        tmp_path,
        "-m",
        "data=digits",
        "trainer.epochs=1",
        "loader.num_workers=0,1",
        "optim.lr=-1,0.1",
        "run.name=sweep",
    )
    assert done.returncode == 2
    for number in (0, 2):
        assert f"error: multirun/sweep/{number}: optim.lr=-1.0: must be >= 0.0" in done.stderr
    columns = []
    for number in (1, 3):
        folder = tmp_path / f"multirun/sweep/{number}"
        assert json.loads((folder / "report.json").read_text())["status"] == "completed"
        content = (
            EventAccumulator(str(folder))
            .Reload()
            .PluginTagToContent("hparams")["_hparams_/session_start_info"]
        )
        info = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
        columns.append(sorted(info.hparams))
    assert columns[0] == columns[1]
    assert {"loader.num_workers", "optim.lr"} <= set(columns[0])


LONG = ("data=digits", "trainer.epochs=500", "run.name=x")


def wait_for(what: Callable[[], bool], limit_s: float, process: subprocess.Popen[str]) -> None:
    """Wait until ``what`` holds; the process must live on meanwhile."""
    end = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """All processes that come from ``process``."""
    return psutil.Process(process.pid).children(recursive=True)


def gone(processes: list[psutil.Process], within_s: float) -> bool:
    """Whether all have ended within the time."""
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    "how",
    [
        signal.SIGHUP,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
    ],
    ids=lambda s: s.name,
)
def test_a_signal_ends_the_run_in_order(tmp_path: Path, how: signal.Signals) -> None:
    """Sent to the whole group in training, the run ends with 128 + n; files are whole, no worker is
    left.
    """
    process = started(tmp_path, *LONG, "loader.backend=processes", "loader.num_workers=1")
    folder = tmp_path / "outputs/x"
    wait_for(lambda: (folder / "checkpoints/last.pt").exists(), 90, process)
    children = descendants(process)
    assert children
    os.killpg(process.pid, how)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + how, output
    assert gone(children, 10)
    assert "Traceback" not in output
    report = json.loads((folder / "report.json").read_text())
    name = "Ctrl-C" if how is signal.SIGINT else how.name
    assert (report["status"], report["error"]) == ("interrupted", f"stopped by {name}")
    done = f"; epochs done: {report['epochs']} of 500"
    assert f"stopped after step {report['steps']}{done}" in output
    assert "\nresume with    " in output and output.endswith(f"error: stopped by {name}\n")
    logged = lines(folder)
    events = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in events.Scalars("train/lr")] == [
        line["step"] for line in logged if "train/lr" in line
    ]


# as sitecustomize.py: sends the command a signal while its networks are imported
STOPS = """
import multiprocessing, os, sys, time
class Stops:
    def find_spec(self, name, *_):
        if name == "wellfed.training.engine":
            if multiprocessing.current_process().name != "rank1":
                parent = multiprocessing.parent_process()
                os.kill(parent.pid if parent else os.getpid(), 15)
            time.sleep(10)
sys.meta_path.insert(0, Stops())
"""


@pytest.mark.parametrize("dist", ["single", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_signal_while_it_starts_ends_the_run_at_once(tmp_path: Path, dist: str) -> None:
    """Nothing is waited for and nothing saved: the exit code is the signal's."""
    (tmp_path / "sitecustomize.py").write_text(STOPS)
    run = ["data=digits", "device=cpu", "loader.num_workers=0", "run.name=x", f"dist={dist}"]
    run += ["dist.nprocs=2"] if dist == "spawn" else []
    done = trained(tmp_path, *run, PYTHONPATH=str(tmp_path))
    assert done.returncode == 143, done.stderr
    assert done.stderr.startswith("error: stopped by SIGTERM") and "grace" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "outputs/x/checkpoints").exists()


@pytest.mark.slow
def test_a_closed_terminal_ends_only_what_is_shown(tmp_path: Path) -> None:
    """Without SIGHUP the run trains to its end when the terminal that shows its bars closes."""
    ours, theirs = pty.openpty()
    run = ("data=digits", "device=cpu", "loader.num_workers=0", "run.name=x", "trainer.epochs=2")
    with subprocess.Popen(
        command(*run),
        cwd=tmp_path,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    ) as process:
        os.close(theirs)
        seen = b""
        while b"epoch 1/2" not in seen:
            seen += os.read(ours, 65536)
        os.close(ours)
    assert process.returncode == 0
    report = json.loads((tmp_path / "outputs/x/report.json").read_text())
    assert (report["status"], report["steps"]) == ("completed", 44)


@pytest.mark.slow
def test_a_crash_in_native_code_is_told(tmp_path: Path) -> None:
    """A run that dies of it prints where its threads were."""
    small = ("data.generate.train_images=1000", "data.generate.val_images=100")
    process = started(
        tmp_path, "data=shapes", "data.image_size=32", *small, "trainer.epochs=500", "run.name=x"
    )
    wait_for((tmp_path / "outputs/x/metrics.jsonl").exists, 90, process)
    process.send_signal(signal.SIGSEGV)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in output and "most recent call" in output


@pytest.mark.slow
def test_a_killed_trainer_leaves_no_worker_and_is_resumed(tmp_path: Path) -> None:
    """A SIGKILL of the trainer alone leaves no worker; the next run goes on where it was and gets
    better.
    """
    workers = ("loader.backend=processes", "loader.num_workers=1")
    arguments = ("data=digits", *workers, "run.name=x", "trainer.epochs=3")
    process = started(tmp_path, *arguments)
    folder = tmp_path / "outputs/x"
    wait_for(lambda: (folder / "checkpoints/last.pt").exists(), 90, process)
    children = descendants(process)
    process.kill()
    process.wait()
    assert gone(children, 4)  # torch's own workers look for their trainer every 5 s
    assert process.stdout is not None
    process.stdout.close()
    before = checkpoint_read.read(folder).record
    done = trained(tmp_path, *arguments, "resume=auto")
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "report.json").read_text())
    assert report["epochs"] == 3
    assert f"after step {before.step}, {before.epoch} epochs" in done.stdout
    assert before.top1 is not None
    assert report["top1"] > before.top1
    steps = [line["step"] for line in lines(folder) if "train/lr" in line]
    assert steps == sorted(set(steps))


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_saved(tmp_path: Path) -> None:
    """The run says what died, saves its last step, tells how to go on, and exits with 6."""
    process = started(tmp_path, *LONG, "loader.backend=processes", "loader.num_workers=1")
    folder = tmp_path / "outputs/x"
    wait_for(lambda: (folder / "checkpoints/last.pt").exists(), 90, process)
    # workers are children of the fork server; an evaluation may have one of its own
    children = psutil.Process(process.pid).children()
    for worker in [worker for child in children for worker in child.children()]:
        with suppress(psutil.NoSuchProcess):
            worker.kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 6, output
    assert "a worker died" in output
    assert "resume with" in output
    assert "Traceback" not in output
    report = json.loads((folder / "report.json").read_text())
    assert report["status"] == "failed"
    saved = checkpoint_read.read(folder).record
    assert saved.step == report["steps"]


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (("run.name=first",), 2),
        (("hydra.run.dir={}",), 2),
        (("++hydra.run.dir='{}'",), 2),
        (("-m", "hydra.sweep.dir={}/..", "hydra.sweep.subdir=first"), 2),
        (("hydra.run.dir={}/report.json/x",), 2),
        (("resume={}", "optim=adamw"), 4),
    ],
    ids=["name", "folder", "quoted", "sweep's folder", "no folder", "checkpoint"],
)
def test_a_refused_run_changes_nothing(
    finished: tuple[Path, str], tmp_path: Path, overrides: tuple[str, ...], code: int
) -> None:
    """In the folder of a finished run every file stays as it was, its settings too."""
    folder = tmp_path / "outputs" / "first"
    folder.parent.mkdir()
    shutil.copytree(finished[0], folder, symlinks=True)

    def content() -> dict[Path, bytes]:
        files = (path for path in folder.rglob("*") if path.is_file())
        return {
            path: path.read_bytes() for path in files if path.name not in (".lock", "train.log")
        }

    before = content()
    done = trained(tmp_path, "data=digits", *(each.format(folder) for each in overrides))
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    assert content() == before


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    """A second run with the same name exits with 9 and names the owner; the first one is not
    disturbed.
    """
    process = started(tmp_path, *LONG, "loader.num_workers=0")
    wait_for(lambda: (tmp_path / "outputs/x/.lock").exists(), 60, process)
    wait_for(lambda: (tmp_path / "outputs/x/.hydra/overrides.yaml").exists(), 60, process)
    before = (tmp_path / "outputs/x/.hydra/overrides.yaml").read_text()
    second = trained(tmp_path, "data=digits", "run.name=x", "seed=3")
    process.terminate()
    process.communicate(timeout=30)
    assert second.returncode == 9
    assert f"in use by process {process.pid}" in second.stderr
    assert (tmp_path / "outputs/x/.hydra/overrides.yaml").read_text() == before


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ((), False),
        (("loader.autotune=true",), False),
        (("loader.num_workers=2",), False),
        (("loader.num_workers=2", "loader.backend=processes"), True),
        (("loader.autotune=true", "tuner=grid"), True),
        (("data=own", "data.name=mine:open_splits"), True),
        (("mode=diagnose",), False),
    ],
    ids=["default", "tuned", "workers", "processes", "grid", "own data", "diagnosed"],
)
def test_the_fork_server_starts_early_where_processes_will_load(
    composed: Composed,
    monkeypatch: pytest.MonkeyPatch,
    typed: tuple[str, ...],
    expected: bool,
) -> None:
    """Elsewhere its imports would take a processor from what is measured: threads looked half as
    fast.
    """
    started: list[int] = []
    monkeypatch.setattr("harness.runtime.workers.start_server", lambda: started.append(1))
    # ends the rank before it begins
    monkeypatch.setattr("harness.runtime.distributed.joined", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        job.main_worker(0, job.Job(composed(*typed), Path(), ()))
    assert bool(started) is expected
