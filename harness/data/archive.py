"""Reads the wanted members of an archive; nothing is written to the disk."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from harness.runtime import signals
from harness.runtime.errors import DataError, Interrupted
from harness.runtime.files import open_regular

# CIFAR's archives have 186 MB
_MOST_BYTES = 256 << 20
_HONEST = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE)


class _Suspect(Exception):
    """What an honest archive does not hold."""


def read_members(
    archive: Path, wanted: Collection[str], most_bytes: int = _MOST_BYTES
) -> dict[str, bytes]:
    """Returns the bytes of the members of a ``.tar.gz`` whose names are ``wanted``.

    tarfile's extract methods stay unused, also with ``filter="data"``: a chain of links longer than
    PATH_MAX leads that filter out of its folder (CVE-2025-4517). Here a member's name is only
    compared, never used as a path, and a link, a device or a name that leads out refuses the whole
    archive.

    Raises:
        DataError: the archive is damaged, unpacks to more than ``most_bytes``, lacks a member, or
            holds what an honest one does not.
    """
    found: dict[str, bytes] = {}
    try:
        content = io.BytesIO()
        with open(open_regular(archive), "rb") as file, gzip.open(file) as stream:
            # to the very end, where gzip keeps its checksum
            while chunk := stream.read(1 << 18):
                signals.check()
                content.write(chunk)
                if content.tell() > most_bytes:
                    raise _Suspect(f"unpacks to more than {most_bytes} bytes")
        content.seek(0)
        with tarfile.open(fileobj=content, mode="r:") as tar:
            for count, member in enumerate(tar):
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
                else:
                    part = tar.extractfile(member)
                    assert part is not None
                    found[member.name] = part.read()
                    continue
                raise _Suspect(f"member {member.name} {fault}")
        if missing := sorted({*wanted} - found.keys()):
            raise _Suspect(f"has no member {', '.join(missing)}")
        return found
    except Interrupted:
        raise
    except Exception as error:
        # damage surfaces as OSError, EOFError, zlib.error, TarError, ValueError, RecursionError
        reason = str(error) or type(error).__name__
        if not isinstance(error, _Suspect):
            reason = f"damaged: {reason}"
        raise DataError(
            f"{archive}: {reason}; delete the file and get it from its publisher"
        ) from error
