"""Draws what makes rows matter: what a row is, the order of rows, what states, losses and metrics make of them.

Added to a case that `draw.py` has drawn, which loses what does not go with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tools.fuzzing.cases import Action, Case, Evaluate, Export, Fit, Loop, Network, OnBatch
from tools.fuzzing.drawing import Drawing
from tools.fuzzing.expressions import OF_BATCHES, OPTIMIZERS, OTHER_LOSSES
from tools.fuzzing.layers import RAGGED, RAGGED_BOXES, SPARSE, STATES, TABLES, VECTORS

_PLAIN_VECTORS = [name for name in VECTORS if name != "metric in a layer"]  # which steps of one's own would update


def with_kinds(case: Case, d: Drawing) -> Case:
    """`case`, half of the time with one of these, now and then from a file or with deterministic operations."""
    if d.rarely("kinds", 2):
        case = _KINDS[d.one(_KINDS)](case, d)
    if d.rarely("start", 12) and not set(TABLES) & set(case.network.layers):
        ways = ["loaded from a file", "weights from a file"]
        case = dataclasses.replace(case, start=d.one(ways[1:] if case.network.style == "subclassed" else ways))
    unseeded = case.place.own_orders or any(fit.input == "tf.data without a seed" for fit in case.fits)
    if d.rarely("op_determinism", 25) and not unseeded:
        case = dataclasses.replace(case, op_determinism=True)
    return case


def _fits(case: Case, change: Callable[[Fit], Fit]) -> Case:
    """With all of its `fit` changed."""
    actions = tuple(change(action) if isinstance(action, Fit) else action for action in case.actions)
    return dataclasses.replace(case, actions=actions)


def _of_rows(case: Case, network: Network, d: Drawing) -> Case:
    """With another network, of any optimizer, whose inputs are sparse, ragged or graphs: no arrays to be sliced."""

    def action_of(action: Action) -> Action:
        if isinstance(action, (OnBatch, Export)):
            return Fit(input="tf.data")
        if isinstance(action, Evaluate):
            return dataclasses.replace(action, input="tf.data")
        if not isinstance(action, Fit):
            return action
        known = ("arrays", "PyDataset", "generator") if network.edges else ("arrays",)
        kind = action.input if action.input.startswith("tf.data") or action.input in known else "tf.data"
        kind = "tf.data" if kind == "arrays" and network.edges else kind
        validation = "no validation" if action.validation == "no validation" else "validation_data of tf.data"
        return dataclasses.replace(
            action,
            input=kind,
            shuffle=action.shuffle and kind == "arrays",
            validation=validation,
            weighted="no" if action.weighted == "class_weight" else action.weighted,
        )

    network = dataclasses.replace(network, task=case.network.task)
    name = d.one(OPTIMIZERS)
    optimizer = dataclasses.replace(case.optimizer, name=name, momentum=name in ("SGD", "RMSprop") and d.rarely("", 2))
    actions = tuple(action_of(action) for action in case.actions)
    return dataclasses.replace(case, network=network, optimizer=optimizer, actions=actions)


def _graphs(case: Case, d: Drawing) -> Case:
    return _of_rows(case, Network(layers=d.some(_PLAIN_VECTORS, 1), edges=True), d)


def _sparse(case: Case, d: Drawing) -> Case:
    return _of_rows(case, Network(input="sparse", layers=(d.one(SPARSE), *d.some(_PLAIN_VECTORS, 1))), d)


def _ragged(case: Case, d: Drawing) -> Case:
    return _of_rows(case, Network(input="ragged", layers=(d.one(RAGGED), *d.some(_PLAIN_VECTORS, 1))), d)


def _boxes(case: Case, d: Drawing) -> Case:
    return _of_rows(case, Network(input="boxes", layers=(d.one(RAGGED_BOXES), *d.some(_PLAIN_VECTORS, 1))), d)


def _unique(case: Case, d: Drawing) -> Case:
    layers = ("unique lookup", d.one(["GlobalAveragePooling1D", "last LSTM"]), *d.some(_PLAIN_VECTORS, 1))
    return _of_rows(case, Network(input="words", layers=layers), d)


def _vectors(case: Case, network: Network) -> Case:
    """With a network that takes vectors; what depends on the inputs of the one before stays."""
    return dataclasses.replace(case, network=dataclasses.replace(network, task=case.network.task))


def _state(case: Case, d: Drawing) -> Case:
    state = d.one(STATES)
    if case.network.per_step:
        return _vectors(case, Network(layers=("Dense", state)))
    network = dataclasses.replace(case.network, layers=(*case.network.layers, state))
    return dataclasses.replace(case, network=network)


def _rows_step(case: Case, d: Drawing) -> Case:
    step = d.one(["loss of each row", "loss of each row returned"])
    network = Network(layers=d.some(_PLAIN_VECTORS, 2))
    plain = dataclasses.replace(
        case,
        network=network,
        step=step,
        loss="default loss",
        reduction="sum_over_batch_size",
        metrics=(),
        weighted_metrics=(),
        steps_per_execution=1,
    )

    def unweighted(fit: Fit) -> Fit:
        validation = "no validation" if fit.validation == "validation_split" else fit.validation
        callbacks = fit.callbacks
        if step == "loss of each row returned":  # no number that callbacks could go by, or write to a file
            validation, callbacks = "no validation", ()
        return dataclasses.replace(fit, weighted="no", validation=validation, callbacks=callbacks)

    return _fits(plain, unweighted)


def _metric(case: Case, d: Drawing) -> Case:
    """A metric that is one number for a batch; of targets that are as many as predictions."""
    case = dataclasses.replace(case, metrics=(*case.metrics, d.one(OF_BATCHES)))
    if case.network.task != "classes":
        return case
    network = dataclasses.replace(case.network, task="binary")
    metrics = tuple(name for name in case.metrics if name in OF_BATCHES)
    plain = dataclasses.replace(
        case, network=network, loss="default loss", metrics=metrics, weighted_metrics=(), step="Keras' train_step"
    )
    return _fits(plain, lambda fit: dataclasses.replace(fit, weighted="no"))


def _outputs(case: Case, d: Drawing) -> Case:
    """Losses of single outputs in evaluation."""
    if case.network.per_step:
        case = _vectors(case, Network(layers=("Dense",)))
    network = dataclasses.replace(
        case.network, second_output=True, other_loss=d.one([name for name in OTHER_LOSSES if name != "mse"])
    )
    case = dataclasses.replace(case, network=network, step="Keras' train_step")

    def fitting(fit: Fit) -> Fit:
        validation = "validation_data" if fit.validation == "validation_split" else fit.validation
        return dataclasses.replace(
            fit, weighted="no" if fit.weighted == "class_weight" else fit.weighted, validation=validation
        )

    actions = tuple(Fit() if isinstance(action, Loop) else action for action in _fits(case, fitting).actions)
    return dataclasses.replace(case, actions=(*actions, Evaluate()))


def _again(case: Case, d: Drawing) -> Case:
    """`fit` twice on one generator that does not end."""
    batches = -(-case.rows // case.batch)
    return dataclasses.replace(case, actions=(*case.actions, Fit(input="generator", steps=batches, again=True)))


def _unordered(case: Case, d: Drawing) -> Case:
    """Parallel reads; whose epochs have all rows once, as the sum of targets shows."""
    kind = d.one(["tf.data unordered map", "tf.data unordered interleave"])
    if case.step == "Keras' train_step" and "Rows" not in (*case.metrics, *case.weighted_metrics):
        case = dataclasses.replace(case, metrics=(*case.metrics, "Rows"))
    return dataclasses.replace(case, actions=(*case.actions, Fit(input=kind, epochs=d.number(1, 2))))


_KINDS: dict[str, Callable[[Case, Drawing], Case]] = {
    "edges": _graphs,
    "sparse": _sparse,
    "ragged": _ragged,
    "boxes": _boxes,
    "unique lookup": _unique,
    "states": _state,
    "states of other layers": _state,
    "losses of rows": _rows_step,
    "metrics of batches": _metric,
    "losses of outputs": _outputs,
    "again": _again,
    "unordered": _unordered,
}
