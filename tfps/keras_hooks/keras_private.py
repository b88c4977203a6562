"""Every private Keras name that tfps uses, with its reason; checked only here.

Raises:
    ImportError: a name is missing; the message says which versions are supported.

Tested in tests/test_versions.py.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from tfps.graph.tf_private import SUPPORTED, needs
from tfps.types import Batches, Model, Optimizer, Variable

_GLOBAL_SEEDS = "global_seed_generator"


def _class_that_defines(cls: type, name: str) -> type[Model]:
    """Returns the class among `cls` and its bases that defines `name`."""
    needs(cls, name)
    return next(each for each in cls.__mro__ if name in vars(each))


try:
    from keras.src.backend.common import (
        global_state as global_state,
    )  # has the generator of keras.random without a seed
    from keras.src.backend.common.symbolic_scope import in_symbolic_scope as in_symbolic_scope  # its graphs never run
    from keras.src.backend.tensorflow import nn as nn_module  # has functions that XLA compiles (layers.py)
    from keras.src.backend.tensorflow import trainer as trainer_module  # combines the results of replicas' steps
    from keras.src.legacy.saving import legacy_h5_format as legacy_h5_format  # what writes files, see below
    from keras.src.losses import loss as loss_module  # where a loss becomes a mean, divided by the number of replicas
    from keras.src.random import seed_generator
    from keras.src.saving import saving_lib as saving_lib
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter as ArrayDataAdapter

    # Wrapped where batches do not divide evenly (weighing.py).
    needs(loss_module, "scale_loss_for_distribution", "unscale_loss_for_distribution")
    needs(loss_module, "reduce_weighted_values", "apply_mask")
    needs(trainer_module, "reduce_per_replica")
    needs(keras.optimizers.Optimizer, "_backend_apply_gradients")
    needs(keras.Model, "compute_loss")
    needs(keras.metrics.Mean, "update_state")
    needs(tf.nn, "compute_average_loss", "scale_regularization_loss")
    for _kind in (keras.losses.Dice, keras.losses.Tversky, keras.losses.Circle):
        needs(_kind, "call")

    needs(nn_module, "conv")

    # Wrapped because replicas' first batches differ in size, and not every model can be built (layers.py).
    needs(keras.Model, "_maybe_symbolic_build", "_flatten_layers")  # takes a batch to infer shapes
    needs(trainer_module.TFEpochIterator, "_distributed_dataset")  # has the spec of its batches

    # Where ranks would otherwise shuffle differently (random_numbers.py).
    needs(global_state, "get_global_attribute", "set_global_attribute")
    needs(seed_generator, "global_seed_generator")
    needs(ArrayDataAdapter, "get_tf_dataset")
    needs(tf.random, "shuffle")

    # Wrapped where workers do not step together: an epoch then ends with the data, not after so many steps. And to
    # read no further than an epoch (loops.py).
    needs(trainer_module.TFEpochIterator, "reset", "catch_stop_iteration", "_enumerate_iterator", "tf_sync")
    needs(trainer_module.TFEpochIterator, "_distribute_strategy")
    needs(trainer_module.TFEpochIterator, "steps_per_epoch", "steps_per_execution", "data_adapter", "_num_batches")
    needs(keras.Model, "evaluate")
    needs(keras.optimizers.Optimizer, "_iterations")  # of batches, where `iterations` is of updates
    needs(keras.optimizers.Optimizer, "_clip_gradients")  # limits are of a worker's own gradient (optimizers.py)

    # Wrapped because ranks and replicas would otherwise act or decide separately.
    needs(keras.Model, "distribute_strategy")  # tells which models to handle
    needs(keras.Model, "_get_metrics_result_or_logs")  # logs that `fit` and `evaluate` report (agreed_logs.py)
    needs(keras.callbacks.TerminateOnNaN, "on_batch_end", "on_epoch_end")  # agreed_logs.py
    needs(keras.Model, "predict", "predict_on_batch")  # loops.py
    needs(keras.optimizers.LossScaleOptimizer, "check_finite")  # agreed_logs.py
    needs(keras.random.SeedGenerator, "next")  # source of all seeds of layers and keras.random (random_numbers.py)
    needs(keras.Layer, "add_loss", "_losses")  # layers.py

    # Wrapped where pservers update (remote_optimizers.py): what would update here, and what creates slots; then what a
    # slot without memory overrides.
    needs(keras.optimizers.Optimizer, "_backend_update_step", "_apply_weight_decay")
    needs(keras.optimizers.Optimizer, "_update_model_variables_moving_average")
    needs(keras.optimizers.Optimizer, "_overwrite_model_variables_with_average_value")
    needs(keras.optimizers.Optimizer, "add_variable_from_reference", "add_variable", "_track_variable")
    needs(keras.optimizers.Optimizer, "_use_weight_decay", "_trainable_variables")
    needs(keras.optimizers.Nadam, "_u_product")
    needs(keras.callbacks.SwapEMAWeights, "_tf_swap_variables", "_backend_swap_variables")
    needs(keras.callbacks.SwapEMAWeights, "_tf_finalize_ema_values", "_backend_finalize_ema_values")
    needs(keras.Variable, "_initialize_with_initializer", "_direct_assign", "_value", "_shape")
    needs(keras.Variable, "_serialize_to_tensors", "_restore_from_tensors", "_shared_name")
    needs(keras.Variable, "_export_to_saved_model_graph", "_trackable_children")

    # Wrapped where workers train alone (policies/diloco.py): what counts a step, evaluates, ends `fit`, saves.
    needs(keras.optimizers.Optimizer, "apply", "use_ema")
    needs(keras.optimizers.LossScaleOptimizer, "apply")
    needs(keras.Model, "evaluate", "test_on_batch")
    needs(keras.callbacks.CallbackList, "on_train_end", "model")
    needs(keras.callbacks.EarlyStopping, "on_epoch_end")
    needs(keras.callbacks.ModelCheckpoint, "set_model")
    needs(keras.callbacks.BackupAndRestore, "set_model")

    # Wrapped because several ranks save (checkpoint.py): where callbacks decide to save, and build paths from logs.
    needs(keras.Model, "save", "save_weights", "export")
    # What `keras.saving.save_model` and `save_weights` call: a program may have imported these before.
    needs(saving_lib, "save_model", "save_weights_only", "_save_model_to_fileobj")
    needs(legacy_h5_format, "save_model_to_hdf5")
    needs(keras.callbacks.ModelCheckpoint, "_save_model", "_get_file_path")
    needs(keras.callbacks.BackupAndRestore, "_save_model", "_weights_path", "on_train_begin", "on_train_end")
    needs(keras.callbacks.CSVLogger, "on_train_begin")
    needs(keras.callbacks.RemoteMonitor, "on_epoch_end")
    if hasattr(keras.callbacks, "OrbaxCheckpoint"):  # since Keras 3.14
        needs(keras.callbacks.OrbaxCheckpoint, "set_model", "on_train_batch_end", "checkpointer")
    needs(keras.Model, "fit")  # compares before it begins (loops.py)
    needs(keras.Model, "_initial_epoch")  # set by BackupAndRestore: the first epoch of `fit`

    # For models and optimizers created outside of the scope (optimizers.py). `compile` is replaced in the class that
    # defines it, not in `keras.Model`: `compile_from_config` skips a model whose `compile` is not that class's.
    Trainer = _class_that_defines(keras.Model, "compile")
    needs(Trainer, "compile")
    Stepper = _class_that_defines(keras.Model, "make_train_function")  # makes the steps (weighing.py)
    needs(Stepper, "make_test_function")
    needs(keras.optimizers.Optimizer, "build", "_distribution_strategy")
    needs(keras.optimizers.LossScaleOptimizer, "build")
    needs(keras.Variable, "_initialize")  # gives a Keras variable a tf.Variable, as when it is created
except (ImportError, AttributeError) as error:  # a module, or a class in one
    raise ImportError(f"tfps supports {SUPPORTED}; Keras {keras.__version__} does not fit: {error}") from error


def global_seeds() -> list[int] | None:
    """Returns the state of the generator behind `keras.random` without a seed; None if there is none yet."""
    known = global_state.get_global_attribute(_GLOBAL_SEEDS)
    return None if known is None else [int(each) for each in known.state.numpy()]


def set_global_seeds(state: list[int]) -> None:
    """Sets the state of that generator."""
    seed_generator.global_seed_generator().state.assign(state)


def forget_global_seeds() -> None:
    """Makes Keras create that generator anew when it is needed."""
    global_state.set_global_attribute(_GLOBAL_SEEDS, None)


def distributed_dataset(epochs: Batches) -> Batches:
    """Returns the distributed dataset of `fit`'s epoch iterator."""
    return epochs._distributed_dataset


def batch_counter(optimizer: Optimizer) -> Variable:
    """Returns the variable in which `optimizer` counts batches, also those whose gradients it only accumulates."""
    return optimizer._iterations


def without_limit(epochs: Batches) -> None:
    """Makes `fit`'s epoch iterator go on until a step finds the end of the data."""
    epochs.steps_per_epoch = epochs._num_batches = None


def adopt_optimizer(optimizer: Optimizer, strategy: object) -> None:
    """Makes `optimizer` create its slots under `strategy`, as if it had been created in that scope."""
    optimizer._distribution_strategy = strategy


def strategy_of_optimizer(optimizer: Optimizer) -> tf.distribute.Strategy:
    """Returns the strategy in whose scope `optimizer` was created, or which it has joined."""
    return optimizer._distribution_strategy


def decays(optimizer: Optimizer, variable: Variable) -> bool:
    """Whether the weight decay of `optimizer` applies to `variable`."""
    return bool(optimizer._use_weight_decay(variable))


def trained_variables(optimizer: Optimizer) -> list[Variable]:
    """Returns the variables that `optimizer` was built for."""
    return list(optimizer._trainable_variables)


def product_of_momentums(optimizer: Optimizer) -> Variable:
    """Returns the variable in which Nadam multiplies its momentums."""
    return optimizer._u_product
