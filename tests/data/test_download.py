"""From an address to a whole file: what is retried, what is refused, and what is left behind."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from loopback import Answer, Site, files, reply, site

from harness.data import download
from harness.data.download import exclusive, fetch, md5_of
from harness.runtime import signals
from harness.runtime.errors import DataError, DiskError, Interrupted

NAME = "things.tar.gz"
BODY = bytes(range(256)) * 2000
MD5 = hashlib.md5(BODY, usedforsecurity=False).hexdigest()
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


def get(
    here: Site, target: Path, *, silence_s: float = 5.0, pauses_s: list[float] | None = None
) -> None:
    waited = [] if pauses_s is None else pauses_s
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(download, "_SILENCE_S", silence_s)
        fetch(f"{here.address}/{NAME}", target, md5=MD5, sleep=waited.append)


def test_whole_file(tmp_path: Path) -> None:
    """A file arrives under its final name, in a folder made for it, and nothing else is there."""
    with site(WHOLE) as here:
        get(here, tmp_path / "new" / NAME)
    assert (tmp_path / "new" / NAME).read_bytes() == BODY
    assert listing(tmp_path / "new") == [NAME]


def test_cut_off(tmp_path: Path) -> None:
    """After a cut-off the file is fetched again."""
    with site(in_turn(cut, WHOLE)) as here:
        get(here, tmp_path / NAME)
    assert len(here.asked) == 2
    assert (tmp_path / NAME).read_bytes() == BODY
    assert listing(tmp_path) == [NAME]


def test_cut_off_for_good(tmp_path: Path) -> None:
    """After three retries nothing is left, and the next run begins anew."""
    pauses_s: list[float] = []
    with (
        site(cut) as here,
        pytest.raises(DataError, match="connection closed after 256000 of 512000 bytes"),
    ):
        get(here, tmp_path / NAME, pauses_s=pauses_s)
    assert pauses_s == [1, 2, 4]
    assert len(here.asked) == 4
    assert listing(tmp_path) == []
    (tmp_path / f"{NAME}.part").write_bytes(BODY + b"of a killed run")
    with site(WHOLE) as here:
        get(here, tmp_path / NAME)
    assert (tmp_path / NAME).read_bytes() == BODY
    assert listing(tmp_path) == [NAME]


@pytest.mark.parametrize("code", [429, 500, 503])
def test_passing_fault(tmp_path: Path, code: int) -> None:
    """A server that is busy or broken is asked again."""
    with site(in_turn(lambda handler: reply(handler, code), WHOLE)) as here:
        get(here, tmp_path / NAME)
    assert len(here.asked) == 2
    assert listing(tmp_path) == [NAME]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(lambda h: reply(h, 404), "HTTP 404 Not Found", id="404"),
        pytest.param(lambda h: reply(h, 403), "HTTP 403 Forbidden", id="403"),
        pytest.param(
            lambda h: reply(h, 200, b"hm", Content_Type="text/html; charset=utf-8"),
            "web page",
            id="HTML by type",
        ),
        pytest.param(
            lambda h: reply(h, 302, Location=h.path),
            "HTTP 302 .* infinite loop",
            id="redirect loop",
        ),
        pytest.param(
            lambda h: reply(h, 302, Location="file:///etc/passwd"),
            "HTTP 302 .*file:///etc/passwd. is not allowed",
            id="redirect to a file",
        ),
        pytest.param(
            lambda h: reply(h, 200, BODY, Content_Length=""), "Content-Length", id="no length"
        ),
        pytest.param(lambda h: reply(h, 200), "Content-Length", id="no bytes"),
        pytest.param(
            lambda h: reply(h, 200, Content_Length=str(2**40)),
            "has 1099511627776 bytes",
            id="1 TiB",
        ),
        pytest.param(
            lambda h: reply(h, 200, BODY[::-1]),
            f"expected {MD5}, got [0-9a-f]+ .set data.md5",
            id="digest",
        ),
    ],
)
def test_refused(tmp_path: Path, answer: Answer, reason: str) -> None:
    """What another attempt cannot mend is refused at once, with the address, and leaves nothing."""
    pauses_s: list[float] = []
    with (
        site(answer) as here,
        pytest.raises(
            DataError, match=f"^{here.address}/{NAME}: .*({reason}).*; check the .*mirror"
        ),
    ):
        get(here, tmp_path / NAME, pauses_s=pauses_s)
    assert pauses_s == []
    assert listing(tmp_path) == []


def test_silence(tmp_path: Path) -> None:
    """A server that keeps the line open without sending is given up."""
    with (
        site(lambda handler: here.closing.wait()) as here,
        pytest.raises(DataError, match="timed out"),
    ):
        get(here, tmp_path / NAME, silence_s=0.3)
    assert len(here.asked) == 4
    assert listing(tmp_path) == []


def test_nobody_there(tmp_path: Path) -> None:
    """A host that refuses the connection is tried four times and named."""
    with site(WHOLE) as here:
        pass
    pauses_s: list[float] = []
    with pytest.raises(DataError, match=f"{here.address}/{NAME}: .*[Cc]onnection refused"):
        get(here, tmp_path / NAME, pauses_s=pauses_s)
    assert pauses_s == [1, 2, 4]
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://a/b", "/etc/passwd", "http://", "http:///b"],
)
def test_address(tmp_path: Path, url: str) -> None:
    """An address that is not of http or https is refused, before anything is made."""
    with pytest.raises(
        DataError, match=r"data\.mirror: not an http or https address, .*; set another, or put"
    ):
        fetch(url, tmp_path / "new" / NAME, md5=MD5)
    assert listing(tmp_path) == []


@pytest.mark.parametrize("scheme", ["https", "ftp"])
def test_secret_in_address(tmp_path: Path, scheme: str) -> None:
    """A password in the address is refused and not repeated."""
    with pytest.raises(DataError, match="would end in the logs") as caught:
        fetch(f"{scheme}://me:hush@example.org/x", tmp_path / NAME, md5=MD5)
    assert "hush" not in str(caught.value)


def test_two_processes(tmp_path: Path) -> None:
    """Of two processes one fetches; the other waits and finds the file."""
    go = threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        started.set()
        go.wait()
        WHOLE(handler)

    started = threading.Event()
    code = (
        "import sys, pathlib; from harness.data.download import fetch; fetch(sys.argv[1], "
        "pathlib.Path(sys.argv[2]), md5=sys.argv[3])"
    )
    with site(answer) as here:
        command = [sys.executable, "-c", code, f"{here.address}/{NAME}", str(tmp_path / NAME), MD5]
        try:
            with subprocess.Popen(command) as first:
                assert started.wait(30)
                with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as second:
                    assert second.stdout is not None
                    assert (
                        second.stdout.readline()
                        == f"Waiting for the process that holds {tmp_path / NAME}.part\n"
                    )
                    go.set()
        finally:
            go.set()
        assert (first.returncode, second.returncode) == (0, 0)
    assert here.asked == [None]
    assert listing(tmp_path) == [NAME]
    assert (tmp_path / NAME).read_bytes() == BODY


def test_signal(tmp_path: Path) -> None:
    """A signal ends a download that hangs, once the server's time is over."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        cut(handler)
        handler.wfile.flush()
        os.kill(os.getpid(), signal.SIGINT)
        here.closing.wait()

    with signals.caught(), site(answer) as here, pytest.raises(Interrupted):
        get(here, tmp_path / NAME, silence_s=1)
    with signals.caught():
        signals.check()  # the next block begins without the signal
    assert set(listing(tmp_path)) <= {f"{NAME}.part"}


def test_no_folder(tmp_path: Path) -> None:
    """A folder that cannot be made is a fault of the disk, named with its path."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(
        DiskError,
        match=r"file/things\.tar\.gz\.part: cannot be written: .*; free space or set another",
    ):
        fetch("http://127.0.0.1:9/x", tmp_path / "file" / NAME, md5=MD5)
    assert listing(tmp_path) == ["file"]


def test_disk_full(tmp_path: Path) -> None:
    """A write that fails is a fault of the disk, not of the network: it is not tried again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with site(WHOLE) as here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            with pytest.raises(DiskError, match=r"\.part: cannot be written: File too large"):
                get(here, tmp_path / NAME)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(here.asked) == 1
    assert listing(tmp_path) == [f"{NAME}.part"]


def test_link_in_place_of_part(tmp_path: Path) -> None:
    """A link where the part would lie is not followed, and gives way."""
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / f"{NAME}.part").symlink_to(tmp_path / "mine")
    with site(WHOLE) as here:
        get(here, tmp_path / NAME)
    assert md5_of(tmp_path / NAME) == MD5
    assert (tmp_path / "mine").read_bytes() == b"mine"


def test_exclusive_leaves_nothing(tmp_path: Path) -> None:
    """A lock without content is gone after its block."""
    with exclusive(tmp_path / "lock"):
        assert listing(tmp_path) == ["lock"]
    assert listing(tmp_path) == []
