"""From an address on the web to a whole, checked file.

A digest protects from rot and from a cut-off, not from an attacker: what passes it is still read as a stranger's.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import queue
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from io import BufferedRandom
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from harness.runtime import signals
from harness.runtime.errors import DataError, DiskError, printable
from harness.runtime.folder import LOGGER
from harness.watch.console import progress, say

_PAUSES_S = (0.0, 1.0, 2.0, 4.0)  # before each attempt
_POLL_S = 0.1  # how often a wait looks for a signal
_CHUNK_BYTES = 1 << 18
_STALL_BYTES = 1 << 16
_MAX_BYTES = 1 << 30
_TRY_AGAIN = (408, 425, 429)  # HTTP codes below 500 that speak of now, not of the address
_PAGE = "the server sent a web page in place of the file"

_log = logging.getLogger(LOGGER)


class _Refused(Exception):
    """The last word: another attempt would end the same way."""


class _Transient(Exception):
    """A fault that another attempt may mend; from the first byte on if ``start_over``."""

    def __init__(self, reason: str, *, start_over: bool = False) -> None:
        super().__init__(reason)
        self.start_over = start_over


def fetch(
    url: str,
    target: Path,
    *,
    md5: str | None = None,
    stall_s: float = 30.0,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Put what ``url`` gives at ``target``: whole and with the right digest, or not at all.

    The bytes go to ``<target>.part``, which is also the lock: a second process waits, then finds ``target`` there.
    After a network fault the next attempt, in this run or in a later one, goes on where the part ends if the server can.

    Args:
        url: an http or https address of at most 1 GiB.
        target: the final path; its folder is made.
        md5: the digest that the file must have, in hexadecimal; None takes any.
        stall_s: seconds within which at least 64 KiB must arrive.
        sleep: waits for so many seconds between two attempts.

    Raises:
        DataError: the server cannot be reached, refuses, or sends something else.
        DiskError: the file cannot be written.
    """
    _check_address(url)
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(part) as file:
            if not target.exists():
                _fetch_into(file, part, url, md5, stall_s, sleep)
                os.fsync(file.fileno())
                os.replace(part, target)
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}; free space or set another data.root"
        raise DiskError(f"{printable(str(part))}: {reason}") from error


def md5_of(path: Path) -> str:
    """The MD5 digest of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


@contextmanager
def exclusive(path: Path) -> Iterator[BufferedRandom]:
    """``path``, opened for reading and writing while no other process has it so; left empty, it is removed at the end.

    The lock is the kernel's (``flock``) and goes with the process: a killed owner leaves none behind.
    """
    file = _locked(path)
    if file is None:
        say(f"Waiting for the process that holds {path}")
    while file is None:
        signals.check()
        time.sleep(_POLL_S)
        file = _locked(path)
    with file:
        try:
            yield file
        finally:
            file.flush()
            if os.fstat(file.fileno()).st_size == 0:
                path.unlink(missing_ok=True)


def _locked(path: Path) -> BufferedRandom | None:
    with ExitStack() as stack:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = stack.enter_context(os.fdopen(os.open(path, flags, 0o666), "r+b"))
        # Held by another process, or renamed or removed by its owner after it was opened here: both mean "not yet".
        with suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.lstat(path)):
                stack.pop_all()
                return file
    return None


def _check_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if usable and "@" in parts.netloc:  # The address is not repeated here: it holds a secret.
        raise DataError("data.mirror: a user name or a password in the address would end in the logs; leave it out")
    if not usable:
        raise DataError(
            f"data.mirror: {printable(url)} is not an http or https address; set one, or put the file into data.root by hand"
        )


def _fetch_into(
    file: BufferedRandom, part: Path, url: str, md5: str | None, stall_s: float, sleep: Callable[[float], None]
) -> None:
    reason = ""
    for pause_s in _PAUSES_S:
        if pause_s:
            _log.warning("%s: %s; trying again in %g s", url, reason, pause_s)
            sleep(pause_s)
        try:
            resumed = _transfer(file, url, stall_s)
        except _Transient as error:
            reason = str(error)
            if error.start_over:
                file.truncate(0)
            continue
        except _Refused as error:
            reason = str(error)
            break
        digest = md5_of(part)
        if md5 is None or digest == md5.lower():
            return
        file.truncate(0)
        reason = f"the md5 digest differs: expected {md5}, got {digest} (set data.md5 if another archive is meant)"
        if not resumed:  # The server would send the same again; only a part may have come from elsewhere.
            break
    raise DataError(f"{printable(url)}: {printable(reason)}; check the network and the address (data.mirror)")


def _transfer(file: BufferedRandom, url: str, stall_s: float) -> bool:
    """Fill ``file`` to its end; True if it went on from bytes that were there before."""
    here = file.seek(0, os.SEEK_END)
    headers = {"User-Agent": "wellfed"} | ({"Range": f"bytes={here}-"} if here else {})
    arrivals = _arrivals(urllib.request.Request(url, headers=headers), stall_s)
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
                raise _Refused(_PAGE)
            file.write(chunk)
            bar.advance(len(chunk))
    file.flush()
    if file.tell() != total:
        raise _Transient(f"the connection closed after {file.tell()} of {total} bytes")
    return start > 0


def _extent(reply: HTTPResponse, asked: int) -> tuple[int, int]:
    """Where in the file the body begins, and the size of the whole file, in bytes."""
    if reply.headers.get_content_type() == "text/html":
        raise _Refused(_PAGE)
    start = asked if reply.status == 206 else 0
    if start and not reply.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
        raise _Transient("the server sent another range than was asked for", start_over=True)
    length = reply.headers.get("Content-Length", "")
    if not re.fullmatch(r"[0-9]+", length) or start + int(length) == 0:
        raise _Refused("the server does not give the file's size (Content-Length), so that a cut-off could not be told")
    if start + int(length) > _MAX_BYTES:
        raise _Refused(f"the server offers {length} bytes, more than any archive that is known here")
    return start, start + int(length)


def _arrivals(request: urllib.request.Request, stall_s: float) -> Iterator[HTTPResponse | bytes]:
    """The reply, then its body as it comes.

    A thread makes the blocking calls, so that a signal is seen in time, and so is a server that sends one byte now and
    then, be it of its headers or of the body.
    """
    arrived: queue.Queue[HTTPResponse | bytes | Exception] = queue.Queue(maxsize=8)

    def pump() -> None:
        with suppress(queue.Full):  # nobody listens any more: the attempt was given up
            try:
                with _opener().open(request, timeout=stall_s) as reply:
                    arrived.put(reply, timeout=stall_s)
                    while chunk := reply.read1(_CHUNK_BYTES):
                        arrived.put(chunk, timeout=stall_s)
                    arrived.put(b"", timeout=stall_s)
            except (OSError, HTTPException, ValueError) as error:
                arrived.put(_fault(error), timeout=stall_s)

    threading.Thread(target=pump, name="download", daemon=True).start()
    due_s, received = time.monotonic() + stall_s, 0
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
            due_s, received = time.monotonic() + stall_s, 0
        elif time.monotonic() > due_s:
            raise _Transient(f"stalled: fewer than {_STALL_BYTES >> 10} KiB in {stall_s:g} s")


def _opener() -> urllib.request.OpenerDirector:
    """What ``urlopen`` uses, without the handlers of file and ftp: a redirect may lead to http and https only."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.UnknownHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    return opener


def _fault(error: Exception) -> _Transient | _Refused:
    if isinstance(error, HTTPError):
        error.close()
        reason = "a redirect that cannot be followed" if error.code < 400 else str(error.reason)
        if error.code == 416:
            return _Transient("the server cannot go on from there", start_over=True)
        passing = error.code >= 500 or error.code in _TRY_AGAIN
        return (_Transient if passing else _Refused)(f"HTTP {error.code} {reason}")
    if isinstance(error, ValueError):
        return _Refused(str(error))
    return _Transient(str(error.reason if isinstance(error, URLError) else error) or type(error).__name__)
