"""A worker's side of the node's journal server, and the protocol between them.

A request is a header and finished lines of the journal. One that asks for an answer gets it, after any number of
``WAITING``, when it and all before it of this worker are in the file. The others are sent on without waiting. The
worker keeps them until the next answer, so that the death of the server does not lose them; the server writes them also
if the worker has died. Lost they are only if both die before a round is over.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable

SOCKET_VARIABLE = "HPCJOBS_JOURNAL_SOCKET"

REQUEST = struct.Struct("<I??")  # length of the lines, synced, whether an answer is wanted
REPLY = struct.Struct("<BHQ")  # what, length of the text, inode that the journal has
DONE, WAITING, FAILED, HELLO = range(4)
_HELLO_TIMEOUT_S = 1.0
_RETRY_AFTER_S = 1.0
_RETRY_STALLED_AFTER_S = 30.0
_MOST_UNANSWERED = 64


class ServerGoneError(ConnectionError):
    """No answer from the node's server: whether the request was written is not known. The connection is closed."""


class JournalClient:
    """A worker's connection to its node's server, made when it is first needed and again after a failure.

    Args:
        on_status: told what the server waits for.
        patience_s: how long a request may go without a sign of life before the worker does it itself.
    """

    def __init__(self, path: str, on_status: Callable[[str], None], patience_s: float = 10.0) -> None:
        self._path = path
        self._on_status = on_status
        self._patience_s = patience_s
        self._socket: socket.socket | None = None
        self._not_before = 0.0
        self.unanswered: list[bytes] = []

    def available(self) -> bool:
        """Whether a server answers; asks a failed one again only after a while."""
        if self._socket is not None:
            return True
        if time.monotonic() < self._not_before:
            return False
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_HELLO_TIMEOUT_S)
        try:
            connection.connect(self._path)
            if _receive(connection, REPLY.size) != REPLY.pack(HELLO, 0, 0):
                raise ServerGoneError("not a journal server")
        except OSError as error:
            connection.close()
            self._rest_after(error)
            return False
        connection.settimeout(self._patience_s)
        self._socket = connection
        return True

    def send(self, lines: list[bytes], synced: bool, wait: bool) -> int | None:
        """Have lines appended. With ``wait``, returns the file's inode when they and all before them are in it.

        Raises ServerGoneError, with the connection closed, if a server is not there any more: what has become of
        ``unanswered`` is then not known.
        """
        assert self._socket is not None, "send() without available()"
        self.unanswered += lines
        wait = wait or len(self.unanswered) > _MOST_UNANSWERED
        data = b"".join(lines)
        try:
            self._socket.sendall(REQUEST.pack(len(data), synced, wait) + data)
            return self._answer(self._socket) if wait else None
        except OSError as error:
            self.close()
            self._rest_after(error)
            raise ServerGoneError(str(error)) from error

    def _answer(self, connection: socket.socket) -> int:
        while True:
            what, length, inode = REPLY.unpack(_receive(connection, REPLY.size))
            text = _receive(connection, length).decode() if length else ""
            if what == DONE:
                self.unanswered = []
                return int(inode)
            if what == FAILED:
                raise ServerGoneError(text)
            self._on_status(text)

    def take_unanswered(self) -> list[bytes]:
        """The lines of which it is not known whether they are in the file; they are the caller's from now on."""
        lines, self.unanswered = self.unanswered, []
        return lines

    def _rest_after(self, error: OSError) -> None:
        stalled = isinstance(error, TimeoutError)
        self._not_before = time.monotonic() + (_RETRY_STALLED_AFTER_S if stalled else _RETRY_AFTER_S)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ServerGoneError("the journal's server closed the connection")
        data += part
    return data
