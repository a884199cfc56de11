"""From an address to a file: what is tried again, what is refused, and locks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from loopback import Answer, Site, files, reply, site

from harness.data import download
from harness.data.download import exclusive, fetch, make_once
from harness.runtime import signals
from harness.runtime.errors import DataError, DiskError, Interrupted

NAME = "things.tar.gz"
BODY = bytes(range(256)) * 2000
WHOLE = files({NAME: BODY})


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


def cut(handler: BaseHTTPRequestHandler) -> None:
    """Promise the whole file and close after a half."""
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(BODY)))
    handler.end_headers()
    handler.wfile.write(BODY[: len(BODY) // 2])


def in_turn(*answers: Answer) -> Answer:
    """Each answer once, the last one for ever."""
    left = list(answers)
    return lambda handler: (left.pop(0) if len(left) > 1 else left[0])(handler)


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def get(here: Site, target: Path, silence_s: float = 5.0) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(download, "_SILENCE_S", silence_s)
        patched.setattr(download, "_PAUSE_S", 0.0)
        fetch(f"{here.address}/{NAME}", target)


def test_cut_off(tmp_path: Path) -> None:
    """After a cut-off the file is fetched again."""
    with site(in_turn(cut, WHOLE)) as here:
        get(here, tmp_path / NAME)
    assert len(here.asked) == 2
    assert (tmp_path / NAME).read_bytes() == BODY


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(cut, "connection closed", id="cut off for good"),
        pytest.param(lambda h: reply(h, 404), "Not Found", id="404"),
        pytest.param(lambda h: reply(h, 503), "Service Unavailable", id="503"),
        pytest.param(lambda h: reply(h, 302, Location=h.path), "infinite loop", id="redirect loop"),
        pytest.param(
            lambda h: reply(h, 302, Location="file:///etc/passwd"),
            "file:///etc/passwd. is not allowed",
            id="redirect to a file",
        ),
    ],
)
def test_refused(tmp_path: Path, answer: Answer, reason: str) -> None:
    """Three attempts, then one line with the address."""
    with (
        site(answer) as here,
        pytest.raises(DataError, match=f"^{here.address}/{NAME}: .*{reason}.*mirror") as caught,
    ):
        get(here, tmp_path / NAME)
    assert "\n" not in str(caught.value)
    assert len(here.asked) == 3 or "redirect" in reason or "infinite" in reason


def test_silence(tmp_path: Path) -> None:
    """A server that keeps the line open without sending is given up."""
    with (
        site(lambda handler: here.closing.wait()) as here,
        pytest.raises(DataError, match="timed out"),
    ):
        get(here, tmp_path / NAME, silence_s=0.3)


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://a/b", "/etc/passwd", "http://", "http:///b"],
)
def test_address(tmp_path: Path, url: str) -> None:
    """An address that is not of http or https is refused, before anything is made."""
    with pytest.raises(DataError, match=r"data\.mirror .*data\.root"):
        fetch(url, tmp_path / NAME)
    assert listing(tmp_path) == []


@pytest.mark.parametrize("scheme", ["https", "ftp"])
def test_secret_in_address(tmp_path: Path, scheme: str) -> None:
    """A password in the address is refused and not repeated."""
    with pytest.raises(DataError, match=r"^data\.mirror ") as caught:
        fetch(f"{scheme}://me:hush@example.org/x", tmp_path / NAME)
    assert "hush" not in str(caught.value)


def test_signal(tmp_path: Path) -> None:
    """A signal ends a download that hangs, once the server's time is over."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        cut(handler)
        handler.wfile.flush()
        os.kill(os.getpid(), signal.SIGINT)
        here.closing.wait()

    with signals.handle_signals(), site(answer) as here, pytest.raises(Interrupted):
        get(here, tmp_path / NAME, silence_s=1)
    with signals.handle_signals():
        signals.check()  # the next block begins without the signal


def test_two_processes(tmp_path: Path) -> None:
    """Of two processes one makes a folder; the other waits and finds it."""
    code = (
        "import sys, pathlib; from harness.data.download import make_once\n"
        "place = pathlib.Path(sys.argv[1])\n"
        "make_once(place, place.is_dir, lambda part: print('made', input()))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "tree")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as first:
        while not (tmp_path / "tree.part").exists():
            assert first.poll() is None
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as second:
            assert second.stdout is not None
            assert second.stdout.readline().startswith("Waiting for ")
            told, _ = first.communicate("it\n", timeout=30)
            assert (told, second.communicate(timeout=30)[0]) == ("made it\n", "")
    assert (first.returncode, second.returncode) == (0, 0)
    assert listing(tmp_path) == ["tree"]


@pytest.mark.parametrize("found", ["nothing", "folder", "file", "half-made"])
def test_what_is_made_once(tmp_path: Path, found: str, caplog: pytest.LogCaptureFixture) -> None:
    """What lies in the folder's place gives way, with a warning."""
    place = tmp_path / "tree"
    if found == "folder":
        place.mkdir()
        (place / "old").touch()
    if found == "file":
        place.touch()
    if found == "half-made":
        (tmp_path / "tree.part").mkdir()
        (tmp_path / "tree.part/old").touch()
    make_once(place, (place / "new").exists, lambda part: (part / "new").touch())
    make_once(place, (place / "new").exists, lambda part: pytest.fail("made twice"))
    assert (listing(tmp_path), listing(place)) == (["tree"], ["new"])
    assert len(caplog.records) == (found in ("folder", "file"))


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """A fault of the disk is named with the path."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DiskError, match="file/tree: cannot be written: .*; free space or set"):
        make_once(tmp_path / "file/tree", lambda: False, lambda part: None)
    assert listing(tmp_path) == ["file"]


def test_a_lock_leaves_nothing_and_gives_way_to_none(tmp_path: Path) -> None:
    """A lock is gone after its block, and what is no regular file in its place is no hindrance."""
    os.mkfifo(tmp_path / "lock")
    with exclusive(tmp_path / "lock"):
        assert listing(tmp_path) == ["lock"]
    assert listing(tmp_path) == []


def test_a_wait_is_told_and_ends_by_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that waits for a stopped one says so."""
    monkeypatch.setattr(signals, "_received", [(15, 0.0)])
    with exclusive(tmp_path / "lock"), pytest.raises(Interrupted), exclusive(tmp_path / "lock"):
        pytest.fail("two at once")
    assert f"{tmp_path}/lock" in capsys.readouterr().out
