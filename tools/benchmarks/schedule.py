"""Scheduling policies on emulated training of models: 4 hosts, each with a worker and a pserver, as in the P3 paper.

Computation sleeps (tools/emulation.py), everything else is tfps itself on shaped links; in one case also through Keras
and the strategy, with layers that sleep. So that this fits on a small machine, bytes and bandwidth are divided by the
same number, and times multiplied where a model's are short; bandwidths are reported as they would be without. The rates
are chosen by what the wire then takes compared with the computation.
"""

from __future__ import annotations

import itertools
import math
import os
import pathlib
from dataclasses import dataclass

from tfps.types import Json
from tools import model_profiles
from tools.benchmarks.common import Outcome
from tools.emulation import GOODPUT, Emulation, Task
from tools.model_profiles import ITEM_BYTES, Profile
from tools.netlab import Netlab
from tools.peer_runs import Place
from tools.peer_runs import measure as measure_peer
from tools.peer_workers.common import Work
from tools.simulation import POLICIES, Cluster, Settings, lower_bound, simulate
from tools.simulation.bounds import busiest_link

HOSTS = 4
BURST_BYTES = 160 * 1024
WARMUP_STEPS = 8  # in which sizes are tuned


@dataclass(frozen=True)
class Case:
    """A model and how it is made to fit: bytes divided, times multiplied."""

    model: str
    bytes_divisor: int
    time_factor: int

    @property
    def profile(self) -> Profile:
        return model_profiles.load(self.model).scaled(self.bytes_divisor, self.time_factor)

    @property
    def fuse_bytes(self) -> int:
        """What 1 MiB is of the undivided model."""
        return 2**20 // self.bytes_divisor

    @property
    def split_parameters(self) -> int:
        """What one million, from which on MXNet splits, is of the undivided model."""
        return 1_000_000 // self.bytes_divisor

    @property
    def rate_factor(self) -> int:
        """From the emulated bandwidth to the one it stands for."""
        return self.bytes_divisor * self.time_factor


CASES = (
    Case("vgg19", 64, 1),
    Case("resnet50", 24, 3),
    Case("sockeye", 32, 4),
    Case("vgg16", 64, 1),
)
EMULATED_BYTES, EMULATED_S = 9e6, 0.8  # what 4 workers and 4 pservers can do on 2 cores


def fitting(profile: str) -> Case:
    """How a recorded profile is made to fit."""
    model = model_profiles.load(pathlib.Path(profile))
    divisor, factor = model.nbytes / EMULATED_BYTES, EMULATED_S / model.compute_s
    return Case(profile, max(1, math.ceil(divisor)), max(1, math.ceil(factor)))


# Wire time of the busiest link, one direction, over computing time.
RATIOS = (0.5, 0.75, 1.0, 1.5)
QUICK_RATIOS = (1.0,)
KERAS_CASE = ("vgg19", 1.0)


def run(quick: bool, profile: str | None = None) -> Outcome:
    """Every model at every bandwidth under every policy, the policies one after the other.

    With `profile`, a file that `Strategy.report().save_profile` has written, that model alone.
    """
    ratios = QUICK_RATIOS if quick else RATIOS
    cases = [fitting(profile)] if profile else list(CASES[:3] if quick else CASES)
    steps = 4 if quick else 6
    runs: list[dict[str, Json]] = []
    fastest = max(rate_mbit_of(case.profile, min(ratios)) for case in cases)
    with Netlab(HOSTS, fastest, min_burst_bytes=BURST_BYTES) as lab:
        lab.probe()
        with Emulation(lab.hosts, HOSTS, HOSTS) as emulation:
            for case, ratio in itertools.product(cases, ratios):
                runs += measure(lab, emulation, case, ratio, steps)
        if profile is None:
            runs += measure_keras(lab, [r for r in runs if (r["model"], r["wire_over_compute"]) == KERAS_CASE])
    return Outcome(headline(runs), runs)


def rate_mbit_of(profile: Profile, ratio: float) -> float:
    """The rate of every host at which the wire takes `ratio` times as long as computing."""
    wire_bits = profile.nbytes * 8 * busiest_link(Cluster(HOSTS, HOSTS, rate_gbit=1.0))
    return wire_bits / (ratio * profile.compute_s) / 1e6 / GOODPUT


def measure(lab: Netlab, emulation: Emulation, case: Case, ratio: float, steps: int) -> list[dict[str, Json]]:
    """All policies at one bandwidth."""
    profile = case.profile
    rate_mbit = rate_mbit_of(profile, ratio)
    lab.set_rate(rate_mbit)
    cluster = Cluster(
        HOSTS, HOSTS, rate_gbit=rate_mbit / 1000, goodput=GOODPUT, machine_cores=len(os.sched_getaffinity(0))
    )
    bound_s = lower_bound(profile, cluster)
    found = []
    for policy in POLICIES:
        task = Task(
            profile,
            policy,
            HOSTS,
            HOSTS,
            "auto",
            "auto",
            case.fuse_bytes,
            case.split_parameters,
            warmup_steps=2 if Settings(policy=policy).barriers else WARMUP_STEPS,
            steps=steps,
        )
        result = emulation.run(task)
        settings = Settings(
            policy=policy,
            slice_bytes=result["slice_bytes"],
            window_bytes=result["window_bytes"],
            fuse_bytes=case.fuse_bytes,
            first_bytes=case.fuse_bytes // 16,
            split_parameters=case.split_parameters,
        )
        predicted_s = simulate(profile, cluster, settings).step_s
        result |= {
            "model": case.model,
            "form": "engine",
            "policy": policy,
            "gbit": rate_mbit * case.rate_factor / 1000,
            "wire_over_compute": ratio,
            "compute_s": profile.compute_s,
            "bound_s": bound_s,
            "simulated_s": predicted_s,
            "bytes_divisor": case.bytes_divisor,
            "time_factor": case.time_factor,
        }
        found.append(result)
        print(
            f"{case.model:9} {result['gbit']:6.1f} Gbit/s {policy:20} {result['step_s']:.3f} s/step, "
            f"{bound_s / result['step_s']:.2f} of the bound, simulated {predicted_s:.3f}",
            flush=True,
        )
    return found


def measure_keras(lab: Netlab, engine: list[dict[str, Json]]) -> list[dict[str, Json]]:
    """The same through Keras and the strategy, where `engine` was measured, with the sizes that were chosen there."""
    case = next(case for case in CASES if case.model == engine[0]["model"])
    profile = case.profile
    layers = tuple((la.name, la.forward_s, la.backward_s, la.nbytes // ITEM_BYTES) for la in profile.layers)
    work = Work(warmup_steps=4, steps=4, workers=HOSTS, servers=HOSTS, batch=1, layers=layers)
    lab.set_rate(engine[0]["gbit"] * 1000 / case.rate_factor)
    found = []
    for policy, name in (("slices", "fifo"), ("priority", "priority")):
        like = next(r for r in engine if r["policy"] == policy)
        settings = {
            "TFPS_POLICY": name,
            "TFPS_SLICE_BYTES": str(like["slice_bytes"]),
            "TFPS_WINDOW_BYTES": str(like["window_bytes"]),
        }
        result = measure_peer("tfps", Place((*lab.hosts, *lab.hosts)), work, settings)
        kept = {key: like[key] for key in ("model", "policy", "gbit", "wire_over_compute", "compute_s", "bound_s")}
        found.append({**kept, "form": "keras", "step_s": result["step_s"], "steps_s": result["periods_s"]})
        print(
            f"{case.model:9} {like['gbit']:6.1f} Gbit/s {policy:20} {result['step_s']:.3f} s/step through Keras",
            flush=True,
        )
    return found


def headline(runs: list[dict[str, Json]]) -> dict[str, float]:
    """Best speed-ups over the baselines and the worst fractions."""
    figures: dict[str, float] = {}
    keras, runs = ([r for r in runs if r["form"] == form] for form in ("keras", "engine"))
    of = {(r["model"], r["wire_over_compute"], r["policy"]): r["step_s"] for r in runs}
    bounds = {(r["model"], r["wire_over_compute"]): r["bound_s"] for r in runs}
    worst = []
    for model in dict.fromkeys(r["model"] for r in runs):
        ratios = sorted({ratio for name, ratio, _ in of if name == model})
        for baseline in ("overlap_send_barrier", "overlap", "barrier"):
            gains = [of[model, ratio, baseline] / of[model, ratio, "priority"] for ratio in ratios]
            figures[f"{model}_over_{baseline}"] = max(gains)
            worst.append(min(gains))
        figures[f"{model}_of_bound"] = min(bounds[model, ratio] / of[model, ratio, "priority"] for ratio in ratios)
    figures["worst_gain"] = min(worst)
    for run in keras:
        engine_s = of[run["model"], run["wire_over_compute"], run["policy"]]
        figures[f"{run['model']}_keras_{run['policy']}_over_engine"] = run["step_s"] / engine_s
    errors = [abs(r["simulated_s"] / r["step_s"] - 1) for r in runs]
    figures["simulation_error"] = sorted(errors)[len(errors) // 2]
    return figures
