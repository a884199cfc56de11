"""The GPU check: what it keeps of parts that end badly, and of itself when it is killed.

The parts are stubs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from samples import comes_true

from scripts import gpu_check, gpu_parts
from scripts.gpu_check import DEADLINE_S, GROUPS, Findings, missing, scrubbed

ROWS = 20
SECRET = "s3cr3t-of-the-environment"
STUB = f"""
import json, os, pathlib, signal, subprocess, sys, time

def say(**said):
    os.write(1, json.dumps(said).encode() + b"\\n")

part = sys.argv[1]
say(machine={{"cpu": "made up"}})
for number in range({ROWS}):
    say(row={{"number": number}})
    time.sleep(0.005)
if part.startswith("fine"):
    say(ok="all")
elif part == "wrong":
    say(wrong="off by 2")
    say(ok="ran")
elif part == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
elif part == "chatty":
    os.write(1, b"no JSON at all\\n")
    sys.exit("no /home/somebody/file for {SECRET}")
elif part == "hang":
    beside = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path("PLACE").write_text(f"{{beside.pid}} {{os.getpid()}}")
    time.sleep(600)
"""


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stubs in place of the parts; a folder for what is found."""
    (tmp_path / "stub_parts.py").write_text(STUB.replace("PLACE", str(tmp_path / "beside")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("A_TOKEN", SECRET)
    monkeypatch.setattr(gpu_check, "PARTS", "stub_parts")
    return tmp_path


def found_in(folder: Path) -> dict[str, dict[str, Any]]:
    found = json.loads((folder / "gpu_check.json").read_text())
    return {part["part"]: part for part in found["parts"]}


def numbers(part: dict[str, Any]) -> list[int]:
    return [row["number"] for row in part.get("rows", [])]


def left_by(folder: Path) -> list[int]:
    """The processes of a part that hangs, once it does."""
    place = folder / "beside"
    return [int(pid) for pid in place.read_text().split()] if place.exists() else []


def started(stubs: Path, groups: dict[str, dict[str, int]]) -> subprocess.Popen[bytes]:
    """The check with ``groups`` of stubs, in a process that may be killed."""
    code = (
        "from scripts import gpu_check; gpu_check.PARTS, gpu_check.GROUPS, gpu_check.missing = "
        f"'stub_parts', {groups}, str; gpu_check.main(['--out', {str(stubs)!r}])"
    )
    paths = os.pathsep.join((str(gpu_check.ROOT), str(stubs)))
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.DEVNULL,
    )


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for counts."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("part", "status", "found"),
    [
        ("fine", "ok", "all"),
        ("wrong", "wrong", "ran"),
        ("crash", "failed", "ended with -11: "),
        ("chatty", "failed", "ended with 1: no *** for ***"),
    ],
)
def test_what_a_part_measured_is_kept_however_it_ends(
    stubs: Path, part: str, status: str, found: str
) -> None:
    """All its rows, how it ended, and in its last words no path and nothing of the environment; the
    next part runs.
    """
    findings = Findings(
        stubs / "gpu_check.json", {"group": {part: 60, "fine again": 60}}, quick=True
    )
    gpu_check.run({"group": {part: 60, "fine again": 60}}, findings, quick=True, deadline_s=120)
    ended, after = found_in(stubs).values()
    assert (ended["status"], ended["found"], numbers(ended)) == (
        status,
        found.strip(),
        list(range(ROWS)),
    )
    assert ended["problems"] == (["off by 2"] if part == "wrong" else [])
    assert after["status"] == "ok"


def test_a_part_that_hangs_is_killed_with_what_it_started(stubs: Path) -> None:
    """At its limit; its rows stay, and the next part has its turn."""
    groups = {"group": {"hang": 3, "fine": 60}}
    gpu_check.run(
        groups, Findings(stubs / "gpu_check.json", groups, quick=True), quick=True, deadline_s=120
    )
    hung, after = found_in(stubs).values()
    assert (hung["status"], numbers(hung), after["status"]) == (
        "cut short",
        list(range(ROWS)),
        "ok",
    )
    assert hung["found"].startswith("not done after 3 s")
    assert comes_true(lambda: all(map(is_gone, left_by(stubs))))


def test_the_deadline_is_for_all_parts(stubs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no time left is not begun, and the file says so."""
    monkeypatch.setattr(gpu_check, "_LEAST_S", 1.5)
    groups = {"group": {"hang": 600, "fine": 60}}
    begin = time.monotonic()
    gpu_check.run(
        groups, Findings(stubs / "gpu_check.json", groups, quick=True), quick=True, deadline_s=2.0
    )
    assert time.monotonic() - begin < 30
    assert [part["status"] for part in found_in(stubs).values()] == ["cut short", "not run"]


@pytest.mark.parametrize(
    "moment", [0, 1, *(pytest.param(moment, marks=pytest.mark.slow) for moment in (2, 3, 4))]
)
def test_a_kill_at_any_moment_leaves_what_was_measured(stubs: Path, moment: int) -> None:
    """The file is whole: parts that were through have all rows, the one that ran has its first
    ones, and the rest none.
    """
    groups = {"group": {f"fine {number}": 60 for number in range(5)}}
    check = started(stubs, groups)
    try:
        assert comes_true(lambda: (stubs / "gpu_check.json").exists(), 60)
        time.sleep(random.SystemRandom().uniform(0, 2))
    finally:
        check.kill()
        check.wait()
    parts = list(found_in(stubs).values())
    begun = [part for part in parts if part["status"] != "not run"]
    assert parts[: len(begun)] == begun
    assert all(part["status"] == "ok" and numbers(part) == list(range(ROWS)) for part in begun[:-1])
    assert all(numbers(part) == list(range(len(numbers(part)))) for part in begun[-1:])


def test_rows_are_in_the_file_while_a_part_runs(stubs: Path) -> None:
    """A check that is killed during a part that hangs has left its rows, and says that it was cut
    short.
    """
    check = started(stubs, {"group": {"hang": 400}})
    try:
        there = comes_true(
            lambda: len(left_by(stubs)) == 2 and len(numbers(found_in(stubs)["hang"])) == ROWS, 60
        )
    finally:
        check.kill()
        check.wait()
        for pid in left_by(stubs):
            os.kill(pid, signal.SIGKILL)
    hung = found_in(stubs)["hang"]
    assert there and (hung["status"], numbers(hung)) == ("cut short", list(range(ROWS)))


def test_it_starts_where_nothing_is_installed(tmp_path: Path) -> None:
    """As a file, from any folder; one line names the packages that are missing and two ways to get
    them.
    """
    script = gpu_check.ROOT / "scripts" / "gpu_check.py"
    done = subprocess.run(
        [sys.executable, "-S", "-I", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert done.stderr.startswith("gpu_check: missing: torch torchvision ")
    assert (
        "pip install hydra-core" not in done.stderr
        and "pip wheel --no-deps -w wheels torch" in done.stderr
    )
    assert list(tmp_path.iterdir()) == []


def test_only_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the version that this project needs; nothing is said where all are there."""
    assert missing() == ""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("hydra", "simplejpeg") else find(name),
    )
    assert missing().startswith(
        "gpu_check: missing: hydra-core==1.3.2 simplejpeg. With a network: "
    )


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("OSError: /home/ann/x y.jpg: no such file", "OSError: ***: no such file"),
        (
            f'File "{gpu_check.ROOT}/harness/feed/buffers.py", line 3',
            'File "harness/feed/buffers.py", line 3',
        ),
        ("/opt/ann/lib/python3.12/site-packages/torch/cuda/__init__.py", "torch/cuda/__init__.py"),
        (f"HTTP 403 with {SECRET}", "HTTP 403 with ***"),
        ("at 10.1.2.3, GPU-8f6c1c1e-0000-4000-8000-000000000001", "at ***, ***"),
        ("images/s 4.5/s, 1/2; ~/data", "images/s 4.5/s, 1/2; ***"),
        ("box-of-ann: login as ann", "***: login as ***"),
        ("driver 580.159.04, torch 2.11.0+cu130", "driver 580.159.04, torch 2.11.0+cu130"),
    ],
)
def test_nothing_private_is_told(text: str, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths, addresses, names of user and host and values of the environment go; figures and the
    project's files stay.
    """
    for name, value in {"HOME": "/home/ann/x y.jpg", "USER": "ann", "A_TOKEN": SECRET}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(gpu_check.platform, "node", lambda: "box-of-ann.example.org")
    assert scrubbed({"row": [text, 3]}) == {"row": [left, 3]}


def test_every_part_is_in_a_group_that_fits() -> None:
    """The parts of each group have time in one call, and each of them is known to the process that
    runs it.
    """
    assert [part for group in GROUPS.values() for part in group] == list(gpu_parts.PARTS)
    assert all(sum(group.values()) < DEADLINE_S <= 480 for group in GROUPS.values())


def test_an_unknown_group_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The line names what there is."""
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main(["--group", "stal"])
    assert "invalid choice: 'stal'" in capsys.readouterr().err
