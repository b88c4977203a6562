"""Which variables may be updated or averaged elsewhere than where Keras trains them.

Tested in tests/integration/test_combinations.py and tests/policies/test_outer.py.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from tfps.errors import UnsupportedError
from tfps.types import Variable


def of_tensorflow(variable: Variable) -> Variable:
    """The variable of TensorFlow behind `variable`, of Keras or TensorFlow."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def check_variable(variable: Variable, setting: str, verb: str, instead: str, why: str = "") -> None:
    """Checks that pservers can `verb` `variable`, of Keras or TensorFlow.

    Args:
        setting, instead: for the message: what asks for it, and what to take in its place.
        why: what else forbids it, if something does.

    Raises:
        UnsupportedError: they cannot.
    """
    own, name = of_tensorflow(variable), getattr(variable, "path", variable.name)
    if not getattr(own, "gates", ()) or not own.trainable:
        why = "is not a trainable variable of this strategy with a fixed shape"
    elif own.dtype != tf.float32:
        why = f"has dtype {own.dtype.name}, and pservers {verb} float32 (mixed precision keeps variables in float32)"
    elif getattr(variable, "overwrite_with_gradient", False):
        why = "is overwritten with its gradient"
    if why:
        raise UnsupportedError(f"{setting}: variable {name!r} {why}; {instead}")
