"""A slice that is encoded when its sender comes to it: what waits in a queue costs nothing yet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from tfps.exchange.codecs import Bytes, Floats


class Encoder(Protocol):
    """Makes bytes of numbers: a `Codec`, or a `Change` of parameters."""

    def wire_bytes(self, items: int) -> int:
        """Size of so many encoded numbers."""

    def encode(self, values: Floats, residual: Floats | None = None) -> Bytes:
        """Encodes `values`, which it does not change; see `Codec.encode`."""


class Encoding:
    """The encoded bytes of `values`, made once, by the first thread that asks; any thread.

    However often they are sent, the residual is counted once.

    Args:
        residual: see `Codec.encode`. Nobody else uses it until the encoding is made.
        failed: called with an error of encoding, such as a MemoryError; returns what to raise instead.
    """

    __slots__ = ("_data", "_encoder", "_error", "_failed", "_lock", "_residual", "_values", "nbytes")

    def __init__(
        self,
        encoder: Encoder,
        values: Floats,
        residual: Floats | None,
        failed: Callable[[Exception], Exception] = lambda error: error,
    ) -> None:
        self.nbytes = encoder.wire_bytes(values.size)
        self._encoder, self._residual, self._failed = encoder, residual, failed
        self._values: Floats | None = values
        self._lock = threading.Lock()  # guards what is below, and `residual`
        self._data: memoryview | None = None
        self._error: Exception | None = None

    @property
    def made(self) -> bool:
        """Whether `data` returns at once."""
        return self._data is not None

    def data(self) -> memoryview:
        """The bytes; makes them if nobody has.

        Raises:
            Exception: they could not be made.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._data is None and self._values is not None:
                try:
                    self._data = self._encoder.encode(self._values, self._residual).data
                except Exception as error:
                    self._error = self._failed(error)
                    if self._error is error:
                        raise
                    raise self._error from error
                self._values = self._residual = None  # frees the memory
            return memoryview(b"") if self._data is None else self._data
