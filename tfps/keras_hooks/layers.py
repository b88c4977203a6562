"""Layers under a strategy: built before the first step, kernels read before XLA, added losses kept for each replica.

Tested in tests/keras_hooks/test_building.py, test_convolutions.py there and tests/integration/test_rows.py.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfps.errors import UnsupportedError
from tfps.graph.patches import BaseStrategy, replaced, scope_outside, strategy_of
from tfps.keras_hooks.hooks import for_models, replaces
from tfps.keras_hooks.keras_private import Stepper, nn_module
from tfps.keras_hooks.variables import of_tensorflow
from tfps.types import Argument, Batches, Function, Layer, Model, Structure, Value, Variable

logger = logging.getLogger("tfps")


@replaces(keras.Model, "_maybe_symbolic_build", "tests/keras_hooks/test_building.py")
@for_models
def _build_if_possible(
    original: Function, strategy: BaseStrategy, model: Model, iterator: Batches = None, data_batch: Structure = None
) -> None:
    """Builds by the data's spec, without reading any; what Keras cannot build, the first step does.

    Keras builds models before the first step under every strategy but not without one. It cannot build one without
    `call()`, whose `train_step` uses layers and models of its own (GANs, VAEs), or whose `call()` is only a part. If
    such a step, or an eager one, is to build a model, it does, as in plain Keras: what calls a layer first gives its
    variables their paths, by which optimizers exclude some, and an eager step knows all sizes.

    Keras would take the mean of the replicas' first batches, which fails if sizes differ. Taking a batch would give a
    shuffled dataset its second order in the first epoch.
    """
    if type(model).call is keras.Model.call:  # no `call()`: Keras would warn of layers that are not built
        return
    _check_stateful(strategy, model)
    if iterator is not None:
        data_batch = _described_batch(iterator)
    built = all(layer.built for layer in model._flatten_layers())
    if not built and (_has_own_step(model) or (model.run_eagerly and not _is_known(data_batch))):
        return
    optimizer = model.optimizer
    builds = optimizer is not None and not optimizer.built
    try:
        # Keras takes the optimizer for built: it may only be built with all variables.
        with replaced(optimizer, "built", True) if builds else contextlib.nullcontext():
            original(model, None, data_batch)
    except Exception as error:
        # What is wrong with the model, the first step will say.
        logger.debug("tfps: the first step builds %s, as Keras cannot: %s", model.name, error)
        return
    if builds and all(layer.built for layer in model._flatten_layers()):
        with strategy.scope():
            optimizer.build(model.trainable_variables)


@replaces(keras.Layer, "add_weight", "tests/integration/test_scopes.py")
def _add_where_others_are(original: Function, layer: Layer, *args: object, **options: object) -> Variable:
    """Enters the scope of the layer's other variables for one that it gets later (`enable_lora`, `quantize`)."""
    if tf.distribute.has_strategy():
        return original(layer, *args, **options)
    first = next((of_tensorflow(each) for each in layer.variables), None)
    with scope_outside(strategy_of(first)):
        return original(layer, *args, **options)


@replaces(keras.Model, "build", "tests/integration/test_scopes.py")
@replaces(keras.Sequential, "build", "tests/integration/test_scopes.py", "as `Model.build`")
@for_models
def _build_in_scope(original: Function, strategy: BaseStrategy, model: Model, *args: object, **options: object) -> None:
    """Enters the model's scope, also where a first call builds it."""
    with scope_outside(strategy):
        original(model, *args, **options)


@replaces(keras.layers.BatchNormalization, "build", "tests/integration/test_rows.py")
def _build_normalization(original: Function, layer: Layer, *args: object, **options: object) -> None:
    """Marks moving statistics as those of a replica's batch, as documented: also with a mask, where it is no mean."""
    original(layer, *args, **options)
    for statistic in (layer.moving_mean, layer.moving_variance):
        variable = of_tensorflow(statistic)
        if strategy_of(variable) is not None:
            variable.batch_statistic = True


def _described_batch(epochs: Batches) -> Structure:
    """Returns the specs of one replica's batch in `fit`. An optional (a generator's None) becomes None, as in steps."""
    dataset = epochs._distributed_dataset
    spec = dataset.sources[0].element_spec if hasattr(dataset, "sources") else dataset.element_spec
    return keras.tree.map_structure(lambda each: None if isinstance(each, tf.OptionalSpec) else each, spec)


def _check_stateful(strategy: BaseStrategy, model: Model) -> None:
    replicas = strategy.extended._num_replicas_in_sync
    for layer in model._flatten_layers() if replicas > 1 and strategy.extended.policy.together else ():
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            size = keras.tree.flatten(layer.states)[0].shape[0] if layer.built else None
            parts = "its part" if size is None else f"{size / replicas:.3g} of {size} rows"
            raise UnsupportedError(
                f"layer {layer.name!r} of model {model.name!r} is stateful"
                f"{'' if size is None else f' with batch size {size}'}, but {replicas} replicas divide each batch and "
                f"one gets {parts}, so the state would be of other rows; make the layer with stateful=False, or train "
                "and evaluate this model with one worker and one device"
            )


def _has_own_step(model: Model) -> bool:
    return type(model).train_step is not Stepper.train_step or type(model).test_step is not Stepper.test_step


def _is_known(batch: Structure) -> bool:
    """Whether all sizes of `batch`, values or specs, are known, but for the number of rows."""
    return all(
        each.shape[1:].is_fully_defined() for each in keras.tree.flatten(batch) if isinstance(each, tf.TensorSpec)
    )


@replaces(nn_module, "conv", "tests/keras_hooks/test_convolutions.py")
def _read_kernel_before(
    original: Function, inputs: Value, kernel: Value, *args: Argument, **options: Argument
) -> Value:
    """Reads the kernel before a function that XLA compiles, where nothing can wait for it.

    So Keras does with `groups`, and in Conv3D with `channels_first`, as TensorFlow has no kernels for CPUs.
    """
    if isinstance(kernel, keras.Variable) and isinstance(of_tensorflow(kernel), tf.distribute.DistributedValues):
        kernel = tf.convert_to_tensor(kernel)
    return original(inputs, kernel, *args, **options)


_thread = threading.local()  # has the layers to which this thread has added losses


@replaces(keras.Layer, "add_loss", "tests/integration/test_rows.py")
def _note_added_loss(original: Function, layer: Layer, loss: Value) -> None:
    """Notes the layers whose losses each replica must keep while others run.

    In eager mode a worker's replicas run one after the other until each needs a sum over all: the second forward pass
    would overwrite the first replica's losses, which are in the layer, unread.
    """
    original(layer, loss)
    vars(_thread).setdefault("layers", weakref.WeakSet()).add(layer)


@contextlib.contextmanager
def own_losses() -> Iterator[None]:
    """Preserves this thread's added losses while its replica function waits and others run."""
    mine = [(layer, list(layer._losses)) for layer in vars(_thread).get("layers", ())]
    yield
    for layer, losses in mine:
        layer._losses[:] = losses
