"""Every private Keras name that is new since Keras has a module for them, each with its reason; checked at import.

Raises:
    ImportError: a name is gone; the message says which versions are supported.
"""

from __future__ import annotations

from typing import Any

import keras

from tfps.tf_private import SUPPORTED

try:
    from keras.src.backend.tensorflow.optimizer import TFOptimizer  # sums gradients over replicas, accumulates them
    from keras.src.losses import loss as loss_module  # where a loss becomes a mean, divided by the number of replicas

    _NEEDED: dict[Any, tuple[str, ...]] = {
        loss_module: (
            "scale_loss_for_distribution",
            "unscale_loss_for_distribution",
            "reduce_weighted_values",
            "apply_mask",
        ),
        TFOptimizer: ("_all_reduce_sum_gradients", "_backend_increment_gradient_accumulators"),
        keras.Model: (
            "compute_loss",
            "_maybe_symbolic_build",  # makes one batch of all replicas' to build a model by its shapes
        ),
        keras.metrics.Mean: ("update_state",),
    }
    for _owner, _names in _NEEDED.items():
        for _name in _names:
            if not hasattr(_owner, _name):
                raise ImportError(f"{_owner} has no {_name}")
except ImportError as error:
    raise ImportError(f"tfps supports {SUPPORTED}; Keras {keras.__version__} does not fit: {error}") from error
