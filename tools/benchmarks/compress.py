"""What compression costs and gains: CPU per codec, and the step of a 50 MB MLP on hosts with 1 Gbit/s each.

First the codecs alone, on slices of 1 MiB of noise, with error feedback where there is any: CPU seconds per GB of
gradients that are encoded, and that are decoded and added.

Then steps of an MLP of 12.61 million float32 parameters (50.4 MB: three dense layers of 2048 on 2048 inputs, one of
10), with each codec in turn, interleaved: 2 workers and 2 pservers on emulated hosts of their own. In one form the
layers sleep (30 ms in all) instead of computing; in the other Keras trains it with SGD and batch 4, as in `peers`, on
the same processors as all hosts, so that computing and not the network may be the limit.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from tfps.exchange.codecs import codec_of, sent_bytes
from tfps.types import Json
from tools.benchmarks.common import Outcome, median
from tools.emulation import Emulation, Task
from tools.model_profiles import ITEM_BYTES, Layer, Profile
from tools.netlab import Netlab
from tools.peer_runs import Place, measure
from tools.peer_workers.common import Work

CODECS = ("none", "bfloat16", "float16", "int8", "topk:0.01", "onebit")
MBIT = 1000.0
WIDTH, DEPTH, CLASSES = 2048, 3, 10
SLICE_ITEMS = 2**18
COMPUTE_S = 0.03
WORKERS = PSERVERS = 2


def run(quick: bool) -> Outcome:
    """Medians over the rounds."""
    runs = [*speeds(0.3 if quick else 1.0)]
    with Netlab(WORKERS + PSERVERS + 1, MBIT) as lab:
        lab.probe(together=False)
        runs += asleep(lab, rounds=1 if quick else 3, steps=10 if quick else 20)
        runs += through_keras(lab, rounds=1 if quick else 3, steps=8 if quick else 20)
    return Outcome(headline(runs), runs)


def speeds(at_least_s: float) -> list[dict[str, Json]]:
    """CPU seconds per GB of each codec."""
    found: list[dict[str, Json]] = []
    values = np.random.default_rng(1).standard_normal(SLICE_ITEMS, np.float32)
    for name in CODECS[1:]:
        codec = codec_of(name)
        if codec is None:
            continue
        held, total = np.zeros_like(values), np.zeros_like(values)
        data = codec.encode(values, held)
        encode_s = _cpu_s_per_gb(partial(codec.encode, values, held), at_least_s)
        decode_s = _cpu_s_per_gb(partial(codec.decode, data, total), at_least_s)
        add_s = _cpu_s_per_gb(partial(codec.decode, data, total, add=True), at_least_s)
        found.append({"what": "codec", "codec": name, "encode_s": encode_s, "decode_s": decode_s, "add_s": add_s})
        print(f"{name:10} CPU s/GB: encode {encode_s:.2f}, decode {decode_s:.2f}, and add {add_s:.2f}", flush=True)
    return found


def _cpu_s_per_gb(call: Callable[[], object], at_least_s: float) -> float:
    """The best of five, each of `at_least_s` / 5."""
    best = float("inf")
    for _ in range(5):
        began_s, count = time.thread_time(), 0
        while (passed_s := time.thread_time() - began_s) < at_least_s / 5:
            call()
            count += 1
        best = min(best, passed_s / count)
    return best / (SLICE_ITEMS * ITEM_BYTES / 1e9)


def mlp() -> Profile:
    """Layers that take as long as they have bytes."""
    sizes = [((WIDTH + 1) * WIDTH) * ITEM_BYTES] * DEPTH + [(WIDTH + 1) * CLASSES * ITEM_BYTES]
    layers = [
        Layer(f"dense{number}", COMPUTE_S / 3 * size / sum(sizes), COMPUTE_S * 2 / 3 * size / sum(sizes), size)
        for number, size in enumerate(sizes)
    ]
    return Profile("mlp", tuple(layers), "As in `peers`; times are assumed.")


def sent(codec: str) -> int:
    """Bytes that a step of the MLP sends per worker, each way."""
    return sum(sent_bytes(codec_of(codec), layer.nbytes) for layer in mlp().layers)


def asleep(lab: Netlab, rounds: int, steps: int) -> list[dict[str, Json]]:
    """Layers sleep; worker i and pserver i have hosts of their own."""
    found = []
    hosts = lab.hosts[: WORKERS + PSERVERS]
    with Emulation(hosts, WORKERS, PSERVERS, apart=True) as emulation:
        for number, codec in itertools.product(range(rounds), CODECS):
            task = Task(
                mlp(),
                "priority",
                WORKERS,
                PSERVERS,
                "auto",
                "auto",
                2**20,
                warmup_steps=8,
                steps=steps,
                compression=codec,
            )
            result = emulation.run(task)
            cpu_s = WORKERS * result["worker_cpu_s"] + PSERVERS * result["pserver_cpu_s"]
            found.append({"what": "asleep", "codec": codec, "round": number, "sent_bytes": sent(codec), **result})
            found[-1]["cpu_s"] = cpu_s
            print(
                f"{codec:10} asleep: {result['step_s']:.3f} s/step, {sent(codec) / 1e6:.2f} MB each way, "
                f"{cpu_s:.3f} CPU s/step, slices of {result['slice_bytes'] // 1024} KiB",
                flush=True,
            )
    return found


def through_keras(lab: Netlab, rounds: int, steps: int) -> list[dict[str, Json]]:
    """Keras trains."""
    work = Work(warmup_steps=8, steps=steps, width=WIDTH, depth=DEPTH, classes=CLASSES)
    found = []
    for number, codec in itertools.product(range(rounds), CODECS):
        result = measure("tfps", Place(lab.hosts), work, {"TFPS_COMPRESSION": codec})
        found.append({"what": "keras", "codec": codec, "round": number, "sent_bytes": sent(codec), **result})
        print(f"{codec:10} Keras: {result['step_s']:.3f} s/step, {result['cpu_s']:.3f} CPU s/step", flush=True)
    return found


def headline(runs: list[dict[str, Json]]) -> dict[str, float]:
    """Times, and how many times as fast as without compression."""
    figures: dict[str, float] = {}
    for run_ in (one for one in runs if one["what"] == "codec"):
        for key in ("encode_s", "decode_s"):
            figures[f"{run_['codec']}_{key}_per_gb"] = run_[key]
    for form in ("asleep", "keras"):
        step_s = {c: median([r for r in runs if (r["what"], r["codec"]) == (form, c)], "step_s") for c in CODECS}
        for codec, seconds in step_s.items():
            figures[f"{codec}_{form}_s"] = seconds
            figures[f"{codec}_{form}_gain"] = step_s["none"] / seconds
    return figures
