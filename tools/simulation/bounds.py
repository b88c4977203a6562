"""How short a step can be at best. Derived in docs/lower_bound.md."""

from __future__ import annotations

from tfps.runtime.report import least_step_s
from tools.model_profiles import Profile
from tools.simulation.settings import Cluster


def lower_bound(profile: Profile, cluster: Cluster) -> float:
    """Seconds that a step takes at least, whatever is cut, placed and ordered how.

    Measured from turn to turn (end of forward, start of backward), with all workers alike and in step. Layer k's
    gradient exists after the backward passes of layers k and above, A(k); its sum must be back when only the forward
    passes of layers k and above are left, F(k). Layers below k exist later and are needed earlier, so that *all* bytes
    of layers 0 to k, P(k), are pushed and come back within step - A(k) - F(k):

        step >= max over k of A(k) + F(k) + exchange(P(k))

    k = 0 is the computing time and the exposed exchange of the first layer; the last k is all bytes, with hardly any
    computing beside them. `exchange(b)` is the longest of what b bytes need on any one resource: the busiest link under
    the best placement, after which a message still takes the latency; pushing to other hosts, after which a message
    takes the latency there and back; a worker's, a pserver's and the machine's processor; updates. What a slice costs
    whatever its size is left out: slices could be large.
    """
    layers = ((layer.forward_s + layer.backward_s, layer.nbytes) for layer in profile.layers)
    return least_step_s(layers, profile.compute_s, lambda nbytes: exchange_s(cluster, nbytes))


def exchange_s(cluster: Cluster, nbytes: int) -> float:
    """Seconds from the first push until the last update of `nbytes`, at least."""
    # Per byte and end: worker and pserver, send and receive.
    end_s = cluster.cpu_gb_s * nbytes / 4e9
    cores, workers = cluster.process_cores, cluster.workers
    found = [2 * end_s / cores, 2 * end_s * workers / cluster.pservers / cores, cluster.apply_gb_s * nbytes / 1e9]
    if cluster.machine_cores is not None:
        found.append(4 * end_s * workers / cluster.machine_cores)
    if cluster.dedicated or workers > 1:
        wire_s = nbytes / cluster.bytes_per_s
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
        # 1 - f + (workers - 1) f: alone a worker needs no link, two send one byte per byte wherever it is owned.
        return float(workers - 1)
    if pservers <= workers:
        return 1 + (workers - 2) / pservers
    # With the busiest at z, a mixed host may own (z - 1) / (workers - 2) and a pserver's own host z / workers.
    alone = (pservers - workers) / workers
    mixed = workers / (workers - 2)
    return max(1.0, (1 + mixed) / (mixed + alone))


def remote_part(cluster: Cluster) -> float:
    """What part of the parameters some worker must push to another host, under the best placement."""
    if cluster.dedicated or cluster.pservers < cluster.workers:
        return 1.0
    return 1 - 1 / cluster.workers
