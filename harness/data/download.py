"""From an address on the web to a whole, checked file; and files and folders that only one process
makes.

A digest protects from rot and from a cut-off, not from an attacker: what passes it is still read as
a stranger's.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import logging
import math
import os
import queue
import re
import threading
import time
import urllib.request as web
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from io import BufferedRandom
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from harness.runtime import signals
from harness.runtime.errors import DataError, DiskError, printable
from harness.runtime.files import make_way, open_regular, remove
from harness.runtime.folder import LOGGER
from harness.watch.console import progress, say

# before each attempt
_PAUSES_S = (0.0, 1.0, 2.0, 4.0)
# how often a wait looks for a signal
_POLL_S = 0.1
_CHUNK_BYTES = 1 << 18
_STALL_BYTES = 1 << 16
_MAX_BYTES = 1 << 30
# HTTP codes below 500 that speak of now, not of the address
_TRY_AGAIN = (408, 425, 429)
_PAGE = "the server sent a web page in place of the file"
_ADVICE = "free space or set another data.root"

_log = logging.getLogger(LOGGER)


class _Fault(Exception):
    """Why an attempt failed; ``again``: another one may succeed, ``anew``: but not with the bytes
    that are there.
    """

    def __init__(self, reason: str, *, again: bool = False, anew: bool = False) -> None:
        super().__init__(reason)
        self.again = again
        self.anew = anew


def fetch(
    url: str,
    target: Path,
    *,
    md5: str | None = None,
    stall_s: float = 30.0,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Put what the http or https address ``url`` gives, up to 1 GiB, at ``target``: whole and with
    ``md5``, or not at all.

    The bytes go to ``<target>.part``, which is also the lock: a second process waits, then finds
    ``target`` there. After a network fault, or ``stall_s`` seconds in which fewer than 64 KiB
    arrive, the next attempt goes on where the part ends if the server can, in this run (``sleep``
    waits for so many seconds between two attempts) or in a later one.

    Raises:
        DataError: the server cannot be reached, refuses, or sends something else.
        DiskError: the file cannot be written.
    """
    _check_address(url)
    part = target.with_name(f"{target.name}.part")
    with _writing(part, _ADVICE), exclusive(part) as file:
        if not target.is_file():
            _fetch_into(file, part, url, md5, stall_s, sleep)
            os.fsync(file.fileno())
            os.replace(part, target)


def make_once(
    folder: Path, is_made: Callable[[], bool], write: Callable[[Path], None], advice: str = _ADVICE
) -> None:
    """Make ``folder``: ``write`` fills one of another name, which gets its own once it is whole;
    one process does so.

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
    """The MD5 digest of a file, in hexadecimal."""
    with open(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


@contextmanager
def _writing(path: Path, advice: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"{printable(str(path))}: cannot be written: {error.strerror or error}; {advice}"
        ) from error


@contextmanager
def exclusive(path: Path, wait_s: float = math.inf) -> Iterator[BufferedRandom]:
    """``path``, opened for reading and writing while no other process has it so; left empty, it is
    removed at the end.

    The lock is the kernel's (``flock``) and goes with the process: a killed owner leaves none
    behind. What lies there and is no regular file gives way.

    Raises:
        TimeoutError: another process has had it for ``wait_s`` seconds.
        OSError: it cannot be opened.
        Interrupted: a signal came while waiting.
    """
    end_s = time.monotonic() + wait_s
    path.parent.mkdir(parents=True, exist_ok=True)
    make_way(path)
    for attempt in itertools.count():
        with open(open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW), "r+b") as file:
            if _owns(file, path):
                try:
                    yield file
                finally:
                    file.flush()
                    if os.fstat(file.fileno()).st_size == 0:
                        with suppress(OSError):
                            # of a folder that may only be read
                            path.unlink()
                return
        if time.monotonic() >= end_s:
            raise TimeoutError(
                f"{printable(str(path))}: still held by another process after {wait_s:.0f} s"
            )
        if attempt == 0:
            say(f"Waiting for the process that holds {path}")
        signals.check()
        time.sleep(_POLL_S)


def _owns(file: BufferedRandom, path: Path) -> bool:
    # Held by another process, or renamed or removed by its owner after it was opened here: both
    # mean "not yet".
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    return False


def _check_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        reason = "is not an http or https address; set one, or put the file into data.root by hand"
        raise DataError(f"data.mirror: {printable(url)} {reason}")
    # The address is not repeated here: it holds a secret.
    if "@" in parts.netloc:
        raise DataError(
            "data.mirror: a user name or a password in the address would end in the logs; leave it "
            "out"
        )


def _fetch_into(
    file: BufferedRandom,
    part: Path,
    url: str,
    md5: str | None,
    stall_s: float,
    sleep: Callable[[float], None],
) -> None:
    reason = ""
    for pause_s in _PAUSES_S:
        if pause_s:
            _log.warning("%s: %s; trying again in %g s", url, reason, pause_s)
            sleep(pause_s)
        try:
            resumed = _transfer(file, url, stall_s)
            digest = md5_of(part)
            if md5 is None or digest == md5.lower():
                return
            reason = (
                f"the md5 digest differs: expected {md5}, got {digest} (set data.md5 if "
                "another archive is meant)"
            )
            # only a part may have come from elsewhere
            raise _Fault(reason, again=resumed, anew=True)
        except _Fault as fault:
            reason = str(fault)
            if fault.anew:
                file.truncate(0)
            if not fault.again:
                break
    raise DataError(
        f"{printable(url)}: {printable(reason)}; check the network and the address (data.mirror)"
    )


def _transfer(file: BufferedRandom, url: str, stall_s: float) -> bool:
    """Fill ``file`` to its end; True if it went on from bytes that were there before."""
    here = file.seek(0, os.SEEK_END)
    headers = {"User-Agent": "wellfed"} | ({"Range": f"bytes={here}-"} if here else {})
    arrivals = _arrivals(web.Request(url, headers=headers), stall_s)
    reply = next(arrivals)
    assert isinstance(reply, HTTPResponse)
    start, total = _extent(reply, here)
    file.truncate(start)
    file.seek(start)
    with progress(f"Downloading {Path(urlsplit(url).path).name}", total=total, unit="B") as bar:
        bar.advance(start)
        for chunk in arrivals:
            assert isinstance(chunk, bytes)
            if file.tell() == 0 and chunk.lstrip()[:5].lower() in (b"<!doc", b"<html"):
                raise _Fault(_PAGE)
            file.write(chunk)
            bar.advance(len(chunk))
    file.flush()
    if file.tell() != total:
        raise _Fault(f"the connection closed after {file.tell()} of {total} bytes", again=True)
    return start > 0


def _extent(reply: HTTPResponse, asked: int) -> tuple[int, int]:
    """Where in the file the body begins, and the size of the whole file, in bytes."""
    if reply.headers.get_content_type() == "text/html":
        raise _Fault(_PAGE)
    start = asked if reply.status == 206 else 0
    if start and not reply.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
        raise _Fault("the server sent another range than was asked for", again=True, anew=True)
    length = reply.headers.get("Content-Length", "")
    if not re.fullmatch(r"[0-9]+", length) or start + int(length) == 0:
        raise _Fault(
            "the server does not give the file's size (Content-Length), so that a cut-off could "
            "not be told"
        )
    if start + int(length) > _MAX_BYTES:
        raise _Fault(f"the server offers {length} bytes, more than any archive that is known here")
    return start, start + int(length)


def _arrivals(request: web.Request, stall_s: float) -> Iterator[HTTPResponse | bytes]:
    """The reply, then its body as it comes.

    A thread makes the blocking calls, so that a signal is seen in time, and so is a server that
    sends one byte now and then, be it of its headers or of the body.
    """
    arrived: queue.Queue[HTTPResponse | bytes | Exception] = queue.Queue(maxsize=8)

    def pump() -> None:
        with suppress(queue.Full):
            # nobody listens any more: the attempt was given up
            try:
                with _opener().open(request, timeout=stall_s) as reply:
                    arrived.put(reply, timeout=stall_s)
                    while chunk := reply.read1(_CHUNK_BYTES):
                        arrived.put(chunk, timeout=stall_s)
                    arrived.put(b"", timeout=stall_s)
            except (OSError, HTTPException, ValueError) as error:
                arrived.put(_fault(error), timeout=stall_s)

    threading.Thread(target=pump, name="download", daemon=True).start()
    due_s = time.monotonic() + stall_s
    received = 0
    while True:
        signals.check()
        with suppress(queue.Empty):
            item = arrived.get(timeout=_POLL_S)
            if isinstance(item, Exception):
                raise item
            if item == b"":
                return
            received += len(item) if isinstance(item, bytes) else 0
            yield item
        if received >= _STALL_BYTES:
            due_s = time.monotonic() + stall_s
            received = 0
        elif time.monotonic() > due_s:
            raise _Fault(
                f"stalled: fewer than {_STALL_BYTES >> 10} KiB in {stall_s:g} s", again=True
            )


def _opener() -> web.OpenerDirector:
    """What ``urlopen`` uses, without the handlers of file and ftp: a redirect may lead to http and
    https only.
    """
    opener = web.OpenerDirector()
    ways = (web.ProxyHandler, web.UnknownHandler, web.HTTPHandler, web.HTTPSHandler)
    for handler in (
        *ways,
        web.HTTPDefaultErrorHandler,
        web.HTTPRedirectHandler,
        web.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    return opener


def _fault(error: Exception) -> _Fault:
    if isinstance(error, HTTPError):
        error.close()
        reason = "a redirect that cannot be followed" if error.code < 400 else str(error.reason)
        if error.code == 416:
            return _Fault("the server cannot go on from there", again=True, anew=True)
        return _Fault(
            f"HTTP {error.code} {reason}", again=error.code >= 500 or error.code in _TRY_AGAIN
        )
    text = str(error.reason if isinstance(error, URLError) else error) or type(error).__name__
    return _Fault(text, again=not isinstance(error, ValueError))
