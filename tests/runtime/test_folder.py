"""The run's folder: one for each run, owned by one process, with a log in it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import oddities
import pytest
from oddities import Plant

from harness.config import ConfigError, Mode
from harness.runtime import folder
from harness.runtime.errors import DiskError, LockedError

NOW = datetime(2024, 2, 3, 4, 5, 6)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    yield
    while folder._owned:
        folder._owned.popitem()[1].close()


def test_two_runs_in_one_second_have_two_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second and the third run of a second get a suffix."""
    monkeypatch.setattr(folder, "datetime", SimpleNamespace(now=lambda: NOW))
    made = [folder.new_folder(Path("outputs")) for _ in range(3)]
    assert [str(path) for path in made] == [
        f"outputs/2024-02-03/04-05-06{suffix}" for suffix in ("", "-1", "-2")
    ]
    assert all(path.is_dir() for path in made)


@pytest.fixture
def other_run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that owns the folder ``run``."""
    script = (
        "import sys; from pathlib import Path; from harness.runtime.folder import own; "
        "print(own(Path('run')), flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"{script}; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "run\n"
        yield process
        process.kill()


def test_a_folder_has_one_owner_until_it_dies(other_run: subprocess.Popen[str]) -> None:
    """A second process is refused and told who owns the folder; after the owner's SIGKILL it gets
    it.
    """
    with pytest.raises(
        LockedError,
        match=rf"^run is in use by process {other_run.pid} on .*; .*set a different run.name",
    ):
        folder.own(Path("run"))
    other_run.kill()
    other_run.wait()
    assert folder.own(Path("run")) == Path("run")
    assert Path("run/.lock").read_text() == f"process {os.getpid()} on {os.uname().nodename}\n"


@pytest.mark.parametrize("make", [folder.own, folder.new_folder], ids=["own", "new"])
def test_a_folder_that_cannot_be_made_is_refused(make: object) -> None:
    """A file in the folder's place is a ConfigError that names the folder, the reason and the way
    out.
    """
    Path("taken").write_text("")
    with pytest.raises(
        ConfigError, match=r"^taken/x.* cannot be used .*: Not a directory; .*set hydra.run.dir"
    ):
        make(Path("taken/x"))  # type: ignore[operator]


def test_a_full_disk_is_no_error_of_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room for the folder, the disk is named, with its exit code."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(DiskError, match=r"^run: No space left on device; free some disk space$"):
        folder.own(Path("run"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_refused() -> None:
    """A read-only folder is a ConfigError before anything starts."""
    Path("run").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match=r"^run cannot be used .*: Permission denied; "):
        folder.own(Path("run"))


def test_a_run_without_a_name_has_a_new_folder() -> None:
    """run.name=null gives outputs/<date>/<time>, made."""
    made = Path(folder.run_folder(None))
    assert made.parts[0] == "outputs" and len(made.parts) == 3
    assert made.is_dir()


def test_a_new_folder_resumes_nothing() -> None:
    """resume=auto without a name is refused, and no folder is made."""
    with pytest.raises(ConfigError, match="^resume=auto: "):
        folder.run_folder(None, "auto")
    assert not Path("outputs").exists()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_named_folder_is_known_to_every_rank(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    """All ranks know a named folder without asking, and nothing is made yet."""
    monkeypatch.setenv("RANK", rank)
    assert folder.run_folder("mine") == "outputs/mine"
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("resume", "mode", "goes_on"),
    [("run", Mode.train, True), ("run", Mode.evaluate, False), ("elsewhere", Mode.train, False)],
)
def test_a_run_goes_on_in_the_folder_that_it_names(resume: str, mode: Mode, goes_on: bool) -> None:
    """A run's folder is taken for training alone; a checkpoint elsewhere begins a new folder."""
    Path("run/checkpoints").mkdir(parents=True)
    assert (folder.run_folder(None, resume, mode) == "run") is goes_on


@pytest.mark.parametrize(("rank", "name"), [(0, "train.log"), (2, "train-rank2.log")])
def test_the_log_goes_to_the_folder(tmp_path: Path, rank: int, name: str) -> None:
    """Inside the block the project's log is in the folder, one file a rank; afterwards the logger
    is as before.
    """
    logger = logging.getLogger(folder.LOGGER)
    former = logger.level, logger.propagate, list(logger.handlers)
    with folder.logging_to(tmp_path, rank) as log:
        log.info("hello")
    log.error("too late")
    assert (logger.level, logger.propagate, logger.handlers) == former
    assert (tmp_path / name).read_text().endswith(" INFO hello\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_log_on_a_full_disk_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines are lost without a traceback for each; the console has them."""
    told: list[str] = []
    console = logging.Handler()
    monkeypatch.setattr(console, "handle", lambda record: told.append(record.getMessage()))
    with folder.logging_to(tmp_path) as log:
        handler = log.handlers[-1]
        log.addHandler(console)
        assert isinstance(handler, logging.FileHandler)
        handler.stream.close()
        handler.stream = open("/dev/full", "w")  # noqa: SIM115
        log.info("lost")
        log.info("again")
        log.removeHandler(console)
    assert told == ["lost", "again"]
    assert capsys.readouterr().err == ""


def test_a_log_that_cannot_be_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, which names the folder."""

    def refuse(*given: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(logging, "FileHandler", refuse)
    with (
        pytest.raises(ConfigError, match=r" cannot be used .*: Permission denied; "),
        folder.logging_to(tmp_path),
    ):
        pass


def test_settings_are_written_through_no_link(tmp_path: Path) -> None:
    """What another run keeps there stays as it is."""
    (tmp_path / "other").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.hydra").symlink_to(tmp_path / "other")
    folder.write_settings(tmp_path / "run", {"config.yaml": "seed: 1\n"})
    assert (tmp_path / "run/.hydra/config.yaml").read_text() == "seed: 1\n"
    assert list((tmp_path / "other").iterdir()) == []


@pytest.mark.timeout(20)
@oddities.special
def test_an_odd_lock_is_refused(plant: Plant) -> None:
    """No link is followed and no FIFO waited for; what a link leads to keeps what it held."""
    oddities.put(plant, Path("run/.lock"))
    with pytest.raises(ConfigError, match=r"^run cannot be used [^:]*: \S.*; .*set hydra.run.dir"):
        folder.own(Path("run"))
    assert oddities.untouched(Path("run/.lock"))


@pytest.fixture(params=[errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK], ids=errno.errorcode.get)
def without_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file system whose files cannot be locked; the words that it refuses with."""

    def refuse(handle: object, how: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)
    return os.strerror(request.param)


def test_without_locks_runs_of_this_machine_are_kept_out(
    without_flock: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A second process is refused and told the owner, SIGKILL frees the folder at once, and one
    line says what is lacking.
    """
    script = f"""
import fcntl, sys
from pathlib import Path
def refuse(handle, how): raise OSError({errno.ENOSYS}, "none")
fcntl.flock = refuse
from harness.runtime.folder import own
print(own(Path("run")), flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    with process:
        assert process.stdout is not None and process.stdout.readline() == "run\n"
        with pytest.raises(
            LockedError,
            match=rf"^run is in use by process {process.pid} on .*; .*set a different run.name",
        ):
            folder.own(Path("run"))
        process.kill()
        process.wait()
        caplog.clear()
        assert folder.own(Path("run")) == folder.own(Path("run").resolve()).relative_to(tmp_path)
        folder.own(Path("other"))
        assert process.stderr is not None and len(process.stderr.read().splitlines()) == 1
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert f"{tmp_path}/run/.lock " in lines[0] and f" file locks ({without_flock})" in lines[0]
    assert Path("run/.lock").read_text() == f"process {os.getpid()} on {os.uname().nodename}\n"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        pytest.param(
            ConfigError("data.root=x: no such folder"),
            r" ERROR data\.root=x: no such folder\n$",
            id="known",
        ),
        pytest.param(
            KeyError("x"), r" ERROR Traceback .*test_folder\.py.*KeyError: 'x'\n$", id="unknown"
        ),
    ],
)
def test_a_failed_run_leaves_its_error_in_its_log(
    tmp_path: Path, error: Exception, text: str
) -> None:
    """The log ends with the error's line, or with the traceback of an error that nobody expected,
    and is told once.
    """
    with pytest.raises(type(error)), folder.logging_failure(tmp_path):
        raise error
    assert re.search(text, (tmp_path / "train.log").read_text(), re.S)


def test_an_error_outlives_its_folder(tmp_path: Path) -> None:
    """Where nothing can be logged any more, the run's own error is told."""
    place = tmp_path / "run"
    place.mkdir()
    place.rmdir()
    with pytest.raises(DiskError, match="the true cause"), folder.logging_failure(place):
        raise DiskError("the true cause")


@pytest.mark.parametrize(("left", "kept"), [((), False), (("report.json",), True)])
def test_a_refused_run_leaves_no_folder(tmp_path: Path, left: tuple[str, ...], kept: bool) -> None:
    """Unless it holds more than settings and a log."""
    place = tmp_path / "outputs" / "first"
    for name in (".lock", "train.log", ".hydra/config.yaml", *left):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).touch()
    folder.discard(place)
    assert place.exists() == kept == (tmp_path / "outputs").exists()
