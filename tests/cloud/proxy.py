"""A proxy before an object store: does what networks and services do to requests."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

Headers = dict[str, str]


@dataclass
class Request:
    """A request on its way."""

    method: str
    path: str
    headers: Headers
    body: bytes


@dataclass
class Answer:
    """An answer on its way back. ``cut`` sends only so many bytes of the body and hangs up."""

    status: int
    headers: Headers
    body: bytes
    cut: int | None = None


class HangUp(Exception):  # noqa: N818 - what to do, rather than what went wrong
    """Closes the connection without an answer."""


Forward = Callable[[Request], Answer]
Rule = Callable[[Request, Forward], Answer]


@dataclass
class Proxy:
    """Where clients go, what is done to them, and what they asked for."""

    endpoint: str
    rule: Rule = field(default=lambda request, forward: forward(request))
    seen: list[Request] = field(default_factory=list)


def error(status: int, code: str) -> Answer:
    """Return an answer as S3 refuses."""
    body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
    return Answer(status, {"Content-Type": "application/xml"}, body)


def first(count: int, what: Rule, *, only: Callable[[Request], bool] = lambda _: True) -> Rule:
    """Do something to the first few requests of a kind, and let the rest through."""
    left, lock = [count], threading.Lock()

    def rule(request: Request, forward: Forward) -> Answer:
        with lock:
            is_due = only(request) and left[0] > 0
            left[0] -= is_due
        return what(request, forward) if is_due else forward(request)

    return rule


def lose_answer(request: Request, forward: Forward) -> Answer:
    """Have it done, and do not say so."""
    forward(request)
    raise HangUp


def is_put(request: Request) -> bool:
    return request.method == "PUT"


@contextmanager
def proxy_before(endpoint: str) -> Iterator[Proxy]:
    """Run a proxy on a port of its own."""
    target = urlsplit(endpoint)
    assert target.hostname is not None

    def forward(request: Request) -> Answer:
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)
        try:
            connection.request(request.method, request.path, request.body, request.headers)
            got = connection.getresponse()
            headers = {
                k: v
                for k, v in got.getheaders()
                if k.lower() not in ("transfer-encoding", "connection", "content-length")
            }
            body = got.read()
            if request.method == "HEAD":
                headers["Content-Length"] = got.getheader("Content-Length", "0")
            return Answer(got.status, headers, body)
        finally:
            connection.close()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            request = Request(
                self.command, self.path, dict(self.headers.items()), self.rfile.read(length)
            )
            proxy.seen.append(request)
            self.close_connection = True
            try:
                answer = proxy.rule(request, forward)
            except HangUp:
                return
            self.send_response(answer.status)
            for key, value in answer.headers.items():
                self.send_header(key, value)
            if "Content-Length" not in answer.headers:
                self.send_header("Content-Length", str(len(answer.body)))
            self.send_header("Connection", "close")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body[: answer.cut])

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle  # noqa: N815 - names of the base

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy = Proxy(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
