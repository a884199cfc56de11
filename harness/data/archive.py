"""Reads the wanted members of an archive; nothing is written to the disk."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Collection
from pathlib import Path

from harness.runtime import signals
from harness.runtime.errors import DataError, Interrupted
from harness.runtime.files import open_regular

# CIFAR's archives have 186 MB
_MOST_BYTES = 256 << 20


def read_members(
    archive: Path, wanted: Collection[str], most_bytes: int = _MOST_BYTES
) -> dict[str, bytes]:
    """Returns the bytes of the members of a ``.tar.gz`` whose names are ``wanted``.

    tarfile's extract methods stay unused, also with ``filter="data"``: a chain of links longer than
    PATH_MAX leads that filter out of its folder (CVE-2025-4517). Here a member's name is only
    compared, never used as a path. Members that are not wanted are passed over, links and devices
    among them.

    Raises:
        DataError: the archive is damaged, unpacks to more than ``most_bytes`` or 1000 members, or
            lacks a wanted one as a plain file.
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
                    raise ValueError(f"unpacks to more than {most_bytes} bytes")
        content.seek(0)
        with tarfile.open(fileobj=content, mode="r:") as tar:
            for count, member in enumerate(tar):
                if count == 1000:
                    raise ValueError("more than 1000 members")
                # a sparse file may claim any size
                if member.name in wanted and member.isreg() and not member.issparse():
                    part = tar.extractfile(member)
                    assert part is not None
                    found[member.name] = part.read()
        if missing := sorted({*wanted} - found.keys()):
            raise ValueError(f"has no file {', '.join(missing)}")
        return found
    except Interrupted:
        raise
    except Exception as error:
        # damage surfaces as OSError, EOFError, zlib.error, TarError, ValueError, RecursionError
        reason = str(error) or type(error).__name__
        raise DataError(
            f"{archive}: damaged: {reason}; delete the file and get it from its publisher"
        ) from error
