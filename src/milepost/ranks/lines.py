"""Lines between the leader and each other rank, for bytes that are too many for the server.

The leader opens a desk, says where it is, and every other rank calls there. A line carries whole
messages, each after its length. The desk is there for one piece of work, and takes only ranks that
know its token. Everything has a deadline; a process that ends is noticed at once, because its side
of the line is closed.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ..errors import CheckpointError, DeadlineError, RankFailedError
from ..stores.pages import page_memory
from .outcome import Outcome

__all__ = ["Desk", "Line", "call"]

_TOKEN_BYTES = 32
_RANK_BYTES = 8
_HELLO_BYTES = 2 * _TOKEN_BYTES + _RANK_BYTES
_HELLO_S = 5.0  # a stranger that says nothing must not keep the others waiting
_MAX_MESSAGE_BYTES = 1 << 40
_OK, _FAILED = b"\x00", b"\x01"


class Line:
    """A connection to another rank.

    Args:
        connection: The socket.
        rank: The rank at the other end.
        timeout_s: How long to wait for it each time, in seconds.
    """

    def __init__(self, connection: socket.socket, rank: int, *, timeout_s: float) -> None:
        self._socket = connection
        self.rank = rank
        self._timeout_s = timeout_s
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, *parts: bytes | memoryview) -> None:
        """Send a message, given in parts."""
        length = sum(map(len, parts))
        try:
            self._socket.sendall(_OK + length.to_bytes(8, "little"))
            for part in parts:
                self._socket.sendall(part)
        except OSError as error:
            raise self._broken(error) from error

    def send_error(self, task: str, error: BaseException, *, rank: int) -> None:
        """Send an error in the place of a message; the other rank raises it."""
        data = Outcome.of_error(rank, task, error).to_bytes()
        # The other rank may be gone as well; then there is nobody to tell.
        with suppress(OSError):
            self._socket.sendall(_FAILED + len(data).to_bytes(8, "little") + data)

    def receive(self) -> memoryview:
        """Return the next message, in pages of its own.

        Raises:
            RankFailedError: The other rank failed, or is gone.
            DeadlineError: It did not send anything in time.
        """
        try:
            return self._receive()
        except OSError as error:
            raise self._broken(error) from error

    def _receive(self) -> memoryview:
        start = bytearray(9)
        self._fill(memoryview(start))
        length = int.from_bytes(start[1:], "little")
        if length > _MAX_MESSAGE_BYTES:
            raise OSError(f"a message of {length:,} bytes was announced")
        message = memoryview(page_memory(length))[:length]
        self._fill(message)
        if start[:1] == _FAILED:
            raise Outcome.from_bytes(bytes(message)).exception()
        return message

    def finish(self) -> None:
        """Send an empty message, which says that nothing more comes, and hang up."""
        # A rank that is gone is told of elsewhere, if it matters.
        with suppress(OSError):
            self._socket.sendall(_OK + bytes(8))
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._socket.recv_into(view)
            if count == 0:
                raise ConnectionResetError("the other side has hung up")
            view = view[count:]

    def _broken(self, error: OSError) -> CheckpointError:
        if isinstance(error, TimeoutError):
            return DeadlineError(
                f"Rank {self.rank} sent or took nothing for {self._timeout_s:g} s.",
                safe="Nothing was committed by this attempt; earlier checkpoints are intact.",
                ranks=[self.rank],
            )
        return RankFailedError(
            f"Rank {self.rank} cannot be reached any more: {error}.",
            safe="Nothing was committed by this attempt; earlier checkpoints are intact.",
            hint=f"Look at the log of rank {self.rank}.",
            ranks=[self.rank],
        )


class Desk:
    """Where the leader takes the calls of the other ranks.

    Args:
        host: The name under which the other ranks reach the leader's machine.
    """

    def __init__(self, host: str) -> None:
        self._token = secrets.token_hex(_TOKEN_BYTES)
        self._host = host
        family, address = _listen_at(host)
        self._listener = socket.create_server((address, 0), family=family, backlog=128)

    @property
    def address(self) -> list[str | int]:
        """Return what to pass to :func:`call`."""
        return [self._host, int(self._listener.getsockname()[1]), self._token]

    def take_calls(self, world_size: int, *, call_s: float, timeout_s: float) -> dict[int, Line]:
        """Return a line to each of the other ranks.

        Args:
            world_size: The number of ranks.
            call_s: How long they may take to call, in seconds.
            timeout_s: How long to wait for a rank each time later on.

        Raises:
            DeadlineError: Some did not call.
        """
        deadline_s = time.monotonic() + call_s
        lines: dict[int, Line] = {}
        try:
            while len(lines) < world_size - 1:
                line = self._take_call(deadline_s, timeout_s=timeout_s)
                if line is not None and 0 < line.rank < world_size and line.rank not in lines:
                    lines[line.rank] = line
                elif line is not None:
                    line.close()
        except BaseException as error:
            for line in lines.values():
                line.close()
            if isinstance(error, TimeoutError):
                raise _missing(world_size, lines, call_s=call_s) from error
            raise
        return lines

    def close(self) -> None:
        """Take no more calls."""
        self._listener.close()

    def _take_call(self, deadline_s: float, *, timeout_s: float) -> Line | None:
        """Return a line to the next rank that calls; ``None`` if it was a stranger."""
        self._listener.settimeout(_left_s(deadline_s))
        connection, _ = self._listener.accept()
        try:
            rank = self._hear(connection, min(deadline_s, time.monotonic() + _HELLO_S))
            return Line(connection, rank, timeout_s=timeout_s)
        except OSError:
            connection.close()
            return None  # such as a scanner of ports
        except BaseException:
            connection.close()
            raise

    def _hear(self, connection: socket.socket, deadline_s: float) -> int:
        """Return the rank that calls. Nothing that a stranger sends is looked into."""
        if _read(connection, 9, deadline_s) != _OK + _HELLO_BYTES.to_bytes(8, "little"):
            raise ConnectionRefusedError("this is no hello")
        hello = _read(connection, _HELLO_BYTES, deadline_s)
        if not hmac.compare_digest(hello[:-_RANK_BYTES], self._token.encode()):
            raise ConnectionRefusedError("the token is not ours")
        return int.from_bytes(hello[-_RANK_BYTES:], "little")


def call(address: Sequence[str | int], *, rank: int, call_s: float, timeout_s: float) -> Line:
    """Call the leader.

    Args:
        address: What its desk says.
        rank: This rank.
        call_s: How long that may take, in seconds.
        timeout_s: How long to wait for the leader each time later on.

    Raises:
        RankFailedError: The leader cannot be reached.
    """
    host, port, token = address
    try:
        connection = socket.create_connection((str(host), int(port)), timeout=call_s)
    except OSError as error:
        raise RankFailedError(
            f"Rank {rank} cannot reach rank 0 at {host}:{port}: {error}.",
            safe="Nothing was committed by this attempt; earlier checkpoints are intact.",
            hint="Rank 0 must be reachable from every machine, at any port.",
            ranks=[0],
        ) from error
    try:
        line = Line(connection, 0, timeout_s=timeout_s)
        line.send(str(token).encode(), rank.to_bytes(_RANK_BYTES, "little"))
    except BaseException:
        connection.close()
        raise
    return line


def _missing(world_size: int, lines: Mapping[int, Line], *, call_s: float) -> DeadlineError:
    missing = [rank for rank in range(1, world_size) if rank not in lines]
    named = ", ".join(map(str, missing))
    return DeadlineError(
        f"Rank {named} did not call rank 0 within {call_s:g} s to hand over its share.",
        safe="Nothing was committed by this attempt; earlier checkpoints are intact.",
        hint="Rank 0 must be reachable from every machine.",
        ranks=missing,
    )


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0.0:
        raise TimeoutError("the time is over")
    return left_s


def _read(connection: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    """Read so many bytes, by a deadline that does not move when some arrive."""
    data = b""
    while len(data) < num_bytes:
        connection.settimeout(_left_s(deadline_s))
        piece = connection.recv(num_bytes - len(data))
        if not piece:
            raise ConnectionResetError("the other side has hung up")
        data += piece
    return data


def _listen_at(host: str) -> tuple[socket.AddressFamily, str]:
    """Return where to listen: on this machine alone if that is where the others are."""
    family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    is_here = ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
    is_name = host != "localhost" and not _is_number(host)
    # The name of a machine often leads to itself by loopback, and to its address from elsewhere.
    return family, str(address[0]) if is_here and not is_name else ""


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
