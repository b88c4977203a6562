"""Slices and windows that tune themselves against the best fixed ones, on emulated training (see `schedule`).

VGG-19 and ResNet-50, on a link where computing takes longer than the wire and on one where the wire takes longer.
`behind` is the step with "auto" over that with the best fixed pair, in the same run.
"""

from __future__ import annotations

import itertools

from tfps.types import Argument, Json
from tools.benchmarks.common import Outcome, median
from tools.benchmarks.schedule import BURST_BYTES, CASES, HOSTS, WARMUP_STEPS, rate_mbit_of
from tools.emulation import Emulation, Task
from tools.netlab import Netlab

MODELS = ("vgg19", "resnet50")
RATIOS = (0.75, 1.5)
KIB = 1024
FIXED = tuple((s * KIB, w * KIB) for s, w in ((32, 64), (32, 128), (64, 128), (64, 256), (128, 256), (256, 512)))


def run(quick: bool) -> Outcome:
    """Every pair of sizes once per round, "auto" before and after them."""
    runs: list[dict[str, Json]] = []
    cases = [case for case in CASES if case.model in MODELS]
    with Netlab(HOSTS, 1000.0, min_burst_bytes=BURST_BYTES) as lab:
        lab.probe()
        with Emulation(lab.hosts, HOSTS, HOSTS) as emulation:
            for case, ratio in itertools.product(cases, RATIOS):
                lab.set_rate(rate_mbit_of(case.profile, ratio))
                for number in range(1 if quick else 2):
                    pairs: list[tuple[Argument, Argument]] = [
                        ("auto", "auto"),
                        *(FIXED[1:5] if quick else FIXED),
                        ("auto", "auto"),
                    ]
                    for slice_bytes, window_bytes in pairs:
                        task = Task(
                            case.profile,
                            "priority",
                            HOSTS,
                            HOSTS,
                            slice_bytes,
                            window_bytes,
                            case.fuse_bytes,
                            warmup_steps=WARMUP_STEPS if slice_bytes == "auto" else 2,
                            steps=4,
                        )
                        found = emulation.run(task)
                        what = "auto" if slice_bytes == "auto" else f"{slice_bytes // KIB}/{window_bytes // KIB}"
                        place = {"model": case.model, "wire_over_compute": ratio, "sizes": what, "round": number}
                        runs.append(place | found)
                        chosen = f"{found['slice_bytes'] // KIB}/{found['window_bytes'] // KIB}"
                        print(
                            f"{case.model:9} wire/compute {ratio:4} slices/windows {what:8} ({chosen:8} KiB): "
                            f"{found['step_s']:.3f} s/step",
                            flush=True,
                        )
    return Outcome(headline(runs), runs)


def headline(runs: list[dict[str, Json]]) -> dict[str, float]:
    """How far "auto" is behind the best fixed pair."""
    figures: dict[str, float] = {}
    for model, ratio in dict.fromkeys((r["model"], r["wire_over_compute"]) for r in runs):
        same = [r for r in runs if (r["model"], r["wire_over_compute"]) == (model, ratio)]
        step_s = {
            sizes: median([r for r in same if r["sizes"] == sizes], "step_s") for sizes in {r["sizes"] for r in same}
        }
        auto_s = step_s.pop("auto")
        figures[f"{model}_{ratio:g}_behind"] = auto_s / min(step_s.values())
    return figures
