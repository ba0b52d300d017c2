"""Group commit: one process of a node appends for all its workers.

Workers send finished lines over a local socket. Whatever arrives until the lock is had goes into one round: one lock,
one append and one sync for all of it. So a node asks for the journal's lock once per round, not once per record, and
the folder stays the only place where nodes meet. The lock is free again before the sync, and who needs no sync has its
answer by then.

The server keeps nothing: it has answered only what is in the file. If it dies, stalls or was never there, a worker
takes the lock itself. A request must then not be written twice, and two facts see to it:

- the worker closes its connection before it takes the lock, and looks under the lock whether its record is in the file;
- the server looks under the lock which connections are still open, and drops the requests of the others.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import select
import selectors
import shutil
import socket
import struct
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

from hpcjobs.journal_client import DONE, FAILED, REPLY, REQUEST, WAITING
from hpcjobs.journal_file import FileBackend
from hpcjobs.journal_soft_lock import lock_for
from hpcjobs.paths import StudyPaths

log = logging.getLogger(__name__)

_LARGEST_REQUEST = 256 << 20


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    request: bytes | None = None
    synced: bool = False

    def take(self) -> bool:
        """Read what is there; whether the worker is still connected."""
        try:
            part = self.socket.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.received += part
        if len(self.received) >= REQUEST.size:
            length, self.synced = REQUEST.unpack_from(self.received)
            if length > _LARGEST_REQUEST:
                return False
            if len(self.received) >= REQUEST.size + length:
                self.request = bytes(self.received[REQUEST.size : REQUEST.size + length])
                del self.received[: REQUEST.size + length]
        return bool(part)

    def reply(self, what: int, text: str = "", inode: int = 0) -> bool:
        encoded = text.encode()[:65535]
        try:
            self.socket.sendall(REPLY.pack(what, len(encoded), inode) + encoded)
        except OSError:
            return False
        return True


class JournalServer:
    """Serves one node's workers from a thread of its own. Only processes of the same user are answered.

    Args:
        socket_path: where to listen. By default in a new folder of the node's temporary directory: the study's
            filesystem may not have sockets, and their paths are limited to about 100 characters.
    """

    def __init__(self, paths: StudyPaths, socket_path: Path | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hpcjobs-journal-")) if socket_path is None else None
        self.socket_path = socket_path or Path(str(self._folder), "socket")
        self._backend = FileBackend(
            paths.journal, lock_for(paths.journal, deadline_s=math.inf), on_status=self._tell_waiting
        )
        self._selector = selectors.DefaultSelector()
        self._round: list[_Connection] = []
        self._stopping = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="journal server", daemon=True)

    def start(self) -> JournalServer:
        self.socket_path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self.socket_path))
        self.socket_path.chmod(0o600)
        listener.listen(1024)
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread.start()
        return self

    def close(self) -> None:
        """Finish the round under way and stop. Workers that are still there go on by themselves."""
        self._wake_writer.send(b"x")
        self._thread.join(timeout=30)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> JournalServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        try:
            while not self._stopping:
                self._collect(None)
                if self._round:
                    self._commit()
        finally:
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()
            self.socket_path.unlink(missing_ok=True)

    def _collect(self, timeout_s: float | None) -> None:
        """Put the requests that are there into the round; without a timeout, wait for one."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._wake_reader:
                self._stopping = True
            elif key.fileobj is self._listener:
                self._accept()
            else:
                connection: _Connection = key.data
                if not connection.take():
                    self._drop(connection)
                elif connection.request is not None:
                    self._round.append(connection)

    def _accept(self) -> None:
        accepted, _ = self._listener.accept()
        credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            accepted.close()
            return
        accepted.setblocking(False)
        self._selector.register(accepted, selectors.EVENT_READ, _Connection(accepted))

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection.request is not None:
            self._round.remove(connection)

    def _commit(self) -> None:
        """One lock and one append for all requests of the round, and one sync for those that ask for it."""
        try:
            self._backend.append(self._requests_of_the_living, synced=False)
            self._answer(DONE, unsynced_only=True)
            if self._round:
                self._backend.sync()
        except OSError as error:
            log.exception("the journal's server could not append")
            self._answer(FAILED, str(error))
        self._answer(DONE)

    def _answer(self, what: int, text: str = "", unsynced_only: bool = False) -> None:
        waiting = []
        for connection in self._round:
            if unsynced_only and connection.synced:
                waiting.append(connection)
            else:
                connection.request = None
                connection.reply(what, text, self._backend.inode)
        self._round = waiting

    def _requests_of_the_living(self) -> list[bytes]:
        self._collect(0)
        # those that have not hung up: a worker that has may have written its request itself
        poll = select.poll()
        for connection in self._round:
            poll.register(connection.socket, select.POLLRDHUP)
        gone = {descriptor for descriptor, _ in poll.poll(0)}
        self._round = [connection for connection in self._round if connection.socket.fileno() not in gone]
        return b"".join(connection.request or b"" for connection in self._round).splitlines(keepends=True)

    def _tell_waiting(self, text: str) -> None:
        for connection in self._round:
            connection.reply(WAITING, text)


def serve(paths: StudyPaths, socket_path: Path | None = None) -> JournalServer:
    """Start a node's journal server in this process; give workers its ``socket_path`` in ``HPCJOBS_JOURNAL_SOCKET``."""
    return JournalServer(paths, socket_path).start()


def main() -> int:
    """Serve until standard input is closed, so that the server ends with the process that started it."""
    parser = argparse.ArgumentParser(
        prog="python -m hpcjobs.journal_server",
        description="Append to a study's journal for the workers of one node.",
        epilog="example: python -m hpcjobs.journal_server /scratch/study /tmp/journal.socket",
    )
    parser.add_argument("folder", type=Path, help="the study's folder")
    parser.add_argument("socket", type=Path, help="the local socket to listen on")
    arguments = parser.parse_args()
    with serve(StudyPaths(arguments.folder), arguments.socket):
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
