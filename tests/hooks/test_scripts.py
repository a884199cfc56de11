"""Training scripts that are not ours, alone and watched: the same to the byte, and a right report.

Most are started from a process that has torch imported, by ``tests/support/zygote.py``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import ROOT, ran
from pictures import noise
from PIL import Image
from watched_runs import LOOPS, WATCH, Run, Start, anew, both, loaders
from zygote import Zygote

from harness.config import ConfigError
from harness.hooks import session
from harness.hooks.__main__ import main as watch_main


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """What starts most scripts."""
    with Zygote() as started:
        yield started


@pytest.fixture
def run(zygote: Zygote, tmp_path: Path) -> Start:
    """Runs one of the scripts both ways."""
    return lambda name, *rest: both(tmp_path, zygote.run, LOOPS / name, *rest)


@pytest.fixture
def run_anew(tmp_path: Path) -> Start:
    """Runs one of the scripts both ways, in processes that import all themselves."""
    return lambda name, *rest: both(tmp_path, anew, LOOPS / name, *rest)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs of four classes, 48 to train on and 16 to evaluate."""
    root = tmp_path_factory.mktemp("tree")
    for part, count in (("train", 12), ("val", 4)):
        for label in range(4):
            folder = root / part / f"class{label}"
            folder.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(noise(70 + i, 60 + label)).save(folder / f"{i}.jpg")
    return root


def line_of(name: str, text: str) -> str:
    """The file and line of a script that hold ``text``."""
    lines = (LOOPS / name).read_text().splitlines()
    return f"{name}:{next(i for i, line in enumerate(lines, 1) if text in line)}"


@pytest.mark.slow
def test_imagenet(run: Start, tree: Path) -> None:
    """Transforms are stages; the evaluation has time of its own, and its loader does not train."""
    report = run("imagenet.py", tree).equal()
    assert (report["status"], report["steps"], report["epochs"]) == ("completed", 12, 2)
    assert loaders(report) == [("imagenet.py", True, 2, 12), ("imagenet.py", False, 2, 4)]
    assert report["loaders"][0]["where"] == line_of("imagenet.py", "train_loader = DataLoader(")
    assert report["pauses_s"]["evaluate"] > 0.01 and report["images_per_s"] > 0
    assert [stage["name"] for stage in report["stages"]][:6] == [
        "read",
        "decode",
        "RandomResizedCrop",
        "RandomHorizontalFlip",
        "ToTensor",
        "Normalize",
    ]
    assert report["workers"]["samples"] == 96


@pytest.mark.slow
def test_evaluation_alone_is_no_training(run: Start, tree: Path) -> None:
    """One line says why there is no report."""
    found = run("imagenet.py", tree, "--evaluate")
    assert found.watched.stdout == found.alone.stdout and found.alone.returncode == 0
    assert found.report is None
    assert "no torch optimizer stepped" in found.watched.stderr


@pytest.mark.parametrize(
    ("rest", "batches"),
    [
        pytest.param((), 20, marks=pytest.mark.slow),
        (("--dry-run",), 2),
    ],
    ids=["all", "left"],
)
def test_mnist(run: Start, rest: tuple[str, ...], batches: int) -> None:
    """A loop that is left by break has made a pass too."""
    report = run("mnist.py", *rest).equal()
    assert report["steps"] == batches
    assert loaders(report) == [("mnist.py", True, 2, batches), ("mnist.py", False, 2, 2)]


def test_accumulation(run: Start) -> None:
    """A step is an update, of four batches; evaluations lie within an epoch."""
    report = run("accumulation.py").equal()
    assert report["steps"] == 14
    name = "accumulation.py"
    assert loaders(report) == [(name, True, 2, 60), (name, False, 2, 6)]
    assert report["pauses_s"]["evaluate"] > 0


def test_no_evaluation(run: Start, tmp_path: Path) -> None:
    """A loader that is made for each epoch is one; the rate is that of the script's own watch."""
    report = run("no_evaluation.py", tmp_path / "rate.json").equal()
    assert report["steps"] == 120
    assert loaders(report) == [("no_evaluation.py", True, 3, 120)]
    rate = json.loads((tmp_path / "rate.json").read_text())
    assert report["images_per_s"] == pytest.approx(rate, rel=0.1)


KINDS = (
    "workers", "no_workers", "hidden", "hidden_alone", "subset", "getitems", "whole", "stream",
    "stream_alone", "persistent", "pinned",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_loaders(run: Start, kind: str) -> None:
    """A loader of any kind gives what it gives alone, and its samples are counted."""
    report = run("odd_loaders.py", kind).equal()
    batches = 96 if kind == "whole" else 24
    assert report["steps"] == batches
    assert loaders(report) == [("odd_loaders.py", True, 2, batches)]
    assert report["workers"]["samples"] == 96
    is_known = kind in ("workers", "no_workers", "subset", "getitems", "whole", "persistent")
    names = [stage["name"] for stage in report["stages"]]
    assert ("Blurred" in names) == (is_known or kind == "pinned")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["spawn", "forkserver", "context"])
def test_workers_that_are_not_forked(run_anew: Start, kind: str) -> None:
    """They import the script, and are timed too."""
    report = run_anew("odd_loaders.py", kind).equal()
    assert (report["steps"], report["workers"]["samples"]) == (24, 96)
    assert "Blurred" in [stage["name"] for stage in report["stages"]]


def traceback(stderr: str) -> str:
    """What a script says of its error, without our lines, and the lines of their frames."""
    own = re.compile(r'  File "[^"]*(/harness/|zygote\.py|<frozen)[^"]*".*\n(    .*\n)*')
    # torch raises it in one of two lines: where the batch came just now, or was there already
    torchs = re.compile(r'(torch/utils/data/dataloader\.py", line )\d+(.*\n)(    .*\n)*')
    lines = torchs.sub(r"\1n\2", own.sub("", stderr)).splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("wellfed: "))


@pytest.mark.parametrize("kind", ["error", "error_alone"])
def test_a_sample_that_cannot_be_read(run: Start, kind: str) -> None:
    """The error of a worker is the script's, with its words."""
    found = run("odd_loaders.py", kind)
    report = found.equal()
    assert found.alone.returncode == 1
    assert (report["status"], report["epochs"], report["steps"]) == ("failed", 0, 10)
    assert traceback(found.watched.stderr) == traceback(found.alone.stderr)
    assert "ValueError: sample 40 cannot be read" in found.watched.stderr


@pytest.mark.slow
def test_an_error_is_told_as_without(run_anew: Start) -> None:
    """To the byte, causes with it, but for our lines; a command that imports all itself."""
    found = run_anew("ends.py", "error")
    report = found.equal()
    assert (report["status"], report["epochs"], report["steps"]) == ("failed", 0, 6)
    lines = found.watched.stderr.splitlines(keepends=True)
    theirs = "".join(line for line in lines if not line.startswith("wellfed: "))
    assert theirs == found.alone.stderr and "KeyError" in theirs
    assert found.alone.returncode == 1


WAYS = {
    "exit": (3, "failed"),
    "exit_text": (1, "failed"),
    "own_handler": (7, "failed"),
    "SIGINT": (-2, "interrupted"),
    "SIGTERM": (-15, "interrupted"),
}


@pytest.mark.parametrize("way", WAYS)
def test_ends(run: Start, way: str) -> None:
    """However a script ends, the exit status is its own, and there is a report."""
    found = run("ends.py", way)
    report = found.equal()
    assert (found.alone.returncode, report["status"]) == WAYS[way]
    assert (report["steps"], report["epochs"]) == (6, 0)
    assert traceback(found.watched.stderr) == traceback(found.alone.stderr)


def test_arguments_that_look_like_ours(run: Start) -> None:
    """What follows the script is the script's."""
    found = run("ends.py", "idle", "--out", "x", "-m", "--", "-h", "--no-tensorboard")
    assert found.watched.stdout == found.alone.stdout
    assert "'--out', 'x', '-m', '--', '-h', '--no-tensorboard'" in found.alone.stdout
    assert found.watched.returncode == 0
    assert "no torch DataLoader " in found.watched.stderr


def test_without_a_loader(run: Start) -> None:
    """Steps are counted, and the verdict is on no loader."""
    found = run("listed.py")
    report = found.equal()
    assert (report["steps"], report["verdict"]["bottleneck"]) == (400, "unknown")
    assert [each[1:] for each in loaders(report)] == [(False, 1, 40)]
    assert "400 steps" in found.watched.stderr and "few for a verdict" not in found.watched.stderr


def test_a_script_that_changes_its_folder(run: Start) -> None:
    """The report is where the command was typed."""
    assert run("moves.py").equal()["steps"] == 40


def test_the_folder_that_is_told(zygote: Zygote, tmp_path: Path) -> None:
    """It leads to the report from where the command was typed."""
    told = zygote.run(*WATCH, "--no-tensorboard", str(LOOPS / "moves.py"), cwd=tmp_path).stderr
    assert (tmp_path / told.split()[-1]).is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "typed",
    [
        ("./theirs/../theirs/names.py", "a", "--", "b"),
        ("-m", "theirs.names", "--", "b"),
        ("-P", "theirs/names.py"),
    ],
    ids=["script", "module", "safe path"],
)
def test_the_names_of_main(tmp_path: Path, typed: tuple[str, ...]) -> None:
    """A script finds all that Python gives it, and spawned processes find its classes."""
    package = tmp_path / "theirs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "names.py").write_text((LOOPS / "names.py").read_text())
    flags, rest = (typed[:1], typed[1:]) if typed[0] == "-P" else ((), typed)
    alone = ran(sys.executable, *typed, cwd=tmp_path, PYTHONPATH=str(ROOT))
    watched = ran(sys.executable, *flags, *WATCH, *rest, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert alone.returncode == watched.returncode == 0, watched.stderr
    assert watched.stdout == alone.stdout


@pytest.mark.slow
def test_an_error_in_the_syntax(tmp_path: Path) -> None:
    """It is told as Python tells it."""
    script = tmp_path / "train.py"
    script.write_text("for epoch in range(3)\n    pass\n")
    alone = ran(sys.executable, str(script), cwd=tmp_path)
    watched = ran(sys.executable, *WATCH, str(script), cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert (watched.returncode, watched.stderr) == (alone.returncode, alone.stderr)


WATCHED = ("-m", "wellfed", "watch")
TYPED = {
    "python train.py --lr 1": ("", *WATCHED, "train.py", "--lr", "1"),
    "--no-tensorboard python -u -X dev -m pkg.train c.py": (
        "", "-u", "-X", "dev", *WATCHED, "--no-tensorboard", "-m", "pkg.train", "c.py",
    ),
    "python -m torch.distributed.run --nproc-per-node 2 train.py": (
        "", "-m", "torch.distributed.run", "--nproc-per-node", "2", *WATCHED, "train.py",
    ),
    "--out r torchrun --nproc-per-node 2 train.py": (
        "torchrun", "--nproc-per-node", "2", *WATCHED, "--out", "r", "train.py",
    ),
    "-m torch.distributed.run -m pkg.train": (
        "python", "-m", "torch.distributed.run", *WATCHED, "-m", "pkg.train",
    ),
    "accelerate launch --cpu train.py": ("accelerate", "launch", "--cpu", *WATCHED, "train.py"),
    "deepspeed train.py": ("deepspeed", "--module", "wellfed", "watch", "train.py"),
    "/elsewhere/python3.9 train.py": ("/elsewhere/python3.9", *WATCHED, "train.py"),
}  # fmt: skip


@pytest.fixture
def typed_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """Types a command that ends in one line, and returns the line."""
    for name in ("argv", "path", "excepthook"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.chdir(tmp_path)

    def typed(command: str) -> str:
        sys.path = [*sys.path]
        assert watch_main(shlex.split(command)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return typed


@pytest.mark.parametrize("command", TYPED)
def test_another_program_before_the_script(
    command: str, typed_at: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This Python is started as typed; of any other program the line has the command."""
    program, *rest = TYPED[command]
    if program:
        assert shlex.split(typed_at(command).partition("; type ")[2]) == [program, *rest]
        return
    started: list[list[str]] = []

    def execv(path: str, arguments: list[str]) -> None:
        started.append(arguments)
        raise ConfigError("started")

    monkeypatch.setattr("os.execv", execv)
    typed_at(command)
    assert started == [[sys.executable, *rest]]


@pytest.mark.parametrize(
    ("command", "way"),
    [
        ("train.ipynb", "wellfed.watched(loader)"),
        ("lr.json", "pass a script that ends in .py"),
        ("lr.yaml", "pass a script that ends in .py"),
        ("train", "No such file"),
        ("trian.py --config config.py", "trian.py: No such file"),
        ("-m pkg/train.py", "type -m pkg.train"),
        ("-m nothing.train", "nothing"),
    ],
)
def test_what_is_no_script(
    command: str, way: str, typed_at: Callable[[str], str], tmp_path: Path
) -> None:
    """A line says so, and nothing is run."""
    for name in ("train.ipynb", "lr.json", "lr.yaml"):
        (tmp_path / name).write_text('{"lr": 1}')
    assert way in typed_at(command)


@pytest.mark.slow
def test_the_command_of_the_line_works(tmp_path: Path) -> None:
    """Of torchrun it has both ranks watched."""
    script = str(LOOPS / "ranks.py")
    launch = ("torchrun", "--standalone", "--nproc-per-node", "2")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    more = {"PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1"}
    told = ran(sys.executable, *WATCH, "--out", "report", *launch, script, cwd=tmp_path, **more)
    command = shlex.split(told.stderr.partition("; type ")[2])
    done = ran(*command, cwd=tmp_path, **more)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert (report["world_size"], report["steps"]) == (2, 20)


@pytest.mark.slow
def test_ranks_that_the_script_spawns(tmp_path: Path, run_anew: Start) -> None:
    """The first of them reports, and the process that waits for them says nothing."""
    found = run_anew("spawned.py", "store")
    report = found.equal()
    assert (report["steps"], report["world_size"], len(report["ranks"])) == (24, 2, 2)
    assert "no training was detected" not in found.watched.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ranks.py", "imagenet.py"])
def test_two_ranks(tmp_path: Path, tree: Path, name: str) -> None:
    """Under torchrun the first rank reports, with the figures of both."""

    def start(*arguments: str, cwd: Path) -> Run:
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
        apart = ("--redirects=3", "--log-dir=log")
        typed = (*launch, *apart, *arguments)
        done = ran(sys.executable, *typed, cwd=cwd, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        ranks = sorted(cwd.glob("log/*/attempt_0/*/stdout.log"))
        done.stdout = "".join(path.read_text() for path in ranks)
        return done

    rest = (tree,) if name == "imagenet.py" else ()
    found = both(tmp_path, start, LOOPS / name, *rest)
    report = found.equal()
    assert found.alone.returncode == 0 and len(found.alone.stdout.splitlines()) >= 10
    assert report["world_size"] == 2
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert report["steps"] == (20 if name == "ranks.py" else 6)
    assert loaders(report)[0][1:] == (True, 2, report["steps"])


@pytest.mark.slow
def test_tasks_of_srun(tmp_path: Path) -> None:
    """Processes that know each other by variables alone, as srun starts them."""

    def start(*arguments: str, cwd: Path) -> Run:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        told |= {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"}
        with ThreadPoolExecutor(2) as pool:
            tasks = [
                pool.submit(
                    ran, sys.executable, *arguments, cwd=cwd, PYTHONPATH=str(ROOT),
                    RANK=str(rank), SLURM_PROCID=str(rank), OMP_NUM_THREADS="1", **told,
                )
                for rank in range(2)
            ]  # fmt: skip
        first, second = (task.result() for task in tasks)
        first.stdout += second.stdout
        assert second.returncode == first.returncode
        return first

    report = both(tmp_path, start, LOOPS / "ranks.py").equal()
    assert (report["steps"], report["world_size"], len(report["ranks"])) == (20, 2, 2)
    # of this machine's processors each task has its own
    assert report["verdict"]["bottleneck"] != "neighbors"


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, 4),
        ({"LOCAL_WORLD_SIZE": "2"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, 1),
    ],
    ids=["spawned", "torchrun", "srun"],
)
def test_ranks_that_share_processors(
    variables: dict[str, str], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four ranks; what srun gives to each is measured as that."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert session._local_ranks(4) == ranks
