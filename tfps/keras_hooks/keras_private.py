"""Every private name of Keras that tfps uses, checked here only, each with its reason.

Raises:
    ImportError: one of these names is gone; the message says which versions are supported.

Tested in tests/test_versions.py.
"""

from __future__ import annotations

from typing import Any

import keras

from tfps.graph.tf_private import SUPPORTED


def _class_that_defines(cls: type, name: str) -> Any:
    """The class among `cls` and its bases that defines `name`."""
    for each in cls.__mro__:
        if name in vars(each):
            return each
    raise _missing(cls, name)


def _missing(owner: Any, name: str) -> ImportError:
    return ImportError(f"tfps supports {SUPPORTED}; Keras {keras.__version__} does not fit: {owner} has no {name}")


def needs(owner: Any, *names: str) -> None:
    """Checks that `owner` has `names`.

    Raises:
        ImportError: it has not.
    """
    for name in names:
        if not hasattr(owner, name):
            raise _missing(owner, name)


try:
    from keras.src.backend.common.symbolic_scope import in_symbolic_scope as in_symbolic_scope  # its graphs never run
    from keras.src.backend.tensorflow import trainer as trainer_module  # joins what the steps of replicas return
    from keras.src.losses import loss as loss_module  # where a loss becomes a mean, divided by the number of replicas
except ImportError as error:
    raise ImportError(f"tfps supports {SUPPORTED}; Keras {keras.__version__} does not fit: {error}") from error

# Wrapped where batches do not divide evenly (weighing.py).
needs(loss_module, "scale_loss_for_distribution", "unscale_loss_for_distribution")
needs(loss_module, "reduce_weighted_values", "apply_mask")
needs(trainer_module, "reduce_per_replica")
needs(keras.optimizers.Optimizer, "_backend_apply_gradients")
needs(keras.Model, "compute_loss", "_maybe_symbolic_build")  # the latter takes one batch for a model's shapes
needs(keras.metrics.Mean, "update_state")
needs(keras.Layer, "add_loss")

# Defines `compile`. Replaced there and not in `keras.Model`: `compile_from_config` asks whether a model's `compile` is
# still this class's, and calls none that is not.
Trainer = _class_that_defines(keras.Model, "compile")

# Gives a Keras variable a tf.Variable, as when it is created: for those that were created outside of the scope.
needs(keras.Variable, "_initialize")


def distributed_dataset(epochs: Any) -> Any:
    """What an iterator over epochs of `fit` distributes.

    Raises:
        ImportError: this Keras keeps it elsewhere.
    """
    needs(epochs, "_distributed_dataset")
    return epochs._distributed_dataset


def losses_of(layer: Any) -> list[Any]:
    """What `layer` has added in its last call; the list itself.

    Raises:
        ImportError: this Keras keeps it elsewhere.
    """
    needs(layer, "_losses")
    losses: list[Any] = layer._losses
    return losses


def adopt_optimizer(optimizer: Any, strategy: Any) -> None:
    """Makes `optimizer` create its slots under `strategy`, as if it had been created in that scope.

    Raises:
        ImportError: this Keras keeps the strategy elsewhere.
    """
    needs(optimizer, "_distribution_strategy")
    optimizer._distribution_strategy = strategy
