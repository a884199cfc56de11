"""Reads the wanted members of an archive; nothing is written to the disk."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from harness.runtime import signals
from harness.runtime.errors import DataError, RunError, printable

_HONEST = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE)
# headers, padding, and small members that nobody asked for
_SLACK_BYTES = 16 << 20


class _Suspect(Exception):
    """What an honest archive does not hold."""


def read_members(archive: Path, wanted: Mapping[str, int]) -> dict[str, bytes]:
    """Returns the bytes of the ``wanted`` members of a ``.tar.gz``.

    ``wanted`` maps their names to how many bytes each may have at most.

    tarfile's extract methods stay unused, also with ``filter="data"``: a chain of links longer than
    PATH_MAX leads that filter out of its folder (CVE-2025-4517). Here a member's name is only
    compared, never used as a path, and a link, a device or a name that leads out refuses the whole
    archive.

    Raises:
        DataError: the archive is damaged, lacks a member, or holds what an honest one does not.
    """
    found: dict[str, bytes] = {}
    try:
        limit_bytes = min(
            sum(wanted.values()) + _SLACK_BYTES, max(100 * archive.stat().st_size, _SLACK_BYTES)
        )
        with _CappedGzip(archive, limit_bytes) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                for count, member in enumerate(tar):
                    signals.check()
                    if count == 1000:
                        raise _Suspect("more than 1000 members")
                    path = PurePosixPath(member.name)
                    if path.is_absolute() or ".." in path.parts:
                        fault = "has a name that leads out of the archive"
                    elif member.type not in _HONEST or member.issparse():
                        fault = "is a link, a device or another thing, no plain file or folder"
                    elif member.isfile() and member.mode & 0o6000:
                        fault = "is setuid or setgid"
                    elif member.name not in wanted:
                        continue
                    elif member.name in found or not member.isfile():
                        fault = "is there twice, or is a folder"
                    elif member.size > wanted[member.name]:
                        fault = f"has more than {wanted[member.name]} bytes"
                    else:
                        fault = ""
                    if fault:
                        raise _Suspect(f"member {member.name} {fault}")
                    content = tar.extractfile(member)
                    assert content is not None
                    found[member.name] = content.read()
            # gzip keeps its checksum at the very end, behind the last member
            while stream.read(1 << 20):
                signals.check()
        if missing := sorted(wanted.keys() - found.keys()):
            raise _Suspect(f"has no member {', '.join(missing)}")
        return found
    except RunError:
        raise
    except Exception as error:
        # damage surfaces as OSError, EOFError, zlib.error, TarError, ValueError, RecursionError
        reason = str(error) or type(error).__name__
        if not isinstance(error, _Suspect):
            reason = f"damaged: {reason}"
        advice = "delete the file and get it from its publisher"
        raise DataError(printable(f"{archive}: {reason}; {advice}")) from error


class _CappedGzip(gzip.GzipFile):
    """A gzip file that refuses to unpack to more than ``limit_bytes``."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        super().__init__(path, "rb")
        self._limit_bytes = limit_bytes

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if self.tell() > self._limit_bytes:
            raise _Suspect(
                f"unpacks to more than {self._limit_bytes} bytes, too much for its size or its kind"
            )
        return data
