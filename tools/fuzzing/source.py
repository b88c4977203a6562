"""Writes a case as a complete Keras program, which is what runs under tfps and under plain Keras alike."""

from __future__ import annotations

from collections.abc import Iterator

from tools.fuzzing import classes, layers, prelude
from tools.fuzzing.actions import action_lines, custom_objects
from tools.fuzzing.cases import Case, Network
from tools.fuzzing.expressions import LOSSES, METRICS, OTHER_LOSSES, loss_of, optimizer

LAYERS = {
    "AddLoss": prelude.ADD_LOSS,
    "counter": prelude.COUNTING,
    "moving mean": prelude.FOLLOWING,
    "positions": prelude.PLACED,
    "metric in a layer": prelude.MEASURING,
    "function in a layer": prelude.NESTED,
    "unique lookup": classes.UNIQUE,
    "embedding_lookup_sparse": classes.POOLED,
    "mean of ragged": classes.GATHERED,
    "boxes of rows": classes.BOXES,
    **classes.STATES,
}
STEPS = {
    "guide": prelude.GUIDE,
    "own metrics": prelude.OWN_METRICS,
    "own mean": prelude.OWN_MEAN,
    **classes.STEPS,
}
SHAPES = {
    "features": "(3,)",
    "image": "(6, 6, 2)",
    "words": "(5,)",
    "sequence": "(5, 4)",
    "sparse": "(6,), sparse=True",
    "ragged": "(None,), ragged=True",
    "boxes": "(None, 2), ragged=True",
}


def program(case: Case, reference: str = "plain", update: str = "worker", shaken: bool = False) -> str:
    """The text of a module with `main(strategy, folder)`, `strategy()` and `reference()`, which runs by itself too.

    `shaken`: its initial weights differ by a rounding.
    """
    parts = [f'"""{_how_to_run(case)}"""\n\n', prelude.IMPORTS, prelude.HELPERS, *_classes(case)]
    if shaken:
        parts.append(prelude.SHAKE)
    parts += [_data(case), _model(case), _main(case, shaken), _strategies(case, reference, update), prelude.MAIN]
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
    if case.network.edges:
        yield classes.GRAPHS
        if inputs & {"PyDataset", "generator"}:
            yield classes.GRAPH_BATCHES
    if case.unordered:
        yield classes.UNORDERED
    if classes.STATES.keys() & set(case.network.layers):
        yield classes.STATE
    for layer, text in LAYERS.items():
        if layer in case.network.layers:
            yield text
    if "Rows" in (*case.metrics, *case.weighted_metrics):
        yield prelude.ROWS
    for name, text in classes.METRICS.items():
        if name in case.metrics:
            yield text
    if not LOSSES[case.network.task, case.loss].startswith("keras") or case.network.other_loss != "mse":
        yield prelude.LOSSES
    if case.network.style == "subclassed":
        yield prelude.SUBCLASSED
    if case.step != "Keras' train_step":
        yield STEPS[case.step]
    if "Loop" in case.actions_of:
        yield prelude.LOOP
    if any(fit.interrupted for fit in case.fits):
        yield prelude.INTERRUPT
    if "Resume" in case.actions_of:
        yield prelude.STOP


def _data(case: Case) -> str:
    network = case.network
    lines = [
        "",
        "",
        "def data(rows, seed):",
        '    """Inputs, targets and sample weights."""',
        "    random = np.random.default_rng(seed)",
    ]
    lines += _inputs(network)
    if network.second_input:
        lines.append('    x = {"first": x, "second": random.normal(size=(rows, 2)).astype("float32")}')
    steps = ", 5" if network.per_step else ""
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


def _inputs(network: Network) -> list[str]:
    """Lines that draw `rows` of them."""
    if network.input == "words":
        return ["    x = random.integers(0, 12, (rows, 5))"]
    if network.input == "sparse":
        drawn = 'random.normal(size=(rows, 6)).astype("float32") * (random.random((rows, 6)) < 0.4)'
        return [f"    x = tf.sparse.from_dense({drawn})"]
    if network.input in ("ragged", "boxes"):
        words = 'random.integers(0, 12, lengths.sum()).astype("int32")'
        values = words if network.input == "ragged" else 'random.normal(size=(lengths.sum(), 2)).astype("float32")'
        return [
            "    lengths = random.integers(1, 5, rows)",
            f"    x = tf.RaggedTensor.from_row_lengths({values}, lengths)",
        ]
    shape = SHAPES[network.input].strip("(,)")
    lines = [f'    x = random.normal(size=(rows, {shape})).astype("float32")']
    if network.edges:
        lines.append('    x = {"nodes": x, "edges": random.integers(0, 99, (rows, 2, 2)).astype("int32")}')
    return lines


def _input_lines(network: Network) -> Iterator[str]:
    """Of a function that builds the model: `inputs`, and `h` that its layers take first."""
    if network.edges:
        yield 'inputs = {"nodes": keras.Input((3,), name="nodes")}'
        yield 'inputs["edges"] = keras.Input((2,), dtype="int32", name="edges")'
        yield 'h = Neighbours()([inputs["nodes"], inputs["edges"]])'
    else:
        dtype = ', dtype="int32"' if network.input in ("words", "ragged") else ""
        yield f'inputs = h = keras.Input({SHAPES[network.input]}{dtype}, name="first")'


def _model(case: Case) -> str:
    network = case.network
    lines = ["", "", "def build():", '    """The model, not compiled."""']
    lines += [f"    {line}" for line in _input_lines(network)]
    # By the rank of what goes in; 0 and less: ids, and what is no array.
    rank = {"features": 1, "image": 3, "words": 0, "sequence": 2, "sparse": -1, "ragged": -2, "boxes": -3}[
        network.input
    ]
    tables = {-3: layers.RAGGED_BOXES, -2: layers.RAGGED, -1: layers.SPARSE, 2: layers.SEQUENCES, 3: layers.IMAGES}
    tables |= {0: {**layers.EMBEDDINGS, **layers.TABLES, **layers.UNIQUE}, 1: {**layers.VECTORS, **layers.STATES}}
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
    loss = loss_of(case)
    if network.second_output:
        other = OTHER_LOSSES[network.other_loss]
        loss = f'{{"main": {loss}, "other": {other}}}, loss_weights={{"main": 1.0, "other": 0.3}}'
        metrics, weighted = (f'{{"main": [{each}]}}' if each else "" for each in (metrics, weighted))
    else:
        metrics, weighted = (f"[{each}]" if each else "" for each in (metrics, weighted))
    chosen = optimizer(case.optimizer, parts=" / job.parts")
    options = [f"optimizer={chosen}", f"loss={loss}"]
    if metrics:
        options.append(f"metrics={metrics}")
    if weighted:
        options.append(f"weighted_metrics={weighted}")
    if case.steps_per_execution > 1:
        options.append(f"steps_per_execution={case.steps_per_execution}")
    if case.eager:
        options.append("run_eagerly=True")
    options.append(f"jit_compile={case.jit_compile}")
    lines.append("    model.compile(")
    lines += [f"        {option}," for option in options]
    lines.append("    )")
    if case.optimizer.name == "ScheduleFreeAdamW":
        # Without a strategy Keras builds it while it traces, where what it copies from the weights is lost.
        lines.append("    model.optimizer.build(model.trainable_variables)")
    lines += ["    return model", ""]
    return "\n".join(lines)


def _start(case: Case) -> list[str]:
    """Lines that make the model."""
    if case.start == "loaded from a file":
        return [
            '    path = job.path(f"start{job.rank}.keras")',
            "    compiled(job, build()).save(path)",
            "    with job.scope():",
            f"        model = keras.models.load_model(path{custom_objects(case)})",
        ]
    lines = ["    with job.scope():", "        model = compiled(job, build())"]
    if case.start == "weights from a file":
        before = ['    path = job.path(f"start{job.rank}.weights.h5")', "    compiled(job, build()).save_weights(path)"]
        return [*before, *lines, "    model.load_weights(path)"]
    return lines


def _main(case: Case, shaken: bool) -> str:
    lines = [
        "",
        "",
        "def main(strategy, folder):",
        '    """Runs the program; returns what it has found."""',
        "    job = Job(strategy, folder)",
        *(["    tf.config.experimental.enable_op_determinism()"] if case.op_determinism else []),
        f'    tf.config.optimizer.set_experimental_options({{"arithmetic_optimization": {case.reordered}}})',
        f"    keras.utils.set_random_seed({case.seed}{' + job.rank' if case.place.own_initial_values else ''})",
        *_start(case),
        *(["    model = shaken(model)"] if shaken else []),
        f"    keras.utils.set_random_seed({case.seed})",
        *(["    tf.random.set_seed(None)  # what shuffles takes no seed"] if case.place.own_orders else []),
        f"    x, y, weights = data({case.rows}, 1)",
        f"    held_x, held_y, held_weights = data({case.validation_rows}, 2)",
    ]
    if not case.place.own_initial_values:
        lines.append('    job.note("start", model)')
    for number, action in enumerate(case.actions):
        lines += [f"    {line}" for line in action_lines(case, action, number)]
    lines += ["    return job.found", ""]
    return "\n".join(lines)


def _strategies(case: Case, reference: str, update: str) -> str:
    place, small = case.place, ""
    settings = ["step_timeout_s=300.0", "connect_timeout_s=300.0"]
    if update != "worker":
        settings.append(f'update="{update}"')
    if place.slices == "small slices":
        settings.append("slice_bytes=64, window_bytes=128, xla_part_bytes=64")
    if place.staging != 2:
        settings.append(f"staging_depth={place.staging}")
    if place.deterministic:
        settings.append("deterministic=True")
    if place.sockets:
        settings.append("shared_memory=False")
    if place.compression != "no compression":
        settings.append(f"compression={place.compression!r}")
        small = (
            "    from tfps.runtime import report\n    from tfps.updates import pending, reductions\n\n"
            "    for module in (pending, reductions, report):  # imported before, by programs that do not compress\n"
            "        module.LEAST_BYTES = 0  # buckets here are small\n"
        )
    devices = [f"CPU:{device}" for device in range(place.devices)]
    everywhere = [f"CPU:{device}" for device in range(case.replicas)]
    other = f"tf.distribute.MirroredStrategy({everywhere})" if reference == "mirrored" else "None"
    return f'''

def strategy():
    """Where it runs under tfps."""
{small}    return tfps.Strategy(devices={devices}, config=tfps.Config({", ".join(settings)}))


def reference():
    """What it is compared with; None: plain Keras."""
    return {other}
'''
