"""From an archive to the bytes of the members that are wanted; nothing is written to the disk."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from harness.runtime import signals
from harness.runtime.errors import DataError, RunError, printable

_MAX_MEMBERS = 1000
_MAX_RATIO = 100
# headers, padding, and small members that nobody asked for
_SLACK_BYTES = 16 << 20
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)


class _Suspect(Exception):
    """What an honest archive does not hold."""


def read_members(archive: Path, wanted: Mapping[str, int]) -> dict[str, bytes]:
    """The bytes of the ``wanted`` members of a ``.tar.gz`` by name; ``wanted`` says how many bytes
    each may have at most.

    tarfile's extract methods stay unused, also with ``filter="data"``: a chain of links longer than
    PATH_MAX leads that filter out of its folder (CVE-2025-4517). Here a member's name is only
    compared, never used as a path, and a link, a device or a name that leads out refuses the whole
    archive.

    Raises:
        DataError: the archive is damaged, lacks a member, or holds what an honest one does not.
    """
    try:
        ratio_bytes = max(_MAX_RATIO * archive.stat().st_size, _SLACK_BYTES)
        with _CappedGzip(archive, min(sum(wanted.values()) + _SLACK_BYTES, ratio_bytes)) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                found = _read_wanted(tar, wanted)
            # gzip keeps its checksum at the very end, behind the last member
            while stream.read(1 << 20):
                signals.check()
        return found
    except RunError:
        raise
    except Exception as error:
        # damage surfaces as OSError, EOFError, zlib.error, TarError, ValueError, RecursionError
        reason = printable(str(error) or type(error).__name__)
        text = f"{reason}; delete the file and get it from its publisher"
        if not isinstance(error, _Suspect):
            text = f"damaged: {reason}; delete the file and get it anew"
        raise DataError(f"{printable(str(archive))}: {text}") from error


class _CappedGzip(gzip.GzipFile):
    """A gzip file that refuses to unpack to more than ``limit_bytes``."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        super().__init__(path, "rb")
        self._limit_bytes = self._left_bytes = limit_bytes

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise _Suspect(
                f"unpacks to more than {self._limit_bytes} bytes, too much for its size or its kind"
            )
        return data


def _read_wanted(tar: tarfile.TarFile, wanted: Mapping[str, int]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for count, member in enumerate(tar, start=1):
        signals.check()
        if count > _MAX_MEMBERS:
            raise _Suspect(f"more than {_MAX_MEMBERS} members")
        if fault := _fault(member):
            raise _Suspect(f"member {member.name} {fault}")
        if (most_bytes := wanted.get(member.name)) is None:
            continue
        if member.name in found or member.type not in _PLAIN or member.size > most_bytes:
            raise _Suspect(
                f"member {member.name} is there twice, is a folder, or has more than {most_bytes} "
                "bytes"
            )
        content = tar.extractfile(member)
        assert content is not None
        found[member.name] = content.read()
    if missing := sorted(wanted.keys() - found.keys()):
        raise _Suspect(f"has no member {', '.join(missing)}")
    return found


def _fault(member: tarfile.TarInfo) -> str | None:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        return "has a name that leads out of the archive"
    if member.type not in (*_PLAIN, tarfile.DIRTYPE) or member.issparse():
        return "is a link, a device or another thing that is neither a plain file nor a folder"
    return "is setuid or setgid" if member.type in _PLAIN and member.mode & 0o6000 else None
