"""A way to a server that can be cut, while the server and other ways to it stay."""

from __future__ import annotations

import contextlib
import socket
import threading


class Forwarder:
    """Passes connections to `port` of 127.0.0.1 on, from a `port` of its own, until `close`."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._lock = threading.Lock()  # guards the next two
        self._ends: list[socket.socket] = []
        self._closed = False
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Breaks all connections; new ones are refused."""
        with self._lock:
            self._closed = True
            for end in (self._listening, *self._ends):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listening.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._to))
                with self._lock:
                    if self._closed:
                        return
                    self._ends += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
