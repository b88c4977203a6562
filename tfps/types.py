"""Names for what has no types.

TensorFlow, Keras and grpc come without types: what comes from them is `Any` to a type checker. That word is written
here only, and everywhere else a name that says what is meant: one of these, or its own (`tf.Tensor`) where it is
imported anyway.

Tested in tests/test_layers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# numpy; quoted, as tfps_launch does without it
Array: TypeAlias = "NDArray[Any]"  # of any dtype
DType: TypeAlias = "np.dtype[Any]"

# TensorFlow and Keras
Value: TypeAlias = Any  # a tensor, IndexedSlices, an array or a number; also one per replica
Structure: TypeAlias = Any  # values, their specs or the like, alone or nested in lists, tuples and dicts
Variable: TypeAlias = Any  # TensorFlow's or Keras'
Batches: TypeAlias = Any  # a dataset, or an iterator over one; also a distributed one
Layer: TypeAlias = Any
Model: TypeAlias = Any
Optimizer: TypeAlias = Any
Callback: TypeAlias = Any  # of Keras
Logs: TypeAlias = dict[str, Any]  # name -> value: what Keras gives to callbacks, and a train_step returns

# Everything else
Communicator: TypeAlias = Any  # of mpi4py
Function: TypeAlias = Callable[..., Any]
Argument: TypeAlias = Any  # passed on to what checks it
Options: TypeAlias = dict[str, Any]  # keyword arguments, likewise
Buffer: TypeAlias = Any  # bytes-like; collections.abc.Buffer needs Python 3.12
Library: TypeAlias = Any  # a module that is passed around
Json: TypeAlias = Any  # what `json.loads` returns
