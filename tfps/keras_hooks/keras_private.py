"""Every private Keras name that tfps uses, with its reason. Checked here, those that hooks replace by `hooks.replaces`.

Raises:
    ImportError: a name is missing; the message says which versions are supported.

Tested in tests/test_versions.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType

import keras
import tensorflow as tf

from tfps.graph.tf_private import SUPPORTED, needs
from tfps.types import Batches, Model, Optimizer, Variable

_GLOBAL_SEEDS = "global_seed_generator"


@contextlib.contextmanager
def _fitting() -> Iterator[None]:
    try:
        yield
    except (ImportError, AttributeError) as error:  # a module, or a class in one
        raise ImportError(f"tfps supports {SUPPORTED}; Keras {keras.__version__} does not fit: {error}") from error


def check(owner: type | ModuleType, *names: str) -> None:
    """Checks that `owner` has `names`."""
    with _fitting():
        needs(owner, *names)


def _class_that_defines(cls: type, name: str) -> type[Model]:
    """Returns the class among `cls` and its bases that defines `name`."""
    needs(cls, name)
    return next(each for each in cls.__mro__ if name in vars(each))


with _fitting():
    # It has the generator of keras.random without a seed.
    from keras.src.backend.common import global_state as global_state
    from keras.src.backend.common.symbolic_scope import in_symbolic_scope as in_symbolic_scope  # its graphs never run
    from keras.src.backend.tensorflow import nn as nn_module  # has functions that XLA compiles (layers.py)
    from keras.src.backend.tensorflow import trainer as trainer_module  # combines the results of replicas' steps
    from keras.src.legacy.saving import legacy_h5_format as legacy_h5_format  # these two write files (checkpoint.py)
    from keras.src.losses import loss as loss_module  # where a loss becomes a mean, divided by the number of replicas
    from keras.src.models.functional import Functional as Functional  # what a model computes with (captured.py)
    from keras.src.ops.node import Node as Node
    from keras.src.random import seed_generator
    from keras.src.saving import saving_lib as saving_lib
    from keras.src.trainers import trainer as base_trainer_module  # which models XLA can compile (xla.py)
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter as ArrayDataAdapter
    from keras.src.trainers.data_adapters.generator_data_adapter import (
        GeneratorDataAdapter as GeneratorDataAdapter,
    )
    from keras.src.trainers.data_adapters.py_dataset_adapter import OrderedEnqueuer as OrderedEnqueuer
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter as PyDatasetAdapter
    from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
    from keras.src.utils import summary_utils as summary_utils  # counts parameters (embeddings/counting.py)

    # What hooks replace attributes of.
    needs(nn_module, "conv")
    needs(keras.losses, "Dice", "Tversky", "Circle")
    needs(keras.callbacks, "BackupAndRestore", "CallbackList", "CSVLogger", "EarlyStopping", "ModelCheckpoint")
    needs(keras.callbacks.ProgbarLogger, "on_epoch_end")
    needs(keras.callbacks, "RemoteMonitor", "SwapEMAWeights", "TerminateOnNaN")
    # `compile` is replaced in the class that defines it: `compile_from_config` skips a model whose `compile` is not
    # that class's.
    Trainer = _class_that_defines(keras.Model, "compile")
    Stepper = _class_that_defines(keras.Model, "make_train_function")

    needs(loss_module, "apply_mask")  # weighing.py
    needs(global_state, "get_global_attribute", "set_global_attribute")  # random_numbers.py
    needs(seed_generator, "global_seed_generator")
    # An epoch ends with the data where workers do not step together, and staging reads no further (loops.py).
    needs(trainer_module.TFEpochIterator, "_distribute_strategy", "_distributed_dataset", "_num_batches", "tf_sync")
    needs(trainer_module.TFEpochIterator, "steps_per_epoch", "steps_per_execution", "data_adapter")
    needs(trainer_module.TFEpochIterator, "_interrupted_warning")
    # Where a worker that joins goes on (joining.py, python_data.py).
    needs(trainer_module.TFEpochIterator, "_current_iterator", "_steps_seen")
    needs(PyDatasetAdapter, "_get_iterator", "py_dataset", "enqueuer", "shuffle")
    needs(OrderedEnqueuer, "_run", "py_dataset", "shuffle", "indices")
    needs(GeneratorDataAdapter, "generator")  # here and where it is read ahead (generators.py)
    needs(keras.optimizers.Optimizer, "_iterations")  # of batches, where `iterations` is of updates
    needs(keras.optimizers.Optimizer, "_distribution_strategy", "_trainable_variables", "use_ema")
    needs(keras.Model, "distribute_strategy")  # tells which models to handle
    needs(keras.Model, "_flatten_layers")  # whether all are built (layers.py), and which adapt (agreed_logs.py)
    needs(Functional, "_nodes_by_depth")
    needs(Node, "arguments", "operation")
    needs(base_trainer_module, "model_supports_jit")
    needs(keras.Model, "_jit_compile")  # by which it makes its functions
    needs(keras.Model, "_initial_epoch")  # set by BackupAndRestore and joining.py: the first epoch of `fit`
    needs(keras.Layer, "_losses")  # layers.py
    needs(keras.callbacks.CallbackList, "model")
    needs(keras.callbacks.ModelCheckpoint, "_get_file_path")
    needs(keras.callbacks.BackupAndRestore, "_weights_path")
    if hasattr(keras.callbacks, "OrbaxCheckpoint"):  # since Keras 3.14
        needs(keras.callbacks.OrbaxCheckpoint, "checkpointer")

    # Where pservers update (remote_optimizers.py): what would update here, and what creates slots; then what a slot
    # without memory overrides.
    needs(keras.optimizers.Optimizer, "_backend_update_step", "_apply_weight_decay")
    needs(keras.optimizers.Optimizer, "_update_model_variables_moving_average")
    needs(keras.optimizers.Optimizer, "_overwrite_model_variables_with_average_value")
    needs(keras.optimizers.Optimizer, "add_variable_from_reference", "add_variable", "_track_variable")
    needs(keras.optimizers.Optimizer, "_use_weight_decay")
    needs(keras.optimizers.Nadam, "_u_product")
    needs(keras.callbacks.SwapEMAWeights, "_tf_swap_variables", "_backend_swap_variables")
    needs(keras.callbacks.SwapEMAWeights, "_tf_finalize_ema_values", "_backend_finalize_ema_values")
    needs(keras.Variable, "_initialize")  # gives it a tf.Variable, as when it is created (optimizers.py)
    needs(keras.Variable, "_initialize_with_initializer", "_direct_assign", "_value", "_shape", "_shared_name")
    needs(keras.Variable, "_restore_from_tensors", "_export_to_saved_model_graph")


@contextlib.contextmanager
def without_jit(model: Model) -> Iterator[None]:
    """In the block `model` makes functions that are not compiled by XLA."""
    before = model._jit_compile
    model._jit_compile = False
    try:
        yield
    finally:
        model._jit_compile = before


def supports_jit(model: Model) -> bool:
    """Whether Keras would have XLA compile `model` by default."""
    return bool(base_trainer_module.model_supports_jit(model))


def global_seeds() -> list[int] | None:
    """Returns the state of the generator behind `keras.random` without a seed; None if there is none yet."""
    known = global_state.get_global_attribute(_GLOBAL_SEEDS)
    return None if known is None else [int(each) for each in known.state.numpy()]


def set_global_seeds(state: list[int] | None) -> None:
    """Sets it; None: Keras makes the generator when it is needed, from Python's."""
    if state is None:
        global_state.set_global_attribute(_GLOBAL_SEEDS, None)
    else:
        seed_generator.global_seed_generator().state.assign(state)


def distributed_dataset(epochs: Batches) -> Batches:
    """Returns the distributed dataset of `fit`'s epoch iterator."""
    return epochs._distributed_dataset


def begin_at(model: Model, epoch: int | None) -> None:
    """Makes `fit` begin at `epoch`; None: where it is told to."""
    model._initial_epoch = epoch


def of_tf_data(epochs: Batches) -> bool:
    """Whether an epoch iterator reads arrays or a `tf.data.Dataset`: Keras makes nothing in Python."""
    return isinstance(epochs.data_adapter, (ArrayDataAdapter, TFDatasetAdapter))


def sizes_of_arrays(epochs: Batches) -> Callable[[int], int] | None:
    """Returns what gives the rows of a batch of an epoch by its position; None if an epoch iterator reads no arrays."""
    adapter = epochs.data_adapter
    if not isinstance(adapter, ArrayDataAdapter):
        return None
    last, size, fewer = adapter.num_batches - 1, adapter.batch_size, adapter.partial_batch_size
    return lambda position: fewer if fewer and position == last else size


def py_dataset_adapter(epochs: Batches) -> Batches | None:
    """Returns what an epoch iterator reads a `PyDataset` by; None if it reads something else."""
    return epochs.data_adapter if isinstance(epochs.data_adapter, PyDatasetAdapter) else None


def generator_adapter(epochs: Batches) -> Batches | None:
    """Returns what an epoch iterator reads a Python generator by; None if it reads something else."""
    return epochs.data_adapter if isinstance(epochs.data_adapter, GeneratorDataAdapter) else None


def continues(epochs: Batches) -> bool:
    """Whether the next epoch reads from an iterator that there is already."""
    return epochs.steps_per_epoch is not None and epochs._current_iterator is not None


def has_read(epochs: Batches) -> bool:
    """Whether that iterator has given batches in an epoch before."""
    return continues(epochs) and epochs._steps_seen > 0


def continue_with(epochs: Batches, iterator: Batches) -> None:
    """Makes `iterator` the one from which an epoch, and the next ones, go on."""
    epochs._current_iterator = iterator


def known_batches(epochs: Batches) -> int | None:
    """Returns how many batches there are, or how many steps an epoch before has tried; None if that is not known."""
    count: int | None = epochs._num_batches
    return count


def set_known_batches(epochs: Batches, count: int | None) -> None:
    """Sets it: later epochs take no more steps."""
    epochs._num_batches = count


def add_steps_seen(epochs: Batches, steps: int) -> None:
    """Counts steps of the current iterator that others have taken: Keras opens another when all batches were taken."""
    epochs._steps_seen += steps


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


def with_exclusions(optimizer: Optimizer, other: Optimizer) -> Optimizer:
    """`optimizer`, which now excludes from weight decay what `other` does: their configs lack that."""
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(other, name):
            setattr(optimizer, name, getattr(other, name))
    return optimizer


def trained_variables(optimizer: Optimizer) -> list[Variable]:
    """Returns the variables that `optimizer` was built for."""
    return list(optimizer._trainable_variables)


def product_of_momentums(optimizer: Optimizer) -> Variable:
    """Returns the variable in which Nadam multiplies its momentums."""
    return optimizer._u_product
