"""An object store on this machine: S3's list, ranges and ETags, and the ways in which they fail."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import md5
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Bucket:
    """Serves ``objects`` by S3 (path style, the bucket ``b``), and as plain files below ``/b``.

    Attributes:
        delay_s: before each answer.
        fault: is given each request's method and path; returns a status to answer with instead,
            "short" for half a body, or None.
        asked: method, path and Range header of each request.
        tags: other ETags than the content's.
    """

    objects: Mapping[str, bytes]
    delay_s: float = 0.0
    fault: Callable[[str, str], int | str | None] = lambda method, path: None
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    port: int = 0

    @property
    def env(self) -> dict[str, str]:
        """What a process needs to read ``s3://b`` here."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "hunter2hunter2",
        }

    def tag(self, name: str) -> str:
        if name not in self.tags:
            self.tags[name] = f'"{md5(self.objects[name]).hexdigest()}"'
        return self.tags[name]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the requests of one connection."""
        with suppress(asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, target, _ = head.split(" ", 2)
                wanted = re.search(r"(?im)^range: bytes=(\d+)-(\d*)", head)
                url = urlsplit(target)
                path = unquote(url.path)
                self.asked.append((method, path, wanted[0] if wanted else ""))
                await asyncio.sleep(self.delay_s)
                status, lines, body = self.answer(path, parse_qs(url.query), wanted)
                fault = self.fault(method, path)
                if isinstance(fault, int):
                    status, lines, body = fault, ["Retry-After: 1"], b""
                lines = [*lines, f"Content-Length: {len(body)}", "", ""]
                if method == "HEAD":
                    body = b""
                writer.write("\r\n".join([f"HTTP/1.1 {status} x", *lines]).encode())
                writer.write(body[: len(body) // 2] if fault == "short" else body)
                await writer.drain()
                if fault == "short":
                    break
        writer.close()

    def answer(
        self, path: str, query: Mapping[str, list[str]], wanted: re.Match[str] | None
    ) -> tuple[int, list[str], bytes]:
        """Returns the status, the headers and the body."""
        name = path.removeprefix("/b").lstrip("/")
        if "list-type" in query:
            prefix = query.get("prefix", [""])[0]
            rows = "".join(
                f"<Contents><Key>{key}</Key><Size>{len(self.objects[key])}</Size><ETag>"
                f"{self.tag(key)}</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                "</Contents>"
                for key in sorted(self.objects)
                if key.startswith(prefix)
            )
            return 200, [], f"<ListBucketResult>{rows}</ListBucketResult>".encode()
        if name not in self.objects:
            return 404, [], b""
        data = self.objects[name]
        lines = [f"ETag: {self.tag(name)}", "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT"]
        if wanted is None:
            return 200, lines, data
        start = int(wanted[1])
        stop = min(len(data), int(wanted[2] or len(data) - 1) + 1)
        lines.append(f"Content-Range: bytes {start}-{stop - 1}/{len(data)}")
        return 206, lines, data[start:stop]


@contextmanager
def serving(bucket: Bucket) -> Iterator[Bucket]:
    """Serves ``bucket`` on loopback inside the block, in a thread."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(bucket.serve, "127.0.0.1", 0))
    bucket.port = server.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield bucket
    finally:

        async def stop() -> None:
            server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        asyncio.run_coroutine_threadsafe(stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
