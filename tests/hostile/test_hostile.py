"""Settings, files of settings, variables and folders that no user means: one line, exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import ROOT, ran, trained

from harness import config as schema
from harness.config import ConfigError

pytestmark = pytest.mark.slow

HEAD = "# @package _global_\n"
FILES = {
    "tab": (b"optim:\n\tlr: 1\n", "line 2: found character"),
    "key twice": (f"{HEAD}seed: 1\nseed: 2\n".encode(), "line 3: found duplicate key seed"),
    "python": (f"{HEAD}seed: !!python/object/apply:os.getpid []\n".encode(), "line 2: could not"),
    "tag": (f"{HEAD}seed: !foo 1\n".encode(), "line 2: could not determine a constructor"),
    "merge": (f"{HEAD}<<: [1]\n".encode(), "line 2: expected a mapping for merging"),
    "latin-1": (f"{HEAD}seed: 1 # \xe9\n".encode("latin-1"), "'utf-8' codec can't decode"),
    "utf-16": (f"{HEAD}seed: 1\n".encode("utf-16"), "'utf-8' codec can't decode"),
    "deep": (f"{HEAD}x: {2000 * '['}{2000 * ']'}".encode(), "too deeply nested"),
    "long number": (f"{HEAD}seed: {5000 * '9'}".encode(), "the settings cannot be read: Exceeds"),
    "circle": (f"{HEAD}defaults:\n  - bad\n".encode(), "defaults"),
    "number": (b"5", "bad.yaml has no settings"),
    "zero byte": (f"{HEAD}seed: \x00\n".encode(), "bad.yaml"),
}


def refused(stderr: str, code: int) -> str:
    """The one line of a refusal."""
    assert code == 2, stderr
    (line,) = stderr.splitlines()
    assert line.startswith("error: ") and len(line) < 2100 and "\x1b" not in line
    return line


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_settings_that_is_none(name: str, tmp_path: Path) -> None:
    """It is named, with the line where there is one; nothing in it runs, and nothing hangs."""
    content, said = FILES[name]
    (tmp_path / "mine/experiment").mkdir(parents=True)
    (tmp_path / "mine/experiment/bad.yaml").write_bytes(content)
    done = trained(tmp_path, "--config-dir=mine", "experiment=bad", "data=digits")
    assert said in refused(done.stderr, done.returncode)
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["optim.lr=" + 10_000 * "9"], "the settings cannot be read: Exceeds the limit"),
        (["model.name=???"], "model.name"),
        (["run.name=a\x1b[31m"], "run.name=a\\x1b[31m"),
        (["watch.sample_s=1e30"], "watch.sample_s=1e+30: must be <= 3600.0"),
        (["dist.timeout_s=1e300"], "dist.timeout_s=1e+300: must be <= "),
        (["--run", "-m"], "Only one of --run, --multirun"),
        (["-sc"], "the settings cannot be read"),
        (["---"], "---: write settings as NAME=VALUE, without dashes; see --help"),
        (["--model", "resnet18"], "--model: write settings without dashes: model.name=resnet18"),
        (["--info=bogus"], "argument --info/-i: invalid choice: 'bogus'"),
        (
            ["hydra.run.dir=/dev/null/x"],
            "/dev/null/x cannot be used as the run folder: Not a directory",
        ),
        (["run.name=../../evil"], "run.name=../../evil: use up to 200 letters"),
    ],
    ids=lambda value: value[0][:30] if isinstance(value, list) else "",
)
def test_odd_words(arguments: list[str], said: str, tmp_path: Path) -> None:
    """What is typed comes back short and without control characters."""
    done = trained(tmp_path, *arguments)
    assert said in refused(done.stderr, done.returncode)
    assert not (tmp_path / "outputs").exists()


def test_a_package_that_there_is_not(tmp_path: Path) -> None:
    """Hydra's own line, with our exit code."""
    done = trained(tmp_path, "--cfg=job", "--package=nope")
    assert (done.returncode, done.stderr) == (2, "package 'nope' not found in config\n")


@pytest.mark.parametrize("setting", ["resume", "model.weights"])
def test_a_path_that_no_system_takes(setting: str, tmp_path: Path) -> None:
    """It is no checkpoint."""
    done = trained(tmp_path, f"{setting}={10_000 * 'x'}")
    assert done.returncode == 4
    assert "no such " in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "text", ["a: &x {b: *x}", "a: !!bool x", "a: !!timestamp x", "a: !!int ''"]
)
def test_settings_of_a_run_that_are_none(text: str) -> None:
    """Whatever YAML's reader raises of what lies in a run's folder, it is a ConfigError."""
    with pytest.raises(ConfigError):
        schema.saved(text.encode())


def test_files_that_nobody_asked_for_are_left_alone(tmp_path: Path) -> None:
    """A template of something else in the folder of settings is no fault of a run."""
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts/helm.yaml").write_text("a: {{ x }}\n---\nb: 1\n")
    (tmp_path / "charts/tab.yaml").write_text("a:\n\tb: 1\n")
    done = trained(tmp_path, "--config-dir=.", "--cfg", "job", "seed=7")
    assert done.returncode == 0, done.stderr
    assert "seed: 7" in done.stdout


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_odd_variables_of_a_launcher(name: str, tmp_path: Path) -> None:
    """A variable that is no number is named before anything starts."""
    numbers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    set_up = {**dict.fromkeys(numbers, "1"), name: "x"}
    done = trained(tmp_path, "data=digits", "dist=torchrun", **set_up)
    assert f"{name}=x is not a number" in refused(done.stderr, done.returncode)


def test_a_rank_that_another_launcher_left_is_not_ours(tmp_path: Path) -> None:
    """A variable alone makes no second rank: the run owns its folder, and is not trained over."""
    left = {"RANK": "1", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}
    run = ("data=digits", "trainer.max_steps=2", "device=cpu", "run.name=x")
    done = trained(tmp_path, *run, **left)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "outputs/x/report.json").exists()
    assert (tmp_path / "outputs/x/.hydra/config.yaml").exists()
    done = trained(tmp_path, *run, "seed=2", **left)
    assert "outputs/x contains a run" in refused(done.stderr, done.returncode)


def test_words_stay_as_they_were_typed(tmp_path: Path) -> None:
    """Hydra would make 1.5 of 1.50, and flags may stand between settings."""
    done = trained(tmp_path, "run.name=1.50", "--cfg", "job", "data.root=1e30", "seed=7")
    assert done.returncode == 0, done.stderr
    assert trained(tmp_path, "seed=7", "--info").returncode == 0
    for line in ("  name: '1.50'", "  root: '1e30'", "seed: 7"):
        assert line in done.stdout.splitlines()


def test_nobody_reads_what_is_printed(tmp_path: Path) -> None:
    """A run whose streams are closed, or read by something that ended, trains and ends with 0."""
    short = "data=digits device=cpu trainer.max_steps=2 watch.tensorboard=false"
    script = f"{sys.executable} {ROOT}/train.py {short} run.name"
    for name, how in (("a", "<&- >&- 2>&-"), ("b", "; echo $? >&2) | true")):
        text = f"{script}={name} {how}"
        done = ran("bash", "-c", f"({text}" if name == "b" else text, cwd=tmp_path)
        assert done.returncode == 0
        assert done.stderr == ("0\n" if name == "b" else "")
        assert (tmp_path / f"outputs/{name}/report.json").exists()
    script = f"({sys.executable} {ROOT}/train.py --help; echo $? >&2) | true"
    assert ran("bash", "-c", script, cwd=tmp_path).stderr in ("141\n", "0\n")


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    """Started in a folder that was removed meanwhile, a run says so."""
    script = f"rmdir {tmp_path}/gone; exec {sys.executable} {ROOT}/train.py data=digits"
    (tmp_path / "gone").mkdir()
    done = ran("bash", "-c", script, cwd=tmp_path / "gone")
    assert refused(done.stderr, done.returncode)


def test_sockets_need_a_short_path(tmp_path: Path) -> None:
    """A TMPDIR that is too long for worker processes is named."""
    long = tmp_path / (120 * "t")
    long.mkdir()
    done = trained(
        tmp_path,
        "data=digits",
        "loader.backend=processes",
        "loader.num_workers=1",
        "device=cpu",
        TMPDIR=str(long),
    )
    assert "TMPDIR: the path is too long" in refused(done.stderr, done.returncode)
