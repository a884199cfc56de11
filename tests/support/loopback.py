"""A web site on this machine that answers as a test wants, and keeps the requests."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler], None]


class Site:
    """A site at ``address``.

    Attributes:
        asked: the Range header (or None) of each GET so far.
        closing: set when the test is over; an answer that hangs waits for it.
    """

    def __init__(self, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}"
        self.asked: list[str | None] = []
        self.closing = threading.Event()


@contextmanager
def site(answer: Answer) -> Iterator[Site]:
    """Serve ``answer`` on loopback inside the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            here.asked.append(self.headers["Range"])
            answer(self)

        def log_message(self, format: str, *args: object) -> None:
            """Keep standard error for the test."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        here = Site(server.server_port)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield here
        finally:
            here.closing.set()
            server.shutdown()
            thread.join()


def reply(handler: BaseHTTPRequestHandler, code: int, body: bytes = b"", **headers: str) -> None:
    """Send a whole answer; ``Content_Length=""`` leaves that header out."""
    handler.send_response(code)
    for name, value in ({"Content_Length": str(len(body))} | headers).items():
        if value:
            handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def files(contents: Mapping[str, bytes]) -> Answer:
    """Answers with the file of that name, or with the range asked for."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        body = contents.get(handler.path.lstrip("/"))
        wanted = re.fullmatch(r"bytes=(\d+)-", handler.headers["Range"] or "")
        if body is None:
            reply(handler, 404)
        elif wanted is None:
            reply(handler, 200, body)
        elif (start := int(wanted[1])) >= len(body):
            reply(handler, 416)
        else:
            reply(
                handler,
                206,
                body[start:],
                Content_Range=f"bytes {start}-{len(body) - 1}/{len(body)}",
            )

    return answer
