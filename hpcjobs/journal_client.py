"""A worker's side of the node's journal server, and the protocol between them.

A request is a header and finished lines of the journal; every request gets one reply, after any number of ``WAITING``.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable

SOCKET_VARIABLE = "HPCJOBS_JOURNAL_SOCKET"

REQUEST = struct.Struct("<I?")  # length of the lines, synced
REPLY = struct.Struct("<BHQ")  # what, length of the text, inode that the journal has
DONE, WAITING, FAILED = range(3)
_RETRY_AFTER_S = 1.0
_RETRY_STALLED_AFTER_S = 30.0


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

    def available(self) -> bool:
        """Whether a server listens; a failed one is asked again only after a while."""
        if self._socket is not None:
            return True
        if time.monotonic() < self._not_before:
            return False
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(self._patience_s)
        try:
            connection.connect(self._path)
        except OSError as error:
            connection.close()
            self._rest_after(error)
            return False
        self._socket = connection
        return True

    def commit(self, data: bytes, synced: bool) -> int:
        """Have lines appended; returns when they are in the file, with the inode of that file.

        Raises ServerGoneError where that is not known, with the connection closed.
        """
        assert self._socket is not None, "commit() without available()"
        try:
            self._socket.sendall(REQUEST.pack(len(data), synced) + data)
            while True:
                what, length, inode = REPLY.unpack(_receive(self._socket, REPLY.size))
                text = _receive(self._socket, length).decode() if length else ""
                if what == DONE:
                    return int(inode)
                if what == FAILED:
                    raise ServerGoneError(text)
                self._on_status(text)
        except OSError as error:
            self.close()
            self._rest_after(error)
            raise ServerGoneError(str(error)) from error
        except BaseException:
            # A signal's handler raised while we waited: the next request must not get the answer to this one.
            self.close()
            raise

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
