"""Draws cases: only programs that plain Keras accepts, without the features that are named.

By plain random numbers: hypothesis draws many cases that are nearly alike, which pays where an attempt takes a moment.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection

from tools.fuzzing.cases import (
    Action,
    Assign,
    Case,
    Evaluate,
    Export,
    Fit,
    Loop,
    Network,
    OnBatch,
    Optimizer,
    Place,
    Predict,
    Recompile,
    Resume,
    Save,
    features,
)
from tools.fuzzing.drawing import Drawing
from tools.fuzzing.expressions import (
    CLIPPING,
    LOSSES,
    NOT_OF_ROWS,
    OF_VECTORS,
    OPTIMIZERS,
    OTHER_LOSSES,
    SCHEDULES,
    WITHOUT_REDUCTION,
)
from tools.fuzzing.kinds import with_kinds
from tools.fuzzing.layers import EMBEDDINGS, IMAGES, SEQUENCES, TABLES, VECTORS

_METRICS = {
    "regression": ["mae", "RootMeanSquaredError", "R2Score", "CosineSimilarity", "Rows"],
    "binary": ["BinaryAccuracy", "AUC", "Precision", "F1Score"],
    "classes": ["accuracy", "TopK", "SparseCategoricalCrossentropy", "MeanIoU"],
}
COMPRESSION = ("bfloat16", "float16", "int8", "topk:0.1", "onebit", "int8,*/bias=none")
_OF_ROWS = {"R2Score", "F1Score", "MeanIoU"}  # metrics that take one output per row


def draw(
    seed: str,
    workers: tuple[int, ...] = (1, 2, 3),
    without: Collection[str] = (),
    compressed: int = 6,
    compiled: int = 4,
) -> Case:
    """The case of `seed` for some of these numbers of workers; no feature, nor "a + b" of several, is in `without`.

    Once in `compressed` times a case with pservers compresses, and once in `compiled` XLA compiles one of one device.
    """
    numbers, apart = random.Random(seed), random.Random(f"{seed} compression")  # whose cases stay what they are
    rows = Drawing(random.Random(f"{seed} tables"), without)
    kinds, xla = (Drawing(random.Random(f"{seed} {name}"), without) for name in ("kinds", "xla"))
    while True:
        case = _drawn(Drawing(numbers, without), workers)
        compression = _compression(Drawing(apart, without), compressed) if case.place.pservers else "no compression"
        case = _with_table(
            dataclasses.replace(case, place=dataclasses.replace(case.place, compression=compression)), rows
        )
        case = with_kinds(case, kinds)
        compiles = xla.rarely("jit_compile", compiled) and case.place.devices == 1
        case = dataclasses.replace(case, jit_compile=compiles)
        if usable(case, without):
            return case


def _with_table(case: Case, d: Drawing) -> Case:
    """Now and then, a table in the place of an embedding."""
    name, layers = d.one(TABLES), case.network.layers
    refused = "Export" in case.actions_of or case.optimizer.ema
    if not d.rarely(name, 2) or "Embedding" not in layers or refused:
        return case
    layers = tuple(name if layer == "Embedding" else layer for layer in layers)
    return dataclasses.replace(case, network=dataclasses.replace(case.network, layers=layers))


def _compression(d: Drawing, of: int) -> str:
    return d.one(COMPRESSION) if d.rarely("compression", of) else "no compression"


def _drawn(d: Drawing, workers: tuple[int, ...]) -> Case:
    place = _place(d, workers)
    network = _network(d)
    optimizer = _optimizer(d)
    step = "Keras' train_step"
    if network.style == "functional" and not network.second_output and d.rarely("own step", 5):
        step = d.one(
            ["own metrics", "own mean", "guide"] if network.task == "regression" else ["Keras' train_step", "guide"]
        )
        if step != "Keras' train_step" and "metric in a layer" in network.layers:
            step = "Keras' train_step"  # those of one's own would give it what it does not take
    loss = d.one(
        name for task, name in LOSSES if task == network.task and not (network.per_step and name in OF_VECTORS)
    )
    batch, rows, validation_rows = _sizes(d, place.workers * place.devices)
    case = Case(
        seed=d.number(1, 99),
        place=place,
        network=network,
        optimizer=optimizer,
        loss=loss,
        reduction="sum" if loss not in WITHOUT_REDUCTION and d.rarely("sum", 8) else "sum_over_batch_size",
        metrics=_metrics(d, network, 3),
        weighted_metrics=_metrics(d, network, 1),
        steps_per_execution=d.number(2, 4) if place.devices == 1 and d.rarely("steps_per_execution", 6) else 1,
        eager=d.rarely("eager", 10),
        reordered=d.rarely("reordered", 3),
        step=step,
        rows=rows,
        batch=batch,
        validation_rows=validation_rows,
    )
    actions: list[Action] = [_first(d, case)]
    actions += [_action(d, case) for _ in range(d.number(0, 2))]
    return dataclasses.replace(case, actions=tuple(actions), eager=case.eager and case.steps_per_execution == 1)


def usable(case: Case, without: Collection[str]) -> bool:
    """Whether no feature of `case`, and no "a + b" of several, is in `without`."""
    found = features(case)
    return not any(set(known.split(" + ")) <= found for known in without)


def _place(d: Drawing, workers: tuple[int, ...]) -> Place:
    count = d.one(workers)
    devices = 2 if d.rarely("several devices", 4) else 1
    pservers = d.number(1, 2) if count > 1 or d.rarely("gRPC", 2) else 0
    return Place(
        workers=count,
        devices=devices,
        pservers=pservers,
        slices=d.one(["auto", "small slices"]),
        staging=d.one([2, 0, 3]) if d.rarely("staging") else 2,
        deterministic=d.rarely("deterministic"),
        sockets=bool(pservers) and d.rarely("sockets"),
        own_folders=count > 1 and d.rarely("own_folders"),
        own_initial_values=count > 1 and d.rarely("own_initial_values"),
        own_orders=count > 1 and d.rarely("own_orders", 6),
        goes_on=count > 1 and d.rarely("goes_on", 3),
    )


def _sizes(d: Drawing, replicas: int) -> tuple[int, int, int]:
    """Batch size, rows, rows of the validation data."""
    if d.rarely("rows that do not divide", 2):
        batch = d.number(1 if not d.rarely("small batches") else max(replicas, 1), 9)
        return batch, d.number(batch, 30), d.number(1, 20)
    if replicas > 1 and d.rarely("replica without rows", 3):
        batch = d.number(replicas, 9)
        return batch, batch * d.number(1, 3) + d.number(1, replicas - 1), d.number(1, 20)
    batch = replicas * d.number(1, max(12 // replicas, 1))
    last = replicas * d.number(0, 2) if d.rarely("smaller last batch", 3) else 0
    return batch, batch * d.number(1, 4) + last, batch * d.number(1, 2)


def _network(d: Drawing) -> Network:
    kind = d.one(["features", "features", "features", "words", "words", "sequence", "image"])  # quick ones more often
    layers: list[str] = []
    if kind == "words":
        layers.append(d.one(EMBEDDINGS))
    if kind in ("words", "sequence"):
        masked = "Embedding masked" in layers
        flat = "GlobalAveragePooling1D", "GlobalMaxPooling1D", "last LSTM"
        layers += d.some([name for name in SEQUENCES if name not in flat], 1)
        per_step = d.rarely("per_step", 4)
        if not per_step:
            layers.append(d.one(flat if not masked else ("GlobalAveragePooling1D", "last LSTM")))
    else:
        per_step = False
        if kind == "image":
            layers += d.some([name for name in IMAGES if name != "GlobalAveragePooling2D"], 1)
            layers.append("GlobalAveragePooling2D")
    if not per_step:
        layers += d.some(VECTORS, 2)
    second_output = not per_step and d.rarely("second_output", 6)
    return Network(
        input=kind,
        layers=tuple(layers),
        task=d.one(["regression", "binary", "classes"]),
        second_input=not per_step and d.rarely("second_input", 6),
        second_output=second_output,
        other_loss=d.one(OTHER_LOSSES) if second_output else "mse",
        per_step=per_step,
        style="subclassed" if d.rarely("subclassed", 8) else "functional",
    )


def _optimizer(d: Drawing) -> Optimizer:
    name = d.one(["SGD", "Adam"]) if d.rarely("common optimizer", 2) else d.one(OPTIMIZERS)
    return Optimizer(
        name=name,
        momentum=name in ("SGD", "RMSprop") and d.rarely("momentum", 2),
        clipping=d.one(CLIPPING) if d.rarely("clipping") else "no clipping",
        ema=d.number(2, 4) if d.rarely("ema", 5) else 0,
        weight_decay=d.rarely("weight_decay"),
        accumulation=d.number(2, 3) if d.rarely("accumulation", 5) else 1,
        schedule=d.one(SCHEDULES) if d.rarely("schedule") else "constant",
        loss_scaling=d.rarely("loss_scaling", 8),
    )


def _metrics(d: Drawing, network: Network, most: int) -> tuple[str, ...]:
    return d.some([m for m in _METRICS[network.task] if not (network.per_step and m in _OF_ROWS)], most)


def _first(d: Drawing, case: Case) -> Action:
    """Something that trains."""
    kinds = ["Fit", "Fit", "Fit"]
    if not case.network.second_output and case.loss not in NOT_OF_ROWS:
        kinds.append("Loop")
    whole = case.batch % case.place.workers == 0 and case.batch <= case.rows
    if case.place.devices == 1 and whole:
        kinds.append("OnBatch")
    if not any(layer in case.network.layers for layer in ("Dropout", "GaussianNoise")):
        kinds.append("Resume")
    kind = d.one(kinds)
    if kind == "Loop":
        how = ["step in a function", "epoch in a function", "eager steps", "steps that reduce nothing"]
        return Loop(d.number(1, 2), d.one(how))
    if kind == "OnBatch":
        return OnBatch(d.number(1, 3))
    return Resume(d.number(1, 2)) if kind == "Resume" else _fit(d, case)


def _action(d: Drawing, case: Case) -> Action:
    kind = d.one(["train", "Evaluate", "Predict", "Save", "Recompile", "Assign", "Export"])
    if kind == "Export" and not case.place.own_folders:  # rank 0 writes; the others read what it has written
        return Export()
    if kind == "Evaluate":
        return Evaluate(d.one(["arrays", "tf.data", "PyDataset"]), not case.network.per_step and d.rarely("weighted"))
    if kind == "Predict":
        return Predict(d.one(["arrays", "tf.data"]))
    if kind == "Save":
        ways = ["model.keras", "weights", "weights into a new model"]
        return Save(d.one(ways[1:] if case.network.style == "subclassed" else ways))
    if kind == "Recompile":
        return Recompile(d.number(0, 2), d.one(["in the scope", "outside"]))
    if kind == "Assign":
        return Assign(d.one(["weights", "learning rate"] if case.optimizer.schedule == "constant" else ["weights"]))
    return _first(d, case)


def _fit(d: Drawing, case: Case) -> Fit:
    kind = d.one(["arrays", "tensors", "tf.data", "tf.data shuffled", "tf.data reshuffled", "PyDataset", "generator"])
    if d.rarely("tf.data, number of batches unknown", 10):
        kind = "tf.data, number of batches unknown"
    if d.rarely("tf.data without a seed", 12):
        kind = "tf.data without a seed"
    arrays = kind in ("arrays", "tensors")
    batches = -(-case.rows // case.batch)
    weightings = ["no", "no"] if case.network.per_step else ["no", "no", "sample_weight"]
    plain = case.network.task == "classes" and not case.network.second_output and not case.network.per_step
    if plain and kind in ("arrays", "tf.data"):
        weightings.append("class_weight")
    validations = ["no validation", "validation_data", "validation_data of tf.data"]
    if not case.network.per_step:
        validations.append("weighted validation_data")
    if kind == "arrays" and case.rows >= 8 and not case.network.second_output and not case.network.second_input:
        validations.append("validation_split")
    validation = d.one(validations)
    steps = d.number(0, batches) if d.rarely("steps") and validation != "validation_split" else 0
    callbacks = ["EarlyStopping", "ModelCheckpoint", "ModelCheckpoint best", "checkpoint every 2 batches"]
    callbacks += ["BackupAndRestore", "TerminateOnNaN", "CSVLogger", "LambdaCallback", "TensorBoard"]
    callbacks += ["EarlyStopping by a baseline", "ModelCheckpoint from a threshold"]
    if case.optimizer.schedule == "constant":
        callbacks += ["ReduceLROnPlateau", "LearningRateScheduler"]
    if case.optimizer.ema:
        callbacks += [d.one(["SwapEMAWeights", "SwapEMAWeights on epochs"])]
    if case.network.style == "subclassed":
        callbacks.remove("ModelCheckpoint")
    shuffle = arrays and d.rarely("shuffle", 2)
    fit = Fit(
        epochs=d.number(1, 3),
        input=kind,
        shuffle=shuffle,
        weighted=d.one(weightings),
        validation=validation,
        steps=batches if kind == "generator" else steps,
        callbacks=d.some(callbacks, 2),
        interrupted=d.number(1, 3) if d.rarely("interrupted", 10) else 0,
    )
    if kind == "tf.data without a seed" or (shuffle and case.place.own_orders):  # whose epochs have all rows once
        return dataclasses.replace(fit, steps=0, callbacks=(), interrupted=0)
    return fit
