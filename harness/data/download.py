"""Downloads files, and lets only one process at a time create a folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from ..monitor.console import progress, say
from ..runtime import signals
from ..runtime.errors import DataError, DiskError
from ..runtime.files import open_regular, remove
from ..runtime.folder import log

# how often a wait looks for a signal
_POLL_S = 0.1
# longest silence of a server; a signal is heard after it at the latest
_SILENCE_S = 10.0
_PAUSE_S = 1.0


def fetch(url: str, target: Path) -> None:
    """Fetches ``url``, of http or https, to ``target``, in at most three attempts.

    Raises:
        DataError: no such address, or the server cannot be reached, or refuses.
        OSError: ``target`` cannot be written.
    """
    # The address is not repeated here: it may hold a secret.
    if not re.fullmatch("https?://[^/@]+/[^@]*", url):
        raise DataError(
            "data.mirror: not an http or https address, or one with a user name or a password, "
            "which would end in the logs; set another, or put the file into data.root by hand"
        )
    for attempts_left in (2, 1, 0):
        try:
            _transfer(url, target)
            return
        except (HTTPException, URLError, ConnectionError, TimeoutError) as error:
            if isinstance(error, HTTPError):
                error.close()
            # that of a loop of redirects has three lines
            reason = str(getattr(error, "reason", error)).partition("\n")[0]
            signals.check()
            if not attempts_left:
                raise DataError(
                    f"{url}: {reason}; check the network and the address (data.mirror)"
                ) from error
            log.warning("%s: %s; trying again", url, reason)
            time.sleep(_PAUSE_S)


def _transfer(url: str, target: Path) -> None:
    request = Request(url, headers={"User-Agent": "wellfed"})
    with urlopen(request, timeout=_SILENCE_S) as reply, open(target, "wb") as file:
        with progress(f"Downloading {target.stem}", total=reply.length, unit="B") as bar:
            while chunk := reply.read1(1 << 18):
                signals.check()
                file.write(chunk)
                bar.advance(len(chunk))
        if reply.length:
            raise ConnectionError(f"the connection closed, {reply.length} bytes early")


def make_once(folder: Path, is_made: Callable[[], object], write: Callable[[Path], None]) -> None:
    """Makes ``folder`` in one process: ``write`` fills another, renamed once it is whole.

    What lies in its place, and is not what ``is_made`` accepts, is removed.

    Raises:
        DiskError: it cannot be written.
    """
    part = folder.with_name(f"{folder.name}.part")
    try:
        with exclusive(folder.with_name(f"{folder.name}.lock")):
            # by another process, meanwhile
            if is_made():
                return
            try:
                # of a process that was killed
                remove(part)
                part.mkdir()
                write(part)
                if os.path.lexists(folder):
                    log.warning("%s: damaged, or of other settings: made again", folder)
                    remove(folder)
                # No fsync: it takes longer than the writing, and what a power failure cut off is
                # refused when it is read.
                os.replace(part, folder)
            finally:
                remove(part)
    except OSError as error:
        raise DiskError(
            f"{folder}: cannot be written: {error.strerror or error}; free space or set another "
            "data.root"
        ) from error


def md5_of(path: Path) -> str:
    """Returns the MD5 digest of a file, in hexadecimal."""
    with open(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds the lock file ``path``, which exists meanwhile.

    A killed process leaves no lock behind. What lies there and is no regular file gives way.

    Raises:
        OSError: it cannot be opened.
        Interrupted: a signal came while waiting.
    """
    told = False
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    while True:
        with open(open_regular(path, flags, makes_way=True), "r+b") as file:
            # "Not yet": another process holds it, or has removed it since the opening.
            owned = False
            with suppress(BlockingIOError, FileNotFoundError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                owned = os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
            if owned:
                try:
                    yield
                finally:
                    # A folder may be read-only by now.
                    with suppress(OSError):
                        path.unlink()
                return
        if not told:
            say(f"Waiting for the process that holds {path}")
            told = True
        signals.check()
        time.sleep(_POLL_S)
