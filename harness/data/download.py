"""Downloads files, and creates folders in one process at a time."""

from __future__ import annotations

import fcntl
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

# interval of signal checks while waiting
_POLL_S = 0.1
# timeout for a silent server, which is also the longest reaction time to a signal
_SILENCE_S = 10.0
_PAUSE_S = 1.0


def fetch(url: str, target: Path) -> None:
    """Downloads the http or https ``url`` to ``target``, in at most three attempts.

    Raises:
        DataError: the address is invalid, or the server is unreachable or returns an error.
        OSError: ``target`` cannot be written.
    """
    # the address is not repeated because it may contain a secret
    if not re.fullmatch("https?://[^/@]+/[^@]*", url):
        raise DataError(
            "data.mirror must be an http or https address without a user name and password, "
            "which would be logged; change it, or put the file into data.root yourself"
        )
    for attempts_left in (2, 1, 0):
        try:
            _transfer(url, target)
            return
        except (HTTPException, URLError, ConnectionError, TimeoutError) as error:
            if isinstance(error, HTTPError):
                error.close()
            # the text of a redirect loop has three lines
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
            raise ConnectionError(f"the connection closed {reply.length} bytes early")


def make_once(folder: Path, is_made: Callable[[], object], write: Callable[[Path], None]) -> None:
    """Creates ``folder`` in one process; ``write`` fills a temporary folder, which is then renamed.

    An existing ``folder`` that ``is_made`` rejects is replaced.

    Raises:
        DiskError: it cannot be written.
    """
    part = folder.with_name(f"{folder.name}.part")
    try:
        with exclusive(folder.with_name(f"{folder.name}.lock")):
            # another process may have made it in the meantime
            if is_made():
                return
            try:
                # left by a killed process
                remove(part)
                part.mkdir()
                write(part)
                if os.path.lexists(folder):
                    log.warning("%s is corrupt or out of date; rebuilding", folder)
                    remove(folder)
                # No fsync, which takes longer than writing; files truncated by a power failure are
                # rejected when read.
                os.replace(part, folder)
            finally:
                remove(part)
    except OSError as error:
        raise DiskError(
            f"{folder}: cannot be written: {error.strerror or error}; free space or set a "
            "different data.root"
        ) from error


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds a lock on the file ``path``, which exists while the lock is held.

    A killed process leaves no lock behind. Anything but a regular file is replaced.

    Raises:
        OSError: it cannot be opened.
        Interrupted: a signal arrived while waiting.
    """
    told = False
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    while True:
        with open(open_regular(path, flags, makes_way=True), "r+b") as file:
            # another process holds it, or has removed it since it was opened
            owned = False
            with suppress(BlockingIOError, FileNotFoundError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                owned = os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
            if owned:
                try:
                    yield
                finally:
                    # the folder may have become read-only
                    with suppress(OSError):
                        path.unlink()
                return
        if not told:
            say(f"Waiting for the process that locked {path}")
            told = True
        signals.check()
        time.sleep(_POLL_S)
