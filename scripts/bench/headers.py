"""Measures the CPU time of reading the headers of a tar shard.

    uv run python scripts/bench/headers.py [MEMBERS]

Writes one shard of empty images with labels, which stays in the page cache, and prints
microseconds per header and the time for 2.56 million of them.
"""

from __future__ import annotations

import io
import sys
import tarfile
import tempfile
import time
from collections import deque
from functools import partial
from pathlib import Path

from harness.data.stores import FolderStore
from harness.data.tar import members

HUB_HEADERS = 2_560_000
IMAGE_BYTES = 20_000


def main() -> None:
    """Prints the median of five passes."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(Path(folder, "0.tar"), "w") as archive:
            for i in range(count // 2):
                for suffix, content in (("jpg", bytes(IMAGE_BYTES)), ("cls", b"1")):
                    info = tarfile.TarInfo(f"n{i % 1000:08}/{i}.{suffix}")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
        store = FolderStore(folder)
        size, _ = store.state("0.tar")
        taken = []
        for _ in range(5):
            begin = time.process_time()
            deque(members(partial(store.read, "0.tar"), size, (b".cls", b".json")), 0)
            taken.append((time.process_time() - begin) / count)
        each = sorted(taken)[2]
        print(f"{each * 1e6:.2f} us per header, {each * HUB_HEADERS:.1f} s for {HUB_HEADERS:,}")


if __name__ == "__main__":
    main()
