"""Writes a case as a complete Keras program, which is what runs under tfps and under plain Keras alike."""

from __future__ import annotations

from collections.abc import Iterator

from tools.fuzzing import prelude
from tools.fuzzing.cases import (
    SPLIT,
    Action,
    Assign,
    Case,
    Evaluate,
    Fit,
    Loop,
    OnBatch,
    Optimizer,
    Predict,
    Recompile,
    Resume,
    Save,
)
from tools.fuzzing.layers import EMBEDDINGS, IMAGES, SEQUENCES, VECTORS

SHAPES = {"features": (3,), "image": (6, 6, 2), "words": (5,), "sequence": (5, 4)}

# Epsilons are large: where a gradient is next to nothing, what is rounded would decide the direction of an update.
OPTIMIZERS = {
    "SGD": "SGD({rate}{options})",
    "Adam": "Adam({rate}, epsilon=0.01{options})",
    "AdamW": "AdamW({rate}, epsilon=0.01{options})",
    "RMSprop": "RMSprop({rate}, epsilon=0.01{options})",
    "Adagrad": "Adagrad({rate}, epsilon=0.01{options})",
    "Adadelta": "Adadelta({rate}, epsilon=0.01{options})",
    "Adamax": "Adamax({rate}, epsilon=0.01{options})",
    "Nadam": "Nadam({rate}, epsilon=0.01{options})",
    "Ftrl": "Ftrl({rate}{options})",
    "Lamb": "Lamb({rate}, epsilon=0.01{options})",
    "Lion": "Lion({rate}{options})",
    "Adafactor": "Adafactor({rate}{options})",
    "Muon": "Muon({rate}{options})",
    "ScheduleFreeAdamW": "ScheduleFreeAdamW({rate}, epsilon=0.01{options})",
}
RATES = {"SGD": 0.05, "Adadelta": 0.5, "Lion": 0.001}
SCHEDULES = {
    "ExponentialDecay": "keras.optimizers.schedules.ExponentialDecay({rate}, 2, 0.7)",
    "CosineDecay": "keras.optimizers.schedules.CosineDecay({rate}, 6)",
    "PiecewiseConstantDecay": "keras.optimizers.schedules.PiecewiseConstantDecay([2, 4], [{rate}, {rate} / 2, {rate}])",
}
CLIPPING = {"clipnorm": "clipnorm=0.2", "clipvalue": "clipvalue=0.05", "global_clipnorm": "global_clipnorm=0.3"}
LOSSES = {
    ("regression", "default loss"): "MeanSquaredError",
    ("regression", "MeanAbsoluteError"): "MeanAbsoluteError",
    ("regression", "Huber"): "Huber",
    ("regression", "LogCosh"): "LogCosh",
    ("binary", "default loss"): "BinaryCrossentropy",
    ("binary", "BinaryFocalCrossentropy"): "BinaryFocalCrossentropy",
    ("binary", "Hinge"): "Hinge",
    ("classes", "default loss"): "SparseCategoricalCrossentropy",
}
METRICS = {
    "mae": '"mae"',
    "RootMeanSquaredError": "keras.metrics.RootMeanSquaredError()",
    "R2Score": "keras.metrics.R2Score()",
    "CosineSimilarity": "keras.metrics.CosineSimilarity()",
    "BinaryAccuracy": "keras.metrics.BinaryAccuracy()",
    "AUC": "keras.metrics.AUC(num_thresholds=20)",
    "Precision": "keras.metrics.Precision()",
    "F1Score": "keras.metrics.F1Score(threshold=0.5)",
    "accuracy": '"accuracy"',
    "TopK": "keras.metrics.SparseTopKCategoricalAccuracy(2)",
    "SparseCategoricalCrossentropy": "keras.metrics.SparseCategoricalCrossentropy(from_logits=True)",
    "MeanIoU": "keras.metrics.MeanIoU(num_classes=4, sparse_y_pred=False)",
}
CALLBACKS = {
    "EarlyStopping": (
        'keras.callbacks.EarlyStopping("{monitor}", min_delta=0.003, patience=1, restore_best_weights=True)'
    ),
    "ReduceLROnPlateau": (
        'keras.callbacks.ReduceLROnPlateau("{monitor}", min_delta=0.003, patience=0, factor=0.5, min_lr=0.001)'
    ),
    "LearningRateScheduler": "keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7)",
    "ModelCheckpoint": 'keras.callbacks.ModelCheckpoint(job.path("{number}-epoch{{epoch}}.keras"))',
    "ModelCheckpoint best": (
        'keras.callbacks.ModelCheckpoint(job.path("{number}-best.weights.h5"), monitor="{monitor}", '
        "save_best_only=True, save_weights_only=True)"
    ),
    "checkpoint every 2 batches": (
        'keras.callbacks.ModelCheckpoint(job.path("{number}-batch{{batch}}.weights.h5"), save_freq=2, '
        "save_weights_only=True)"
    ),
    "BackupAndRestore": 'keras.callbacks.BackupAndRestore(job.path("backup{number}"))',
    "SwapEMAWeights": "keras.callbacks.SwapEMAWeights()",
    "TerminateOnNaN": "keras.callbacks.TerminateOnNaN()",
}


def program(case: Case, reference: str = "plain") -> str:
    """The text of a module with `main(strategy, folder)`, `strategy()` and `reference()`, which runs by itself too."""
    parts = [f'"""{_how_to_run(case)}"""\n\n', prelude.IMPORTS, prelude.HELPERS, *_classes(case)]
    parts += [_data(case), _model(case), _main(case), _strategies(case, reference), prelude.MAIN]
    return "".join(parts)


def _how_to_run(case: Case) -> str:
    run = f"tfps_launch --workers {case.place.workers} --pservers {case.place.pservers} PROGRAM"
    if not case.place.pservers:
        run = "python PROGRAM"
    return (
        f"Compares tfps with plain Keras. Run it by\n\n    {run}\n\n"
        f"-v also prints what is equal. The case:\n\n{case!r}\n"
    )


def _classes(case: Case) -> Iterator[str]:
    inputs = {getattr(action, "input", "") for action in case.actions}
    if inputs - {"arrays", "tf.data", "tf.data shuffled", "tf.data reshuffled", "tensors", ""}:
        yield prelude.BATCHES
    if "AddLoss" in case.network.layers:
        yield prelude.ADD_LOSS
    if case.network.style == "subclassed":
        yield prelude.SUBCLASSED
    if case.step != "Keras' train_step":
        yield prelude.GUIDE if case.step == "guide" else prelude.OWN_METRICS
    if "Loop" in case.actions_of:
        yield prelude.LOOP
    if any(fit.interrupted for fit in case.fits):
        yield prelude.INTERRUPT
    if "Resume" in case.actions_of:
        yield prelude.STOP


def _data(case: Case) -> str:
    network = case.network
    shape = SHAPES[network.input]
    lines = [
        "",
        "",
        "def data(rows, seed):",
        '    """Inputs, targets and sample weights."""',
        "    random = np.random.default_rng(seed)",
    ]
    if network.input == "words":
        lines.append(f"    x = random.integers(0, 12, (rows, {shape[0]}))")
    else:
        lines.append(f'    x = random.normal(size=(rows, {", ".join(map(str, shape))})).astype("float32")')
    if network.second_input:
        lines.append('    x = {"first": x, "second": random.normal(size=(rows, 2)).astype("float32")}')
    steps = f", {shape[0]}" if network.per_step else ""
    lines.append(
        {
            "regression": f'    y = random.normal(size=(rows{steps}, 2)).astype("float32")',
            "binary": f'    y = random.integers(0, 2, (rows{steps}, 1)).astype("float32")',
            "classes": f"    y = random.integers(0, 4, (rows{steps or ','}))",
        }[network.task]
    )
    if network.second_output:
        lines.append('    y = {"main": y, "other": random.normal(size=(rows, 2)).astype("float32")}')
    lines += ['    return x, y, random.uniform(0.5, 2.0, rows).astype("float32")', ""]
    return "\n".join(lines)


def _model(case: Case) -> str:
    network = case.network
    lines = ["", "", "def build():", '    """The model, not compiled."""']
    dtype = ', dtype="int32"' if network.input == "words" else ""
    lines.append(f'    inputs = h = keras.Input({SHAPES[network.input]}{dtype}, name="first")')
    rank = {"features": 1, "image": 3, "words": 0, "sequence": 2}[network.input]
    tables = {0: EMBEDDINGS, 1: VECTORS, 2: SEQUENCES, 3: IMAGES}
    for number, layer in enumerate(network.layers):
        text, rank = tables[rank][layer]
        lines += [f"    {line.replace('NUMBER', str(number))}" for line in text.splitlines()]
    if rank != 1 and not network.per_step:
        lines.append("    h = keras.layers.Flatten()(h)")
    if network.second_input:
        lines += [
            '    second = keras.Input((2,), name="second")',
            '    h = keras.layers.Concatenate()([h, keras.layers.Dense(3, activation="tanh")(second)])',
            '    inputs = {"first": inputs, "second": second}',
        ]
    head = {"regression": "Dense(2", "binary": 'Dense(1, activation="sigmoid"', "classes": "Dense(4"}[network.task]
    lines.append(f'    outputs = keras.layers.{head}, name="main")(h)')
    if network.second_output:
        lines.append('    outputs = {"main": outputs, "other": keras.layers.Dense(2, name="other")(h)}')
    kind = "Guided" if case.step != "Keras' train_step" else "keras.Model"
    if network.style == "subclassed":
        lines.append("    model = Subclassed(keras.Model(inputs, outputs))")
        lines.append("    model(tf.nest.map_structure(lambda a: a[:1], data(1, 0)[0]))")
        lines.append("    return model")
    else:
        lines.append(f"    return {kind}(inputs, outputs)")
    lines += ["", "", "def compiled(job, model):", '    """Compiles `model`."""']
    metrics = ", ".join(METRICS[name] for name in case.metrics)
    weighted = ", ".join(METRICS[name] for name in case.weighted_metrics)
    loss = _loss(case)
    if network.second_output:
        loss = f'{{"main": {loss}, "other": "mse"}}, loss_weights={{"main": 1.0, "other": 0.3}}'
        metrics, weighted = (f'{{"main": [{each}]}}' if each else "" for each in (metrics, weighted))
    else:
        metrics, weighted = (f"[{each}]" if each else "" for each in (metrics, weighted))
    options = [f"optimizer={optimizer(case.optimizer)}", f"loss={loss}"]
    if metrics:
        options.append(f"metrics={metrics}")
    if weighted:
        options.append(f"weighted_metrics={weighted}")
    if case.steps_per_execution > 1:
        options.append(f"steps_per_execution={case.steps_per_execution}")
    if case.eager:
        options.append("run_eagerly=True")
    options.append("jit_compile=False")
    lines.append("    model.compile(")
    lines += [f"        {option}," for option in options]
    lines.append("    )")
    if case.optimizer.name == "ScheduleFreeAdamW":
        # Without a strategy Keras builds it while it traces, where what it copies from the weights is lost.
        lines.append("    model.optimizer.build(model.trainable_variables)")
    lines += ["    return model", ""]
    return "\n".join(lines)


def _loss(case: Case, reduction: str = "") -> str:
    options = ["from_logits=True"] if case.network.task == "classes" else []
    reduction = reduction or case.reduction
    if reduction != "sum_over_batch_size":
        options.append(f'reduction="{reduction}"')
    return f"keras.losses.{LOSSES[case.network.task, case.loss]}({', '.join(options)})"


def optimizer(chosen: Optimizer) -> str:
    """The expression that makes it."""
    rate = str(RATES.get(chosen.name, 0.01))
    if chosen.schedule != "constant":
        rate = SCHEDULES[chosen.schedule].format(rate=rate)
    options = []
    if chosen.momentum:
        options.append("momentum=0.8")
    if chosen.clipping != "no clipping":
        options.append(CLIPPING[chosen.clipping])
    if chosen.ema:
        options.append(f"use_ema=True, ema_momentum=0.8, ema_overwrite_frequency={chosen.ema}")
    if chosen.weight_decay:
        options.append("weight_decay=0.01")
    if chosen.accumulation > 1:
        options.append(f"gradient_accumulation_steps={chosen.accumulation}")
    made = OPTIMIZERS[chosen.name].format(rate=rate, options="".join(f", {option}" for option in options))
    text = f"keras.optimizers.{made}"
    if chosen.loss_scaling:
        text = f"keras.optimizers.LossScaleOptimizer({text}, initial_scale=256.0, dynamic_growth_steps=2)"
    return text


def _main(case: Case) -> str:
    lines = [
        "",
        "",
        "def main(strategy, folder):",
        '    """Runs the program; returns what it has found."""',
        "    job = Job(strategy, folder)",
        f'    tf.config.optimizer.set_experimental_options({{"arithmetic_optimization": {case.reordered}}})',
        f"    keras.utils.set_random_seed({case.seed}{' + job.rank' if case.place.own_initial_values else ''})",
        "    with job.scope():",
        "        model = compiled(job, build())",
        f"    keras.utils.set_random_seed({case.seed})",
        f"    x, y, weights = data({case.rows}, 1)",
        f"    held_x, held_y, held_weights = data({case.validation_rows}, 2)",
    ]
    if not case.place.own_initial_values:
        lines.append('    job.note("start", model)')
    for number, action in enumerate(case.actions):
        lines += [f"    {line}" for line in _action(case, action, number)]
    lines += ["    return job.found", ""]
    return "\n".join(lines)


def _input(kind: str, batch: int, arrays: str, seed: int) -> str:
    """The expression of a dataset of `arrays`, names with commas between them."""
    dataset = f"tf.data.Dataset.from_tensor_slices(({arrays}))"
    if "," not in arrays:
        dataset = f"tf.data.Dataset.from_tensor_slices({arrays})"
    return {
        "tf.data": f"{dataset}.batch({batch})",
        "tf.data shuffled": f"{dataset}.shuffle(50, seed={seed}, reshuffle_each_iteration=False).batch({batch})",
        "tf.data reshuffled": f"{dataset}.shuffle(50, seed={seed}).batch({batch})",
        "tf.data, number of batches unknown": f"without_cardinality({dataset}.batch({batch}))",
        "PyDataset": f"Batches({batch}, {arrays})",
        "generator": f"endless(Batches({batch}, {arrays}))",
    }[kind]


def _fit(case: Case, fit: Fit, number: int, callbacks: str) -> str:
    """The arguments of `fit`."""
    weighted = fit.weighted == "sample_weight"
    options = []
    if fit.input in ("arrays", "tensors"):
        arrays = "x, y"
        if fit.input == "tensors":
            arrays = "*tf.nest.map_structure(tf.constant, (x, y))"
        options = [arrays, *(["sample_weight=weights"] if weighted else []), f"batch_size={case.batch}"]
    else:
        options = [_input(fit.input, case.batch, "x, y, weights" if weighted else "x, y", case.seed + number)]
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
                "validation_data of tf.data": f"validation_data={_input('tf.data', case.batch, 'held_x, held_y', 0)}",
            }[fit.validation]
        )
    if fit.steps:
        options.append(f"steps_per_epoch={fit.steps}")
    return ", ".join([*options, f"callbacks={callbacks}", "verbose=0"])


def _callbacks(case: Case, fit: Fit, number: int, more: str = "") -> str:
    monitor = "loss" if fit.validation == "no validation" else "val_loss"
    names = [CALLBACKS[name].format(monitor=monitor, number=number) for name in fit.callbacks]
    return f"[{', '.join([*names, *([more] if more else []), f'Seen(job, {number})'])}]"


def _action(case: Case, action: Action, number: int) -> Iterator[str]:
    name = f"{number}"
    yield f"# {number}: {action!r}"
    if isinstance(action, Fit):
        if action.interrupted:
            yield "with contextlib.suppress(KeyboardInterrupt):"
            interrupt = f"Interrupt({action.interrupted})"
            yield f"    model.fit({_fit(case, action, number, _callbacks(case, action, number, interrupt))})"
        yield f"fit = model.fit({_fit(case, action, number, _callbacks(case, action, number))})"
        yield f'job.note("{name}", model, fit)'
        if any(callback.lower().find("checkpoint") >= 0 for callback in action.callbacks):
            yield f'job.note_files("{name}")'
    elif isinstance(action, Evaluate):
        arrays = "held_x, held_y, held_weights" if action.weighted else "held_x, held_y"
        if action.input == "arrays":
            weights = ", sample_weight=held_weights" if action.weighted else ""
            given = f"held_x, held_y{weights}, batch_size={case.batch}"
        else:
            given = _input(action.input, case.batch, arrays, 0)
        yield f"result = model.evaluate({given}, return_dict=True, verbose=0)"
        yield f'job.found.update({{f"evaluated/{name}/{{key}}": np.asarray(value) for key, value in result.items()}})'
    elif isinstance(action, Predict):
        given = f"held_x, batch_size={case.batch}"
        if action.input != "arrays":
            given = _input(action.input, case.batch, "held_x", 0)
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
        loss = _loss(case, "none")
        dataset = _input("tf.data", case.batch, "x, y", 0)
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


def _on_batch(case: Case, action: OnBatch, name: str) -> Iterator[str]:
    part = case.batch // case.place.workers
    yield f"for step in range({action.steps}):"
    yield f"    start = step * {case.batch} % max({case.rows} - {case.batch} + 1, 1)"
    yield f"    part = slice(start, start + {case.batch})"
    yield "    if job.workers > 1:"
    yield f"        part = slice(start + job.rank * {part}, start + (job.rank + 1) * {part})"
    yield "    model.train_on_batch(*tf.nest.map_structure(lambda a: a[part], (x, y)))"
    yield f'job.note("{name}", model)'


def _save(case: Case, action: Save, name: str) -> Iterator[str]:
    if action.what == "model.keras":
        classes = ["AddLoss"] * ("AddLoss" in case.network.layers) + ["Guided"] * (case.step != "Keras' train_step")
        objects = ", ".join(f"{each!r}: {each}" for each in classes)
        objects = f", custom_objects={{{objects}}}" if objects else ""
        yield f'model.save(job.path("{name}-saved.keras"))'
        yield f'job.note_files("{name}")'
        yield "with job.scope():"
        yield f'    model = keras.models.load_model(job.path("{name}-saved.keras"){objects})'
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


def _strategies(case: Case, reference: str) -> str:
    place = case.place
    settings = ["step_timeout_s=300.0", "connect_timeout_s=300.0"]
    if place.slices == "small slices":
        settings.append("slice_bytes=64, window_bytes=128")
    if place.staging != 2:
        settings.append(f"staging_depth={place.staging}")
    if place.deterministic:
        settings.append("deterministic=True")
    if place.sockets:
        settings.append("shared_memory=False")
    devices = [f"CPU:{device}" for device in range(place.devices)]
    everywhere = [f"CPU:{device}" for device in range(case.replicas)]
    other = f"tf.distribute.MirroredStrategy({everywhere})" if reference == "mirrored" else "None"
    return f'''

def strategy():
    """Where it runs under tfps."""
    return tfps.Strategy(devices={devices}, config=tfps.Config({", ".join(settings)}))


def reference():
    """What it is compared with; None: plain Keras."""
    return {other}
'''
