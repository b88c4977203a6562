"""Errors that TensorFlow's tape hides from eager steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tfps.exchange.interface import Exchange


@contextlib.contextmanager
def told(exchange: Exchange) -> Iterator[None]:
    """Raises in a `SystemError`'s place why `exchange` has failed.

    A tape asks in C for the handle of a variable that is read. What is raised there becomes "SystemError:
    TFE_Py_TapeVariableAccessed returned a result with an exception set", and Keras' layers drop its cause.

    Raises:
        TfpsError: why the exchange has failed.
    """
    try:
        yield
    except SystemError as error:
        if exchange.failure is None:
            raise
        raise exchange.failure from error
