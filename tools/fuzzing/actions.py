"""Writes what a program does with its model, one action of the case after the other."""

from __future__ import annotations

from collections.abc import Iterator

from tools.fuzzing.cases import (
    SPLIT,
    Action,
    Assign,
    Case,
    Evaluate,
    Export,
    Fit,
    Loop,
    OnBatch,
    Predict,
    Recompile,
    Resume,
    Save,
)
from tools.fuzzing.expressions import CALLBACKS, LOSSES, OF_BATCHES, OTHER_LOSSES, loss_of, optimizer
from tools.fuzzing.layers import CLASSES


def action_lines(case: Case, action: Action, number: int) -> Iterator[str]:
    """What it is in a program, line by line, for a function's body; `number` is its place in the case."""
    name = f"{number}"
    yield f"# {number}: {action!r}"
    if isinstance(action, Fit):
        if action.again:
            yield f"source{number} = {_source(case, action, number)}"
            yield f"model.fit({_fit(case, action, number, '[]')})"
        if action.interrupted:
            yield "with contextlib.suppress(KeyboardInterrupt):"
            interrupt = f"Interrupt({action.interrupted})"
            yield f"    model.fit({_fit(case, action, number, _callbacks(case, action, number, interrupt))})"
        yield f"fit = model.fit({_fit(case, action, number, _callbacks(case, action, number))})"
        yield f'job.note("{name}", model, fit)'
        if any(callback.lower().find("checkpoint") >= 0 for callback in action.callbacks):
            yield f'job.note_files("{name}")'
        if "CSVLogger" in action.callbacks:
            yield f'job.note_csv("{name}")'
    elif isinstance(action, Evaluate):
        arrays = "held_x, held_y, held_weights" if action.weighted else "held_x, held_y"
        if action.input == "arrays" and not case.network.edges:
            weights = ", sample_weight=held_weights" if action.weighted else ""
            given = f"held_x, held_y{weights}, batch_size={case.batch}"
        else:
            given = _input(case, action.input, arrays)
        yield f"result = model.evaluate({given}, return_dict=True, verbose=0)"
        yield f'job.found.update({{f"evaluated/{name}/{{key}}": np.asarray(value) for key, value in result.items()}})'
    elif isinstance(action, Predict):
        given = f"held_x, batch_size={case.batch}"
        if action.input != "arrays" or case.network.edges:
            given = _input(case, action.input, "held_x")
        yield f"predictions = tf.nest.flatten(model.predict({given}, verbose=0))"
        yield (
            f'job.found.update({{f"predictions/{name}/{{index}}": value for index, value in enumerate(predictions)}})'
        )
    elif isinstance(action, Save):
        yield from _save(case, action, name)
    elif isinstance(action, Recompile):
        if action.frozen:
            yield f"for layer in [layer for layer in model.layers if layer.weights][:{action.frozen}]:"
            yield "    layer.trainable = False"
        if action.where == "in the scope":
            yield "with job.scope():"
            yield "    compiled(job, model)"
        else:
            yield "compiled(job, model)"
    elif isinstance(action, Loop):
        loss = loss_of(case, "none")
        dataset = _input(case, "tf.data", "x, y")
        made = f"lambda: {optimizer(case.optimizer)}"
        yield f'losses = loop(job, model, {made}, {loss}, {dataset}, {case.batch}, {action.epochs}, "{action.how}")'
        yield f'job.found["losses/{name}"] = losses'
        yield f'job.note("{name}", model)'
    elif isinstance(action, Assign):
        if action.what == "learning rate":
            yield "model.optimizer.learning_rate = 0.02"
        else:
            yield "model.set_weights([0.9 * weight for weight in model.get_weights()])"
    elif isinstance(action, OnBatch):
        yield from _on_batch(case, action, name)
    elif isinstance(action, Resume):
        yield from _resume(case, action, number)
    elif isinstance(action, Export):
        yield f'model.export(job.path("exported{name}"), verbose=False)'
        dtype = ', dtype="int32"' if case.network.input == "words" and not case.network.second_input else ""
        inputs = f"tf.nest.map_structure(lambda a: tf.constant(a{dtype}), held_x)"
        if case.network.input == "words" and case.network.second_input:
            inputs = '{"first": tf.constant(held_x["first"], "int32"), "second": tf.constant(held_x["second"])}'
        yield f'job.note_exported("{name}", job.path("exported{name}"), {inputs})'


def _input(case: Case, kind: str, arrays: str, seed: int = 0) -> str:
    """The expression of a dataset of `arrays`, names with commas between them; where there are graphs, of any kind."""
    dataset = f"tf.data.Dataset.from_tensor_slices(({arrays}))"
    if "," not in arrays:
        dataset = f"tf.data.Dataset.from_tensor_slices({arrays})"
    batches, given = f".batch({case.batch})", f"Batches({case.batch}, {arrays})"
    if case.network.edges:
        batches, given = f"{batches}.map(as_graph)", f"Graph{given}"
    return {
        "arrays": f"{dataset}{batches}",
        "tf.data": f"{dataset}{batches}",
        "tf.data shuffled": f"{dataset}.shuffle(50, seed={seed}, reshuffle_each_iteration=False){batches}",
        "tf.data reshuffled": f"{dataset}.shuffle(50, seed={seed}){batches}",
        "tf.data without a seed": f"{dataset}.shuffle(50){batches}",
        "tf.data, number of batches unknown": f"without_cardinality({dataset}{batches})",
        "tf.data unordered map": f"unordered_map({dataset}){batches}",
        "tf.data unordered interleave": f"unordered_interleave({dataset}){batches}",
        "PyDataset": given,
        "generator": f"endless({given})",
    }[kind]


def _source(case: Case, fit: Fit, number: int) -> str:
    return _input(case, fit.input, "x, y, weights" if fit.weighted == "sample_weight" else "x, y", case.seed + number)


def _fit(case: Case, fit: Fit, number: int, callbacks: str) -> str:
    """The arguments of `fit`."""
    weighted = fit.weighted == "sample_weight"
    options = []
    if fit.input in ("arrays", "tensors") and not case.network.edges:
        arrays = "x, y"
        if fit.input == "tensors":
            arrays = "*tf.nest.map_structure(tf.constant, (x, y))"
        options = [arrays, *(["sample_weight=weights"] if weighted else []), f"batch_size={case.batch}"]
    else:
        source = _source(case, fit, number)
        options = [f"source{number}" if fit.again else source]
    options += [f"epochs={fit.epochs}", f"shuffle={fit.shuffle}"]
    if fit.weighted == "class_weight":
        options.append("class_weight={0: 0.5, 1: 1.0, 2: 2.0, 3: 1.5}")
    if fit.validation == "validation_split":
        options.append(f"validation_split={SPLIT}")
    elif fit.validation != "no validation":
        options.append(
            {
                "validation_data": f"validation_data=(held_x, held_y), validation_batch_size={case.batch}",
                "weighted validation_data": (
                    f"validation_data=(held_x, held_y, held_weights), validation_batch_size={case.batch}"
                ),
                "validation_data of tf.data": f"validation_data={_input(case, 'tf.data', 'held_x, held_y')}",
            }[fit.validation]
        )
    if fit.steps:
        options.append(f"steps_per_epoch={fit.steps}")
    return ", ".join([*options, f"callbacks={callbacks}", "verbose=0"])


def _callbacks(case: Case, fit: Fit, number: int, more: str = "") -> str:
    monitor = "loss" if fit.validation == "no validation" else "val_loss"
    names = [CALLBACKS[name].format(monitor=monitor, number=number) for name in fit.callbacks]
    return f"[{', '.join([*names, *([more] if more else []), f'Seen(job, {number})'])}]"


def _on_batch(case: Case, action: OnBatch, name: str) -> Iterator[str]:
    part = case.batch // case.place.workers
    yield f"for step in range({action.steps}):"
    yield f"    start = step * {case.batch} % max({case.rows} - {case.batch} + 1, 1)"
    yield f"    part = slice(start, start + {case.batch})"
    yield "    if job.workers > 1:"
    yield f"        part = slice(start + job.rank * {part}, start + (job.rank + 1) * {part})"
    yield "    model.train_on_batch(*tf.nest.map_structure(lambda a: a[part], (x, y)))"
    yield f'job.note("{name}", model)'


def custom_objects(case: Case) -> str:
    """What `load_model` is told of the classes and functions of the program's own: its last argument, or nothing."""
    own = [CLASSES[layer] for layer in case.network.layers if layer in CLASSES]
    own += ["Neighbours"] * case.network.edges
    own += ["Guided"] * (case.step != "Keras' train_step")
    own += ["Rows"] * ("Rows" in (*case.metrics, *case.weighted_metrics))
    own += [OF_BATCHES[name] for name in case.metrics if name in OF_BATCHES]
    losses = LOSSES[case.network.task, case.loss], OTHER_LOSSES[case.network.other_loss]
    own += [loss.partition("(")[0] for loss in losses if not loss.startswith(("keras", '"'))]
    objects = ", ".join(f"{each!r}: {each}" for each in dict.fromkeys(own))
    return f", custom_objects={{{objects}}}" if objects else ""


def _save(case: Case, action: Save, name: str) -> Iterator[str]:
    if action.what == "model.keras":
        yield f'model.save(job.path("{name}-saved.keras"))'
        yield f'job.note_files("{name}")'
        yield "with job.scope():"
        yield f'    model = keras.models.load_model(job.path("{name}-saved.keras"){custom_objects(case)})'
    else:
        yield f'model.save_weights(job.path("{name}-saved.weights.h5"))'
        yield f'job.note_files("{name}")'
        if action.what == "weights into a new model":
            yield "with job.scope():"
            yield "    model = compiled(job, build())"
        else:
            yield "model.set_weights([0.5 * weight for weight in model.get_weights()])"
        yield f'model.load_weights(job.path("{name}-saved.weights.h5"))'
    yield f'job.note("{name}", model)'


def _resume(case: Case, action: Resume, number: int) -> Iterator[str]:
    backup = f'keras.callbacks.BackupAndRestore(job.path("backup{number}"))'
    fit = Fit(epochs=action.epochs)
    arguments = _fit(case, fit, number, f"[{backup}, Stop({action.stop})]")
    yield "with contextlib.suppress(RuntimeError):"
    yield f"    model.fit({arguments})"
    yield "with job.scope():"
    yield "    model = compiled(job, build())"
    yield f"fit = model.fit({_fit(case, fit, number, f'[{backup}]')})"
    yield f'job.note("{number}", model, fit)'
