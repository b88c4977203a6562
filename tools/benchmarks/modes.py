"""Modes of training side by side: accuracy over time with 4 workers, of which one takes three times as long per step.

Each worker and each of 2 pservers is on an emulated host of its own, with 100 Mbit/s or 1 Gbit/s. A layer sleeps in
each step as long as an accelerator would compute, three times as long on the last worker; what the model really
computes comes on top, on the processors that all hosts share. Two tasks: the digits CNN of examples/digits.py (0.6 MB),
and a generated one, whose classes a random network has chosen, for an MLP of 6.3 MB. Every mode sees as many rows, in
batches of 64 over all workers, and has the same learning rate. Time is that of `fit` alone, from the first step's end;
after each epoch all ranks evaluate with the parameters that would be saved.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from tfps.types import Json
from tools import children
from tools.benchmarks.common import Outcome
from tools.netlab import Host, Netlab

WORKERS, PSERVERS = 4, 2
RATES_MBIT = (100.0, 1000.0)
BATCH = 64  # of all workers
SLOW = 3  # times as long as the others takes the last worker
ANSWER_S = 1200.0
SERVER = {"update": "server", "mode": "async"}
MODES: dict[str, dict[str, Json]] = {
    "sync": {},
    "async": SERVER,
    "bounded": {**SERVER, "staleness": 16},
    "diloco": {"mode": "diloco", "inner_steps": 50},
    "streaming": {"mode": "diloco", "inner_steps": 50, "fragments": 2, "overlap_steps": 5},
    "local": {"mode": "local", "inner_steps": 50},
}
CODECS = ("none", "int8")


@dataclass(frozen=True)
class Task:
    """What is trained. `step_s`: what the sleeping layer takes on all workers but the last."""

    epochs: int
    step_s: float
    train_rows: int = 0  # of the generated task
    test_rows: int = 0


# The digits' 80 ms: with less, four workers that compute on two processors are the limit, not the slow one's sleep.
TASKS = {"digits": Task(8, 0.08), "generated": Task(6, 0.02, train_rows=1600, test_rows=2000)}
SEEDS = 3  # where a worker's speed counts, not the network's
# In a quick run: at one rate, for two epochs, and only what a task is for, which is slow workers or a slow network.
QUICK_AT = {"digits": 1000.0, "generated": 100.0}  # Mbit/s
QUICK_EPOCHS = 2
QUICK = {
    "digits": (("sync", "none"), ("async", "none"), ("bounded", "none")),
    "generated": (("sync", "none"), ("sync", "int8"), ("diloco", "none"), ("diloco", "int8"), ("local", "none")),
}


def run(quick: bool) -> Outcome:
    """Every mode once per task, rate and codec, some with several seeds; quick: a part of it, once."""
    runs: list[dict[str, Json]] = []
    with Netlab(WORKERS + PSERVERS, RATES_MBIT[0]) as lab, contextlib.ExitStack() as stack:
        workers: list[subprocess.Popen[str]] = []
        for rate in RATES_MBIT:
            lab.set_rate(rate)
            lab.probe(together=False)
            workers = workers or start(lab.hosts, stack)  # after the first probe: a start takes all processors
            for name, mode, codec in _quick(rate) if quick else itertools.product(TASKS, MODES, CODECS):
                for seed in range(1 if quick else _seeds(name, rate, mode, codec)):
                    place = {"task": name, "mbit": rate, "mode": mode, "codec": codec, "seed": seed}
                    settings = {**MODES[mode], "compression": codec}
                    task = replace(TASKS[name], epochs=QUICK_EPOCHS) if quick else TASKS[name]
                    runs.append({**place, **measure(workers, name, task, settings, seed)})
                    print(" ".join(f"{key}={value}" for key, value in runs[-1].items() if key != "line"), flush=True)
    return Outcome(headline(runs), runs)


def _quick(mbit: float) -> list[tuple[str, str, str]]:
    return [(name, *each) for name, some in QUICK.items() if QUICK_AT[name] == mbit for each in some]


def _seeds(task: str, mbit: float, mode: str, codec: str) -> int:
    """Asynchronous training is left to chance, and its accuracy is compared with that of sync."""
    compared = mode in ("sync", "async", "bounded") and codec == "none"
    return SEEDS if task == "digits" and mbit == max(RATES_MBIT) and compared else 1


def start(hosts: Sequence[Host], stack: contextlib.ExitStack) -> list[subprocess.Popen[str]]:
    """The workers, which train one task after the other, with their pservers: TensorFlow starts slowly."""
    addresses = []
    for host in hosts[WORKERS:]:
        serve = [
            "-m",
            "tfps.pserver.cli",
            "--port=7070",
            f"--host={host.address}",
            f"--workers={WORKERS}",
            "--insecure",
        ]
        process = stack.enter_context(children.python(serve, popen=host.popen))
        addresses.append(children.answer(process, ANSWER_S).split()[3])
    work, workers = [str(pathlib.Path(__file__)), *addresses], []
    for rank, host in enumerate(hosts[:WORKERS]):
        variables = {"TFPS_RANK": str(rank), "TFPS_WORKERS": str(WORKERS), "TF_CPP_MIN_LOG_LEVEL": "2"}
        workers.append(stack.enter_context(children.python(work, variables, host.popen)))
    return workers


def measure(
    workers: Sequence[subprocess.Popen[str]], name: str, task: Task, settings: Mapping[str, Json], seed: int
) -> dict[str, Json]:
    """One training: accuracy over time, rows per second, bytes that the workers' hosts sent and received per row."""
    for rank, worker in enumerate(workers):
        step_s = task.step_s * (SLOW if rank == WORKERS - 1 else 1)
        job = {**asdict(task), "step_s": step_s, "name": name, "settings": settings, "seed": seed}
        children.tell(worker, json.dumps(job))
    found = [json.loads(children.answer(each, ANSWER_S)) for each in workers]
    line = found[0]["line"]
    if any(each["checksum"] != found[0]["checksum"] for each in found):
        raise RuntimeError(f"all ranks must end with the same parameters, got {[each['checksum'] for each in found]}")
    rows = found[0]["rows"]
    return {
        "line": line,
        "accuracy": line[-1][1],
        "seconds": line[-1][0],
        "rows_per_s": round(rows / line[-1][0], 2),
        "bytes_per_row": round(sum(each["nbytes"] for each in found) / rows),
        "steps": [each["steps"] for each in found],
    }


def headline(runs: Sequence[Mapping[str, Json]]) -> dict[str, float]:
    """Of each mode: how many times as fast as sync without compression, and by how many points more accurate.

    Medians over seeds, each beside sync with the same seed.
    """
    figures: dict[str, float] = {}
    plain = {_place(run): run for run in runs if (run["mode"], run["codec"]) == ("sync", "none")}
    for name in dict.fromkeys(map(_figure, runs)):
        pairs = [(run, plain[_place(run)]) for run in runs if _figure(run) == name]
        figures[f"{name}_speed"] = statistics.median(run["rows_per_s"] / sync["rows_per_s"] for run, sync in pairs)
        figures[f"{name}_points"] = statistics.median(100 * (run["accuracy"] - sync["accuracy"]) for run, sync in pairs)
    return figures


def _figure(run: Mapping[str, Json]) -> str:
    codec = "" if run["codec"] == "none" else f"_{run['codec']}"
    return f"{run['task']}_{run['mbit']:.0f}_{run['mode']}{codec}"


def _place(run: Mapping[str, Json]) -> tuple[Json, ...]:
    return run["task"], run["mbit"], run["seed"]


def _train(addresses: Sequence[str], job: Mapping[str, Json]) -> dict[str, Json]:
    """A worker's part of one training; what it found."""
    import keras
    import numpy as np

    import tfps

    keras.utils.clear_session()
    keras.utils.set_random_seed(job["seed"])
    strategy = tfps.Strategy(addresses, config=tfps.Config(**job["settings"]))
    is_digits = job["name"] == "digits"
    (x, y), test = _digits() if is_digits else _generated(job["train_rows"], job["test_rows"])
    with strategy.scope():
        model = (_digits_model if is_digits else _mlp)(job["step_s"])
    clock = _clock(strategy, test)
    model.fit(x, y, batch_size=BATCH, epochs=job["epochs"], verbose=0, callbacks=[clock])
    checksum = float(np.sum([np.abs(each).sum() for each in _shared(model, strategy)], dtype=np.float64))
    strategy.close()
    rows = len(x) * job["epochs"] - BATCH
    return {"line": clock.line, "steps": clock.steps, "nbytes": clock.nbytes, "rows": rows, "checksum": checksum}


def _clock(strategy: Json, test: Json) -> Json:
    """A callback that times training alone, counts its bytes, and evaluates after each epoch."""
    import keras

    class Clock(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.line: list[Json] = []
            self.steps, self.seconds, self.nbytes = 0, 0.0, 0

        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            self.began_s, self.before = time.monotonic(), _nbytes()

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            self.steps += 1
            if self.steps == 1:  # it was traced, too
                self.began_s, self.before = time.monotonic(), _nbytes()

        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            strategy._runtime.settle(ANSWER_S)
            self.seconds += time.monotonic() - self.began_s
            self.nbytes += _nbytes() - self.before
            accuracy = self.model.evaluate(*test, batch_size=500, verbose=0)[1]
            self.line.append([round(self.seconds, 3), float(accuracy)])

    return Clock()


def _nbytes() -> int:
    """Bytes that this host has sent and received."""
    counters = pathlib.Path("/sys/class/net/eth0/statistics")
    return sum(int((counters / name).read_text()) for name in ("tx_bytes", "rx_bytes"))


def _shared(model: Json, strategy: Json) -> list[Json]:
    """The parameters that a saved model has."""
    import tempfile

    import keras

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/{strategy.rank}.weights.h5"
        model.save_weights(path)
        plain = keras.Sequential.from_config(model.get_config(), custom_objects={"Asleep": _asleep()})
        plain.load_weights(path)
        return list(plain.get_weights())


def _asleep() -> type:
    """The layer that sleeps in training steps."""
    import keras
    import tensorflow as tf

    class Asleep(keras.layers.Layer):
        def __init__(self, seconds: float, **options: Json) -> None:
            super().__init__(**options)
            self.seconds = seconds

        def call(self, inputs: Json, training: bool = False) -> Json:
            if not training:
                return inputs

            def sleep(values: Json) -> Json:
                time.sleep(self.seconds)
                return values

            @tf.custom_gradient
            def slept(values: Json) -> Json:
                after = tf.ensure_shape(tf.numpy_function(sleep, [values], values.dtype), values.shape)
                return after, lambda gradient: gradient

            return slept(inputs)

        def get_config(self) -> Json:
            return {**super().get_config(), "seconds": self.seconds}

    return Asleep


def _digits() -> Json:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = digits.images[..., None].astype("float32") / 16
    split = train_test_split(images, digits.target, test_size=0.2, stratify=digits.target, random_state=1)
    return (split[0], split[2]), (split[1], split[3])


def _digits_model(step_s: float) -> Json:
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            _asleep()(step_s),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.25),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(10),
        ]
    )
    return _compiled(model, 2e-3)


def _generated(train_rows: int, test_rows: int) -> Json:
    """Rows of 512 numbers, mixed of 12 with some noise; the class is what a random network says of the 12."""
    import numpy as np

    random = np.random.default_rng(1)
    few = random.standard_normal([train_rows + test_rows, 12])
    x = (few @ random.standard_normal([12, 512]) / 3 + random.standard_normal([len(few), 512]) / 10).astype(np.float32)
    hidden = np.maximum(few @ random.standard_normal([12, 24]), 0)
    y = np.argmax(hidden @ random.standard_normal([24, 10]), 1)
    return (x[:train_rows], y[:train_rows]), (x[train_rows:], y[train_rows:])


def _mlp(step_s: float) -> Json:
    import keras

    layers = keras.layers
    hidden = [layers.Dense(1024, activation="relu") for _ in range(2)]
    return _compiled(keras.Sequential([layers.Input((512,)), _asleep()(step_s), *hidden, layers.Dense(10)]), 1e-3)


def _compiled(model: Json, learning_rate: float) -> Json:
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(learning_rate), loss, metrics=["accuracy"])
    return model


if __name__ == "__main__":
    for _line in sys.stdin:
        print(json.dumps(_train(sys.argv[1:], json.loads(_line))), flush=True)
