"""XLA under the strategy: CPU time of a step and where in it gradients leave, against how many parts there are.

In one process, interleaved: plain Keras, plain Keras with XLA, tfps, tfps with XLA and 1, 2, 4 and 8 groups of
variables. All of a step's CPU time counts, of all threads; the position of a send is in it: 0 the begin of the step, 1
its end.

`fusible`: 8 blocks whose activations are chains of elementwise ops; `products`: 6 blocks of matrix products.

Then two hosts with 1 Gbit/s each, a worker and a pserver on each of them: a larger fusible model (16.8 MB), without
XLA, with one part, and with the parts that tfps chooses. All figures are seconds from step to step, medians over rounds
in turn.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import tfps
from tfps.types import Argument, Array, Json, Value
from tools import children, netlab
from tools.benchmarks import common
from tools.netlab import Netlab

Build = Callable[[], tuple[keras.Model, Array]]
BURST = 3  # steps that are measured together
SLICE_BYTES = 2**18  # several buckets, although nothing travels here
GROUPS = (1, 2, 4, 8)
HOSTS, RATE_MBIT, PORT, ANSWER_S = 2, 1000.0, 7070, 300.0
WARMUP_STEPS, STEPS = 4, 12
#: What differs between workers on two hosts.
ON_HOSTS = {"tfps": {"JIT": "0"}, "one part": {"TFPS_XLA_PART_BYTES": str(2**30)}, "parts": {}}


def _blocks(blocks: int, width: int, chain: int) -> keras.Model:
    x = inputs = keras.Input((width,))
    for _ in range(blocks):
        y = keras.layers.Dense(4 * width)(keras.layers.LayerNormalization()(x))
        y = keras.ops.gelu(y, approximate=False)
        for _ in range(chain):
            y = keras.ops.sigmoid(y) * y + 0.1 * keras.ops.tanh(y)
        x = x + keras.layers.Dense(width)(y)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def fusible() -> tuple[keras.Model, Array]:
    """Elementwise ops are most of it."""
    return _blocks(8, 96, 3), np.random.default_rng(0).normal(size=(1024, 96)).astype("float32")


def products() -> tuple[keras.Model, Array]:
    """Matrix products are most of it."""
    return _blocks(6, 192, 0), np.random.default_rng(0).normal(size=(512, 192)).astype("float32")


def larger() -> tuple[keras.Model, Array]:
    """16.8 MB, a batch for each of the hosts."""
    return _blocks(8, 256, 6), np.random.default_rng(0).normal(size=(256 * HOSTS, 256)).astype("float32")


def _compiled(build: Build, jit_compile: bool) -> tuple[keras.Model, Array, Array]:
    keras.utils.set_random_seed(1)
    model, x = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss, jit_compile=jit_compile)
    return model, x, np.arange(len(x)) % 10


class Subject:
    """A model compiled in one way."""

    def __init__(self, build: Build, groups: int | None, *, jit_compile: bool) -> None:
        self.strategy: tfps.Strategy | None = None
        if groups is not None:
            size = 4 * build()[0].count_params() // groups + 2
            self.strategy = tfps.Strategy(config=tfps.Config(slice_bytes=SLICE_BYTES, xla_part_bytes=size))
            runtime, self._push = self.strategy._runtime, self.strategy._runtime.push
            runtime.push = self._noted  # type: ignore[method-assign]
        with self.strategy.scope() if self.strategy else contextlib.nullcontext():
            self.model, self.x, self.y = _compiled(build, jit_compile)
        self.sent: list[float] = []
        began = time.process_time()
        self.model.train_on_batch(self.x, self.y)
        self.first_cpu_s = time.process_time() - began
        self.burst()

    @property
    def parts(self) -> int:
        made = self.strategy.extended.compiled.made if self.strategy else []
        return len(made[-1].parts) if made else 0

    def _noted(self, *arguments: Argument, **options: Argument) -> Value:
        self.sent.append(time.process_time())
        return self._push(*arguments, **options)

    def burst(self) -> tuple[float, float]:
        """CPU seconds of a step, and where in one more the first gradient left; 1 if none leave."""
        began = time.process_time()
        for _ in range(BURST):
            self.model.train_on_batch(self.x, self.y)
        self.model.get_weights()  # the last updates may still be under way
        cpu_s, self.sent, at = (time.process_time() - began) / BURST, [], time.process_time()
        self.model.train_on_batch(self.x, self.y)
        took = time.process_time() - at
        self.model.get_weights()
        return cpu_s, min(((each - at) / took for each in self.sent), default=1.0)


def run(quick: bool) -> common.Outcome:
    """Interleaves all; figures are the least CPU time, and medians of positions."""
    headline: dict[str, float] = {}
    runs: list[dict[str, Json]] = []
    for build in (fusible, products):
        subjects = {
            "plain": Subject(build, None, jit_compile=False),
            "plain_xla": Subject(build, None, jit_compile=True),
            "tfps": Subject(build, 1, jit_compile=False),
            **{f"tfps_xla_{groups}": Subject(build, groups, jit_compile=True) for groups in GROUPS},
        }
        rows = []
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in subjects}
        for _, (name, subject) in itertools.product(range(6 if quick else 24), subjects.items()):
            found[name].append(subject.burst())
        for name, subject in subjects.items():
            least, where = min(found[name])[0], statistics.median(place for _, place in found[name])
            headline[f"{build.__name__}_{name}_ms"] = 1e3 * least
            figures = f"{1e3 * least:.1f}", f"{where:.2f}", f"{subject.first_cpu_s:.1f}"
            rows.append([name, str(subject.parts), *figures])
            runs.append({"model": build.__name__, "way": name, "parts": subject.parts, "found": found[name]})
            if subject.strategy:
                subject.strategy.close()
        heads = ["way", "parts", "CPU ms/step", "first send", "first step CPU s"]
        print(common.Table(f"{build.__name__}: {(build.__doc__ or '').strip()}", heads, rows).text())
        most, one = subjects[f"tfps_xla_{GROUPS[-1]}"], subjects["tfps_xla_1"]
        headline[f"{build.__name__}_part_s"] = (most.first_cpu_s - one.first_cpu_s) / max(1, most.parts - one.parts)
    if reason := netlab.unavailable():
        print(f"two hosts left out: {reason}")
        return common.Outcome(headline, runs)
    steps: dict[str, list[float]] = {way: [] for way in ON_HOSTS}
    for _, (way, settings) in itertools.product(range(2 if quick else 6), ON_HOSTS.items()):
        steps[way].append(_on_hosts(settings))
    medians = {way: statistics.median(each) for way, each in steps.items()}
    rows = [[way, f"{step_s:.3f}"] for way, step_s in medians.items()]
    print(common.Table("Two hosts with 1 Gbit/s", ["way", "s per step"], rows).text())
    headline |= {f"hosts_{way.replace(' ', '_')}_s": step_s for way, step_s in medians.items()}
    return common.Outcome(headline, [*runs, steps])


def _on_hosts(settings: dict[str, str]) -> float:
    """Seconds from step to step, on two hosts, of which each has a worker and a pserver."""
    with Netlab(HOSTS, RATE_MBIT) as lab, contextlib.ExitStack() as stack:
        serve = ["-m", "tfps.pserver.cli", f"--port={PORT}", f"--workers={HOSTS}", "--insecure", "--host=0.0.0.0"]
        for host in lab.hosts:
            children.answer(stack.enter_context(children.python([*serve, "--quiet"], popen=host.popen)), ANSWER_S)
        pservers = ",".join(f"{host.address}:{PORT}" for host in lab.hosts)
        place = {"TFPS_PSERVERS": pservers, "TFPS_WORKERS": str(HOSTS), **settings}
        workers = [
            stack.enter_context(children.python([__file__], {**place, "TFPS_RANK": str(rank)}, popen=host.popen))
            for rank, host in enumerate(lab.hosts)
        ]
        for worker in workers:
            children.answer(worker, ANSWER_S)  # warm, as all are when one is
            children.tell(worker, "go")
        return max(float(json.loads(children.answer(worker, ANSWER_S))) for worker in workers)


def _work() -> None:
    """What a worker on a host does."""
    with tfps.Strategy().scope():
        model, x, y = _compiled(larger, os.environ.get("JIT") != "0")
    for steps in (WARMUP_STEPS, STEPS):
        began = time.perf_counter()
        for _ in range(steps):
            model.train_on_batch(x, y)
        model.get_weights()
        print((time.perf_counter() - began) / steps, flush=True)
        sys.stdin.readline()  # it stays, so that nobody is lost while the other still works


if __name__ == "__main__":
    _work()
