"""How short a step can be at best (docs/lower_bound.md): what the calculator in docs/size/bound.js must compute."""

from __future__ import annotations

from dataclasses import dataclass

from tfps.runtime.report import least_step_s
from tools.model_profiles import Profile


@dataclass(frozen=True)
class Cluster:
    """Hosts, links and what tfps itself costs. Worker i is on host i.

    Args:
        rate_gbit: of every host's link, in each direction, 10**9 bits per second.
        goodput: what part of the rate payload gets.
        latency_s: one way, between hosts.
        dedicated: pservers are on hosts of their own; else pserver i is on host i too.
        cpu_gb_s: CPU seconds to push and pull 10**9 bytes, all four ends together.
        process_cores: what one process can use.
    """

    workers: int
    pservers: int
    rate_gbit: float
    goodput: float = 1.0
    latency_s: float = 50e-6
    dedicated: bool = False
    cpu_gb_s: float = 1.7
    process_cores: float = 1.0


def lower_bound(profile: Profile, cluster: Cluster) -> float:
    """Seconds that a step takes at least, whatever is cut, placed and ordered how, with all workers alike and in step.

    Layer k's gradient exists after the backward passes of layers k and above, A(k); its sum must be back when only the
    forward passes of layers k and above are left, F(k). Layers below k exist later and are needed earlier, so that
    *all* bytes of layers 0 to k, P(k), are pushed and come back within step - A(k) - F(k):

        step >= max over k of A(k) + F(k) + exchange(P(k))
    """
    layers = ((layer.forward_s + layer.backward_s, layer.nbytes) for layer in profile.layers)
    return least_step_s(layers, profile.compute_s, lambda nbytes: exchange_s(cluster, nbytes))


def exchange_s(cluster: Cluster, nbytes: int) -> float:
    """Seconds from the first push until the last reply of `nbytes`: the longest of what any one resource needs."""
    end_s = cluster.cpu_gb_s * nbytes / 4e9  # per end: worker and pserver, send and receive
    cores, workers = cluster.process_cores, cluster.workers
    found = [2 * end_s / cores, 2 * end_s * workers / cluster.pservers / cores]
    if cluster.dedicated or workers > 1:
        wire_s = nbytes / (cluster.rate_gbit * 1e9 / 8 * cluster.goodput)
        found.append(wire_s * busiest_link(cluster) + cluster.latency_s)
        found.append(wire_s * remote_part(cluster) + 2 * cluster.latency_s)
    return max(found)


def busiest_link(cluster: Cluster) -> float:
    """Bytes that the busiest link carries in one direction per byte of parameters, under the best placement.

    A host with a worker and a pserver that owns the part f sends 1 - f of the pushes and (workers - 1) f of replies;
    one with a pserver only sends workers f; one with a worker only sends 1. Receiving is the mirror image. The best
    placement makes the largest of them as small as it can be, with the parts adding up to 1.
    """
    workers, pservers = cluster.workers, cluster.pservers
    if cluster.dedicated:
        return max(1.0, workers / pservers)
    if workers <= 2:
        return float(workers - 1)  # two send one byte per byte wherever it is owned
    if pservers <= workers:
        return 1 + (workers - 2) / pservers
    alone, mixed = (pservers - workers) / workers, workers / (workers - 2)
    return max(1.0, (1 + mixed) / (mixed + alone))


def remote_part(cluster: Cluster) -> float:
    """What part of the parameters some worker must push to another host, under the best placement."""
    if cluster.dedicated or cluster.pservers < cluster.workers:
        return 1.0
    return 1 - 1 / cluster.workers
