"""A proxy before an object store that does what networks and services do to requests.

A client is pointed to the proxy instead of the service. Everything is passed on until a rule is
set, which may answer itself, lose an answer, hang up, fall silent, cut or change what is sent
either way. Rules are plain functions of a request and of what passes it on; those of this module
cover what buckets are known to do.

Plain HTTP on the loopback interface, one connection for each request. Bodies are held whole.
"""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from ..errors import UsageError

__all__ = [
    "Answer",
    "FaultProxy",
    "Forward",
    "HangUp",
    "Request",
    "Rule",
    "Silence",
    "answer_with",
    "cut_answer",
    "error_answer",
    "fault_proxy",
    "first",
    "flip_received",
    "flip_sent",
    "hang_up",
    "lose_answer",
    "pass_on",
    "stall",
    "stall_answer",
    "with_header",
]

_UPSTREAM_S = 60.0
_NOT_PASSED_ON = frozenset({"transfer-encoding", "connection", "content-length"})


@dataclass(frozen=True)
class Request:
    """A request on its way.

    Attributes:
        method: ``GET``, ``PUT``, ...
        path: Path and query.
        headers: What was sent along.
        body: What was sent. Left out of what a proxy remembers.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """An answer on its way back.

    Attributes:
        status: Its status.
        headers: What is sent along. The length is added if it is not there.
        body: What is sent.
        cut: Send only so many bytes of the body, though the length says more.
        is_silent_then: After those bytes keep the connection open and send no more, instead of
            hanging up.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    cut: int | None = None
    is_silent_then: bool = False


class HangUp(Exception):  # noqa: N818 - what to do, rather than what went wrong
    """Raised by a rule: close the connection without an answer."""


class Silence(Exception):  # noqa: N818 - what to do, rather than what went wrong
    """Raised by a rule: keep the connection open and never answer."""


Forward = Callable[[Request], Answer]
"""Passes a request on to the service."""

Rule = Callable[[Request, Forward], Answer]
"""Answers a request, with the service or without it."""


def pass_on(request: Request, forward: Forward) -> Answer:
    """Let the service answer."""
    return forward(request)


@dataclass
class FaultProxy:
    """Where clients go, what is done to them, and what they asked for.

    Attributes:
        endpoint: The address to give to clients.
        rule: What is done to each request.
        seen: Every request so far, without its body.
    """

    endpoint: str
    rule: Rule = pass_on
    seen: list[Request] = field(default_factory=list)


def error_answer(status: int, code: str, message: str = "no") -> Answer:
    """Return an answer as S3 and Azure word a refusal."""
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    return Answer(status, {"Content-Type": "application/xml"}, body)


def answer_with(status: int, code: str) -> Rule:
    """Refuse, without asking the service. With status 200 the answer carries an error all the same.

    Args:
        status: Status of the answer.
        code: The code of the error, such as ``SlowDown``.
    """
    return lambda request, forward: error_answer(status, code)  # noqa: ARG005 - a rule's form


def hang_up(request: Request, forward: Forward) -> Answer:  # noqa: ARG001 - a rule's form
    """Close the connection, without asking the service."""
    raise HangUp


def lose_answer(request: Request, forward: Forward) -> Answer:
    """Have it done, and close the connection without saying so."""
    forward(request)
    raise HangUp


def stall(request: Request, forward: Forward) -> Answer:  # noqa: ARG001 - a rule's form
    """Never answer, without asking the service."""
    raise Silence


def stall_answer(size_bytes: int) -> Rule:
    """Have it done, send so much of the answer's body, and then nothing any more."""
    return lambda request, forward: replace(forward(request), cut=size_bytes, is_silent_then=True)


def cut_answer(size_bytes: int) -> Rule:
    """Have it done, send so much of the answer's body, and hang up."""
    return lambda request, forward: replace(forward(request), cut=size_bytes)


def flip_sent(bit: int = 0) -> Rule:
    """Change one bit of what the client sends.

    Args:
        bit: Its number, counted from the first bit of the body. Empty bodies are left alone.
    """
    return lambda request, forward: forward(replace(request, body=_flipped(request.body, bit)))


def flip_received(bit: int = 0) -> Rule:
    """Change one bit of what the service answers; see ``flip_sent``."""

    def rule(request: Request, forward: Forward) -> Answer:
        answer = forward(request)
        return replace(answer, body=_flipped(answer.body, bit))

    return rule


def with_header(name: str, value: str) -> Rule:
    """Put another header into the answer."""

    def rule(request: Request, forward: Forward) -> Answer:
        answer = forward(request)
        others = {k: v for k, v in answer.headers.items() if k.lower() != name.lower()}
        return replace(answer, headers={**others, name: value})

    return rule


def first(
    count: int | None, what: Rule, *, only: Callable[[Request], bool] = lambda _: True
) -> Rule:
    """Do something to the first few requests of a kind, and let the rest through.

    Args:
        count: To how many; ``None`` is to all of them.
        what: What to do.
        only: Which requests count.
    """
    left, lock = [count], threading.Lock()

    def rule(request: Request, forward: Forward) -> Answer:
        with lock:
            is_due = only(request) and left[0] != 0
            if is_due and left[0] is not None:
                left[0] -= 1
        return what(request, forward) if is_due else forward(request)

    return rule


def _flipped(body: bytes, bit: int) -> bytes:
    if not body:
        return body
    changed = bytearray(body)
    changed[bit // 8 % len(changed)] ^= 1 << bit % 8
    return bytes(changed)


@contextmanager
def fault_proxy(endpoint: str) -> Iterator[FaultProxy]:
    """Run a proxy on a port of its own, on the loopback interface, until the block ends.

    Args:
        endpoint: Address of the service, such as ``http://127.0.0.1:9000``.

    Raises:
        UsageError: It is no plain HTTP address.
    """
    target = urlsplit(endpoint)
    if target.scheme != "http" or not target.hostname:
        raise UsageError(f"{endpoint!r} is not an address such as http://127.0.0.1:9000.")
    server = _Server(_upstream(target.hostname, target.port or 80))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.proxy
    finally:
        server.shutdown()
        server.hang_up_all()
        server.server_close()
        thread.join(10)


def _upstream(host: str, port: int) -> Forward:
    def forward(request: Request) -> Answer:
        connection = http.client.HTTPConnection(host, port, timeout=_UPSTREAM_S)
        try:
            connection.request(request.method, request.path, request.body, request.headers)
            got = connection.getresponse()
            headers = {k: v for k, v in got.getheaders() if k.lower() not in _NOT_PASSED_ON}
            body = got.read()
            if request.method == "HEAD":
                headers["Content-Length"] = got.getheader("Content-Length", "0")
            return Answer(got.status, headers, body)
        finally:
            connection.close()

    return forward


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.proxy = FaultProxy(f"http://127.0.0.1:{self.server_address[1]}")

    def opened(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.add(connection)

    def closed(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)

    def hang_up_all(self) -> None:
        """Wake the handlers that keep silent."""
        with self._lock:
            for connection in self._open:
                with suppress(OSError):  # the client was faster
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: object) -> None:
        """Say nothing: clients that give up are what this is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.opened(self.connection)

    def finish(self) -> None:
        self.server.closed(self.connection)
        super().finish()

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        headers = dict(self.headers.items())
        request = Request(self.command, self.path, headers, self.rfile.read(length))
        self.server.proxy.seen.append(replace(request, body=b""))
        self.close_connection = True
        try:
            self._send(self.server.proxy.rule(request, self.server.forward))
        except HangUp:
            return
        except Silence:
            self._wait_for_client()

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for key, value in answer.headers.items():
            self.send_header(key, value)
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[: answer.cut])
        if answer.is_silent_then:
            self._wait_for_client()

    def _wait_for_client(self) -> None:
        """Return when the client, or the proxy, has closed the connection."""
        self.wfile.flush()
        while self.connection.recv(4096):
            continue

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle  # noqa: N815 - names of the base

    def log_message(self, *_: object) -> None:
        """Print nothing."""
