"""tfps and its peers on the same work: 2 workers and 2 servers, on loopback and on hosts with 1 Gbit/s each.

The work: an MLP of 12.61 million float32 parameters (50.4 MB: three dense layers of 2048 on 2048 inputs, one of 10),
batch 4 per worker, SGD, random data that never changes. Beside it, for those that can, VGG-19 as on the accelerator of
the P3 paper, whose layers sleep instead of computing, with a sixteenth of its bytes: on loopback, on hosts with
1 Gbit/s (what 16 Gbit/s are to the whole VGG-19), and with 5 and more Gbit/s divided by 16, too. Servers have hosts of
their own, but in the case with 2 hosts: there each is beside a worker, and all peers have the same machines.

What is run, with its own defaults everywhere:

* `alone`: Keras 3 `fit` in one process, without communication;
* `tfps`: Keras 3 `fit` under `tfps.Strategy`;
* `horovod`: `fit` of TensorFlow 2.15's Keras with `DistributedOptimizer`, all-reduce by Gloo, no servers;
* `mxnet`: Gluon with the kvstore `dist_sync`, and `mxnet-p3` with DMLC_PS_VAN_TYPE=p3; the optimizer is on the servers;
* `mwms`: tf_keras `fit` under MultiWorkerMirroredStrategy, ring all-reduce by gRPC, no servers;
* `tf-ps`: tf_keras `fit` under ParameterServerStrategy, variables sharded over the servers. Asynchronous: workers wait
  for nobody.

How steps are timed: by wall clock at rank 0, from the moment when a step's loss is on the host to that of the next
step, in a callback at the end of a batch (MXNet: in the loop). A loss takes the forward pass, and that takes all
updates of the step before, so what a framework does in the background (tfps, MXNet) is counted in the step that it
delays. Beside the median, `mean_s` is the whole time divided by the steps, and ends only when all weights have been
read after the last update. tf-ps has no callbacks for steps: two epochs are timed from their beginning to where all
their steps are done, and divided by the steps of one worker. CPU seconds are user and system time of all processes,
servers included. Of tfps and Horovod, with the MLP and with VGG-19 at 5 Gbit/s, three rounds; of all others
one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tfps.types import Json
from tools import model_profiles
from tools.benchmarks.common import Outcome, median
from tools.netlab import Netlab, NetlabError
from tools.peer_runs import PEERS, Place, measure
from tools.peer_workers.common import Work
from tools.peers import PeerError

LAB_HOSTS = 5  # 2 workers, 2 servers, and whoever coordinates
MLP_MBIT = 1000.0
CLOSEST, ROUNDS = ("tfps", "horovod"), 3
TOGETHER = tuple(name for name in PEERS if name != "alone")  # which is on any network as on loopback
BYTES_DIVISOR = 16  # of the sleeping VGG-19 and of its bandwidth
HEADLINE = {"step_s": "s", "cpu_s": "cpu_s"}


@dataclass(frozen=True)
class Case:
    """One kind of work on one kind of network.

    Args:
        key: in names of figures.
        rate_mbit: of every host; None: loopback.
        peers: that are measured.
        repeated: whether tfps and what it is closest to are measured in three rounds, else in one, as all others are.
        colocated: servers are on the workers' hosts, so that everybody has the same two of them; else on their own.
    """

    key: str
    what: str
    work: Work
    rate_mbit: float | None = None
    peers: tuple[str, ...] = tuple(PEERS)
    colocated: bool = False
    repeated: bool = True


def cases(quick: bool) -> list[Case]:
    """What is measured."""
    mlp = Work(warmup_steps=5, steps=20)
    on_wire = replace(mlp, warmup_steps=3, steps=8) if quick else mlp
    sleeping = vgg19(warmup_steps=2, steps=3 if quick else 10)
    found = [
        Case("lo", "MLP, loopback", mlp),
        Case("1g_2hosts", "MLP, 1 Gbit/s, 2 hosts", on_wire, MLP_MBIT, TOGETHER, colocated=True),
    ]
    if not quick:
        found.append(Case("1g", "MLP, 1 Gbit/s", on_wire, MLP_MBIT, TOGETHER))
        found.append(Case("vgg19_lo", "sleeping VGG-19, loopback", sleeping, repeated=False))
        found.append(Case("vgg19_1g", "sleeping VGG-19, 1 Gbit/s", sleeping, MLP_MBIT, TOGETHER, repeated=False))
    for gbit in (5,) if quick else (5, 10, 20):
        what = f"sleeping VGG-19, {gbit} Gbit/s / {BYTES_DIVISOR}"
        peers = ("tfps", "horovod") if quick else tuple(PEERS)  # in five minutes
        found.append(Case(f"vgg19_{gbit}g", what, sleeping, gbit * 1000 / BYTES_DIVISOR, peers, repeated=gbit == 5))
    return found


def vgg19(warmup_steps: int, steps: int) -> Work:
    """Layers that sleep as long as those of VGG-19 compute, with a sixteenth of their parameters."""
    profile = model_profiles.load("vgg19").scaled(BYTES_DIVISOR)
    layers = tuple(
        (layer.name, layer.forward_s, layer.backward_s, layer.nbytes // model_profiles.ITEM_BYTES)
        for layer in profile.layers
    )
    return Work(warmup_steps, steps, layers=layers)


def run(quick: bool) -> Outcome:
    """All peers, one after the other, in every case; in further rounds `CLOSEST` alone. Medians over the rounds.

    What is left out, or fails, is printed and is in the outcome's runs, with the reason.
    """
    runs: list[dict[str, Json]] = []
    for number, case in itertools.product(range(1 if quick else ROUNDS), cases(quick)):
        if number and not case.repeated:
            continue
        for result in measure_case(replace(case, peers=CLOSEST) if number else case):
            runs.append({"case": case.key, "round": number, "rate_mbit": case.rate_mbit, **result})
            print(f"{case.what:31} {describe(result)}", flush=True)
    return Outcome(headline(runs), runs)


def measure_case(case: Case) -> Iterator[dict[str, Json]]:
    """Every peer of the case once; for those that are left out or fail a result with the reason instead of figures."""
    able = []
    for name in case.peers:
        if (reason := reason_to_leave_out(name, case)) is None:
            able.append(name)
        else:
            yield {"peer": name, "left_out": reason}
    if case.rate_mbit is None:
        yield from _measure_at(Place(), able, case.work)
        return
    try:
        with Netlab(LAB_HOSTS, case.rate_mbit) as lab:
            lab.probe(together=False)
            workers, servers, last = lab.hosts[:2], lab.hosts[2:4], lab.hosts[4]
            yield from _measure_at(Place((*workers, *(workers if case.colocated else servers), last)), able, case.work)
    except NetlabError as error:
        for name in able:
            yield {"peer": name, "left_out": f"no hosts: {error}"}


def reason_to_leave_out(name: str, case: Case) -> str | None:
    """Why a peer cannot do a case; None if it can."""
    peer = PEERS[name]
    if case.work.layers and peer.sleeps is not True:
        return str(peer.sleeps)
    return peer.absence


def _measure_at(place: Place, names: list[str], work: Work) -> Iterator[dict[str, Json]]:
    for name in names:
        try:
            yield measure(name, place, work)
        except PeerError as error:
            yield {"peer": name, "failed": str(error)}


def describe(result: dict[str, Json]) -> str:
    """One result for people."""
    name = f"{result['peer']:9}"
    if "left_out" in result:
        return f"{name} left out: {result['left_out']}"
    if "failed" in result:
        return f"{name} FAILED: {result['failed']}"
    overslept = f", overslept {result['overslept_s']:.3f}" if "overslept_s" in result else ""
    return (
        f"{name} {result['step_s']:.3f} s/step (mean with last updates {result['mean_s']:.3f}{overslept}), "
        f"{result['cpu_s']:.3f} CPU s/step, load before {result['load']:.1f}"
    )


def headline(runs: list[dict[str, Json]]) -> dict[str, float]:
    """`CASE` and peer: `tfps_lo_s`, `tfps_lo_cpu_s`, ..., medians over rounds; less is better."""
    figures: dict[str, float] = {}
    measured = [one for one in runs if "step_s" in one]
    for case, peer in dict.fromkeys((one["case"], one["peer"]) for one in measured):
        same = [one for one in measured if (one["case"], one["peer"]) == (case, peer)]
        for key, suffix in HEADLINE.items():
            figures[f"{peer.replace('-', '_')}_{case}_{suffix}"] = median(same, key)
    return figures
