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
import time
import urllib.request as web
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from io import BufferedRandom
from pathlib import Path
from urllib.error import HTTPError

from harness.runtime import signals
from harness.runtime.errors import DataError, DiskError
from harness.runtime.files import make_way, open_regular, remove
from harness.runtime.folder import log
from harness.watch.console import progress, say

# how often a wait looks for a signal
_POLL_S = 0.1
# longest silence of a server; a signal is heard after it at the latest
_SILENCE_S = 10.0
# more than any archive that is known here
_MOST_BYTES = 1 << 30
_ADVICE = "free space or set another data.root"


class _Fault(Exception):
    """A failed attempt, after which another one may succeed if ``passing``."""

    def __init__(self, reason: str, *, passing: bool = False) -> None:
        super().__init__(reason)
        self.passing = passing


def fetch(
    url: str,
    target: Path,
    *,
    md5: str,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Fetches ``url``, of http or https, to ``target``: whole, or not at all.

    The bytes, at most 1 GiB, go to ``<target>.part``, which is also the lock: a second process
    waits, then finds ``target`` there. After a network fault, or 10 seconds of silence, the file is
    fetched again (three times, with pauses by ``sleep``).

    Raises:
        DataError: the server cannot be reached, refuses, or sends what has not the digest ``md5``.
        DiskError: the file cannot be written.
    """
    # The address is not repeated here: it may hold a secret.
    if not re.fullmatch("https?://[^/@]+/[^@]*", url):
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
                file.truncate(0)
                signals.check()
                if pause_s is None or not fault.passing:
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
    """Fetches ``url`` into ``file``, which is ``part``, and checks its digest."""
    file.seek(0)
    file.truncate()
    found = hashlib.md5(usedforsecurity=False)
    request = web.Request(url, headers={"User-Agent": "wellfed"})
    with _network(), web.urlopen(request, timeout=_SILENCE_S) as reply:
        if reply.headers.get_content_type() == "text/html":
            raise _Fault("the server sent a web page in place of the file")
        total = reply.length or 0
        if not 0 < total <= _MOST_BYTES:
            raise _Fault(
                f"the server says that the file has {total or 'no'} bytes (Content-Length), not 1 "
                f"to {_MOST_BYTES}"
            )
        with progress(f"Downloading {part.stem}", total=total, unit="B") as bar:
            while chunk := reply.read1(1 << 18):
                signals.check()
                with _writing(part, _ADVICE):
                    file.write(chunk)
                found.update(chunk)
                bar.advance(len(chunk))
    file.flush()
    if file.tell() != total:
        raise _Fault(f"the connection closed after {file.tell()} of {total} bytes", passing=True)
    if found.hexdigest() != md5:
        raise _Fault(
            f"the md5 digest differs: expected {md5}, got {found.hexdigest()} (set data.md5 if "
            "another archive is meant)"
        )


@contextmanager
def _network() -> Iterator[None]:
    """A block in which every error but one of a disk is a fault of the network or the server."""
    try:
        yield
    except HTTPError as error:
        error.close()
        # Codes that speak of now, not of the address.
        passing = error.code >= 500 or error.code in (408, 425, 429)
        # of a loop of redirects it is three lines
        reason = str(error.reason).partition("\n")[0]
        raise _Fault(f"HTTP {error.code} {reason}", passing=passing) from error
    except (OSError, HTTPException, ValueError) as error:
        reason = str(getattr(error, "reason", error)) or type(error).__name__
        raise _Fault(reason, passing=not isinstance(error, ValueError)) from error
