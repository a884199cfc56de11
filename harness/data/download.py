"""Fetches a whole, checked file; lets only one process make files and folders.

A digest protects from rot and from a cut-off, not from an attacker: what passes is still read as a
stranger's.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import re
import threading
import time
import urllib.request as web
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from http.client import HTTPException
from io import BufferedRandom
from pathlib import Path
from typing import Any, NoReturn
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from harness.runtime import signals
from harness.runtime.errors import DataError, DiskError
from harness.runtime.files import make_way, open_regular, remove
from harness.runtime.folder import log
from harness.watch.console import progress, say

# how often a wait looks for a signal
_POLL_S = 0.1
_STALL_S = 30.0
_STALL_BYTES = 64 << 10
# more than any archive that is known here
_MOST_BYTES = 1 << 30
_ADVICE = "free space or set another data.root"


class _Fault(Exception):
    """A failed attempt. ``retry``: try again; ``restart``: discard the partial file first."""

    def __init__(self, reason: str, *, retry: bool = False, restart: bool = False) -> None:
        super().__init__(reason)
        self.retry = retry
        self.restart = restart


class _NoFtp(web.FTPHandler):
    """Refuses the one other protocol to which urllib lets a redirect lead."""

    def ftp_open(self, req: web.Request) -> NoReturn:
        raise ValueError("the server redirects to an ftp address")


def fetch(
    url: str,
    target: Path,
    *,
    md5: str,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Fetches ``url``, of http or https, to ``target``: whole, or not at all.

    The bytes, at most 1 GiB, go to ``<target>.part``, which is also the lock: a second process
    waits, then finds ``target`` there. After a network fault, or half a minute in which fewer
    than 64 KiB arrive, the next attempt goes on where the part ends if the server can, in this run
    (three times, with pauses by ``sleep``) or in a later one.

    Raises:
        DataError: the server cannot be reached, refuses, or sends what has not the digest ``md5``.
        DiskError: the file cannot be written.
    """
    try:
        address = urlsplit(url)
        has_host = address.hostname and address.port != 0 and "@" not in address.netloc
        usable = has_host and address.scheme in ("http", "https")
    except ValueError:
        usable = False
    # The address is not repeated here: it may hold a secret.
    if not usable:
        raise DataError(
            "data.mirror: not an http or https address, or one with a user name or a password, "
            "which would end in the logs; set another, or put the file into data.root by hand"
        )
    # The part's lock is held until the whole file is at its place.
    part = target.with_name(f"{target.name}.part")
    with _writing(part, _ADVICE), exclusive(part) as file:
        if target.is_file():
            return
        for pause_s in (1.0, 2.0, 4.0, None):
            try:
                _transfer(file, part, url, md5)
                break
            except _Fault as fault:
                if fault.restart:
                    file.truncate(0)
                if pause_s is None or not fault.retry:
                    raise DataError(
                        f"{url}: {fault}; check the network and the address (data.mirror)"
                    ) from fault
                log.warning("%s: %s; trying again in %g s", url, fault, pause_s)
                sleep(pause_s)
        os.fsync(file.fileno())
        os.replace(part, target)


def make_once(
    folder: Path,
    is_made: Callable[[], object],
    write: Callable[[Path], None],
    advice: str = _ADVICE,
) -> None:
    """Makes ``folder`` in one process: ``write`` fills another, renamed once it is whole.

    Raises:
        DiskError: it cannot be written; the message ends with ``advice``.
    """
    part = folder.with_name(f"{folder.name}.part")
    with _writing(folder, advice), exclusive(folder.with_name(f"{folder.name}.lock")):
        # by another process, meanwhile
        if is_made():
            return
        try:
            # of a process that was killed
            remove(part)
            part.mkdir()
            write(part)
            # No fsync: it takes longer than the writing, and what a power failure cut off is
            # refused when it is read.
            os.replace(part, folder)
        finally:
            remove(part)


def md5_of(path: Path) -> str:
    """Returns the MD5 digest of a file, in hexadecimal."""
    with open(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


@contextmanager
def _writing(path: Path, advice: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise DiskError(f"{path}: cannot be written: {reason}; {advice}") from error


@contextmanager
def exclusive(path: Path, wait_s: float = math.inf) -> Iterator[BufferedRandom]:
    """Opens ``path`` for reading and writing while no other process has it so.

    Left empty, the file is removed at the end. A killed process leaves no lock behind. What lies
    there and is no regular file gives way.

    Raises:
        TimeoutError: another process has had it for ``wait_s`` seconds.
        OSError: it cannot be opened.
        Interrupted: a signal came while waiting.
    """
    end_s = time.monotonic() + wait_s
    told = False
    path.parent.mkdir(parents=True, exist_ok=True)
    make_way(path)
    while True:
        with open(open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW), "r+b") as file:
            # "Not yet": another process holds it, or has renamed or removed it since the opening.
            owned = False
            with suppress(BlockingIOError, FileNotFoundError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                owned = os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
            if owned:
                try:
                    yield file
                finally:
                    file.flush()
                    if os.fstat(file.fileno()).st_size == 0:
                        # A folder may be read-only by now.
                        with suppress(OSError):
                            path.unlink()
                return
        if time.monotonic() >= end_s:
            raise TimeoutError(f"{path}: still held by another process after {wait_s:.0f} s")
        if not told:
            say(f"Waiting for the process that holds {path}")
            told = True
        signals.check()
        time.sleep(_POLL_S)


def _transfer(file: BufferedRandom, part: Path, url: str, md5: str) -> None:
    """Completes ``file``, which lies at ``part``."""
    here = file.seek(0, os.SEEK_END)
    due_s = time.monotonic() + _STALL_S
    opener = web.build_opener(_NoFtp)

    def asked(**headers: str) -> Any:
        request = web.Request(url, headers={"User-Agent": "wellfed", **headers})
        return _waited(lambda: opener.open(request, timeout=_STALL_S), due_s)

    # Ask for the rest, and believe the reply only in what it says.
    try:
        reply = asked(Range=f"bytes={here}-") if here else asked()
    except _Fault as fault:
        if not here or fault.retry:
            raise
        # it may refuse parts alone
        reply = asked()
    if reply.headers.get_content_type() == "text/html":
        raise _Fault("the server sent a web page in place of the file")
    if reply.status != 206:
        here = 0
    total = _size(reply, here)
    file.truncate(here)
    counted = file.seek(here)
    with progress(f"Downloading {part.stem}", total=total, unit="B") as bar:
        bar.advance(here)
        while chunk := _waited(lambda: reply.read1(1 << 18), due_s):
            file.write(chunk)
            bar.advance(len(chunk))
            if file.tell() - counted >= _STALL_BYTES:
                due_s = time.monotonic() + _STALL_S
                counted = file.tell()
    reply.close()
    file.flush()
    if file.tell() != total:
        raise _Fault(f"the connection closed after {file.tell()} of {total} bytes", retry=True)
    digest = md5_of(part)
    if digest != md5:
        # only a part may have come from elsewhere
        raise _Fault(
            f"the md5 digest differs: expected {md5}, got {digest} (set data.md5 if another "
            "archive is meant)",
            retry=here > 0,
            restart=True,
        )


def _size(reply: Any, here: int) -> int:
    """Returns the bytes of the whole file, of which ``reply`` gives those from ``here`` on."""
    total: int = reply.length or 0
    if reply.status == 206:
        span = re.match(r"bytes (\d+)-\d+/(\d+)", reply.headers.get("Content-Range", ""))
        if span is None or int(span[1]) != here:
            raise _Fault(
                "the server sent another range than was asked for", retry=True, restart=True
            )
        total = int(span[2])
    if not 0 < total <= _MOST_BYTES:
        raise _Fault(
            f"the server says that the file has {total or 'no'} bytes (Content-Length), not 1 to "
            f"{_MOST_BYTES}"
        )
    return total


def _waited(call: Callable[[], Any], due_s: float) -> Any:
    """Returns what ``call``, which may block, returns until ``due_s``.

    A thread makes the call, so that a signal is seen in time, and so is a server that sends one
    byte now and then, be it of its headers or of the body.
    """
    outcome: Future[Any] = Future()

    def work() -> None:
        try:
            outcome.set_result(call())
        except (OSError, HTTPException, ValueError) as error:
            outcome.set_exception(_fault(error))

    # Nobody closes the reply of a thread that still reads: closing would wait for it.
    threading.Thread(target=work, daemon=True).start()
    while time.monotonic() < due_s:
        signals.check()
        with suppress(TimeoutError):
            return outcome.result(_POLL_S)
    raise _Fault(f"stalled: fewer than {_STALL_BYTES >> 10} KiB in {_STALL_S:g} s", retry=True)


def _fault(error: Exception) -> _Fault:
    if isinstance(error, HTTPError):
        error.close()
        # Codes that speak of now, not of the address.
        retry = error.code >= 500 or error.code in (408, 425, 429)
        # of a loop of redirects it is three lines
        reason = str(error.reason).partition("\n")[0]
        return _Fault(f"HTTP {error.code} {reason}", retry=retry)
    if isinstance(error, URLError):
        return _Fault(str(error.reason), retry=True)
    return _Fault(str(error) or type(error).__name__, retry=not isinstance(error, ValueError))
