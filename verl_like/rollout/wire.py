"""Connection by TCP between two processes of a run, on which whole Python objects travel."""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import struct
import threading
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import Empty, SimpleQueue
from typing import Any

_CONNECT_S = 60.0
_MOST_GUESTS = 64  # that are examined at the same time
_HANDSHAKE_S = 10.0  # for all of the other end's answers; who is slower is not one of ours


class Wire:
    """Connected socket whose other end has shown that it knows `authkey`, as has this one.

    `send` may be called from any thread, `receive` from one. Both raise OSError or EOFError when the wire is cut.
    """

    def __init__(self, connected: socket.socket, authkey: bytes, *, asks_first: bool) -> None:
        self._socket = connected
        self._sending = threading.Lock()
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = Connection(os.dup(connected.fileno()))
        self.limit(_HANDSHAKE_S if asks_first else _CONNECT_S)  # some strangers may be before us
        try:
            for ask in (asks_first, not asks_first):
                (deliver_challenge if ask else answer_challenge)(self._connection, authkey)
        except BaseException:
            self.close()
            raise
        self.limit(None)

    @classmethod
    def to(cls, address: tuple[str, int], authkey: bytes) -> Wire:
        """Connect to `address`. Raises OSError when nobody is there, AuthenticationError when it is somebody else."""
        return cls(socket.create_connection(address, timeout=_CONNECT_S), authkey, asks_first=False)

    def send(self, message: Any) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self._connection.send_bytes(data)

    def receive(self) -> Any:
        return pickle.loads(self._connection.recv_bytes())

    def cut(self) -> None:
        """End the connection for both ends, from any thread: a thread in `receive` is told.

        Then `close`, in that thread.
        """
        _cut(self._socket)

    def close(self) -> None:
        self.cut()
        with self._sending:
            self._connection.close()
            self._socket.close()

    def limit(self, seconds: float | None) -> None:
        """Set the seconds that one reading or writing may take; None: for ever.

        A longer one raises BlockingIOError, an OSError.
        """
        whole, part = divmod(0.0 if seconds is None else max(seconds, 1e-3), 1.0)  # a struct timeval of 0 is no limit
        limit = struct.pack("ll", int(whole), int(part * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)


class Socket:
    """Listening end that one `Wire` can connect to; `address` and `authkey` say how.

    The handshake is done by `accept`, or, after `listen`, before it.
    """

    def __init__(self, host: str) -> None:
        self._socket = socket.create_server((host, 0))
        self.authkey = secrets.token_bytes(32)
        name = self._socket.getsockname()
        self.address: tuple[str, int] = (name[0], name[1])
        self._known: SimpleQueue[Wire | OSError] = SimpleQueue()
        self._listener: threading.Thread | None = None
        self._places = threading.Semaphore(_MOST_GUESTS)
        self._letting_in, self._over = threading.Lock(), False

    def listen(self) -> None:
        """Begin the handshake with every caller from now on."""
        self._listener = threading.Thread(target=self._listen, args=(self._known,), name="link-listen", daemon=True)
        self._listener.start()

    def accept(self, timeout_s: float | None = None) -> Wire:
        """Return the wire of the first caller that knows the key, and let in nobody after it.

        Raises OSError when `close` is called meanwhile, TimeoutError (an OSError too) when nobody came.
        """
        if self._listener is None:
            self.listen()
        assert self._listener is not None
        try:
            first = self._known.get(timeout=timeout_s)
        except Empty:
            first = TimeoutError("nobody came")
        self.close()
        with self._letting_in:  # whose handshake ends from now on, or has ended as well, would wait for ever
            self._over = True
            while not self._known.empty():
                late = self._known.get()
                if isinstance(late, Wire):
                    late.close()
        self._listener.join(_HANDSHAKE_S)
        if isinstance(first, OSError):
            raise first
        return first

    def _listen(self, known: SimpleQueue[Wire | OSError]) -> None:
        """Run each caller's handshake in a thread of its own: strangers keep nobody waiting."""
        try:
            while True:
                self._places.acquire()
                connected = self._socket.accept()[0]
                threading.Thread(target=self._examine, args=(connected, known), name="link-guest", daemon=True).start()
        except OSError as error:  # it was closed
            known.put(error)
        finally:
            self._socket.close()

    def _examine(self, connected: socket.socket, known: SimpleQueue[Wire | OSError]) -> None:
        deadline = threading.Timer(_HANDSHAKE_S, lambda: _cut(connected))  # of the whole, however often it says a byte
        deadline.daemon = True
        deadline.start()
        try:
            wire = Wire(connected, self.authkey, asks_first=True)
            with self._letting_in:
                if self._over:
                    wire.close()
                else:
                    known.put(wire)
        except (AuthenticationError, EOFError, OSError):  # a stranger
            connected.close()
        finally:
            deadline.cancel()
            self._places.release()

    def close(self) -> None:
        _cut(self._socket)


def _cut(connected: socket.socket) -> None:
    with suppress(OSError):  # it is cut already
        connected.shutdown(socket.SHUT_RDWR)


def address_towards(host: str, port: int) -> str:
    """Find this machine's address in the network that leads to `host`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]
