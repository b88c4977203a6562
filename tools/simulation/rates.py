"""How fast each message under way gets on: max-min fair shares of links and processors.

Rates are bytes per second in arrays of shape (2, workers, pservers); [0] are pushes, [1] replies. Every stream carries
at most one message at a time in each direction, as HTTP/2 does it with one message after the other on a stream. TCP
gives the connections that share a link about equal parts, at both ends of it; a processor is shared likewise: `cost_s`
is what a byte of a message takes at one end (per-slice cost included), so a process with one core lets the rates of its
streams, each times its cost, add up to 1.

Shares are found by filling: all rates rise together until a resource is used up; the streams through it keep that rate,
and the others rise on.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tools.simulation.settings import Cluster

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

UNLIMITED = 1e15  # bytes/s of a message that needs neither link nor processor: inside a host, with costs of 0
_TIE = 1 + 1e-9  # shares that differ by rounding are one


class Rates(Protocol):
    """Shares for one kind of cluster."""

    def __call__(self, active: Mask, cost_s: Array) -> Array:
        """The rates of the active messages; of the others any."""


class ExactRates:
    """Every stream of every worker."""

    def __init__(self, cluster: Cluster) -> None:
        w, s, hosts = cluster.workers, cluster.pservers, cluster.hosts
        # Resources: links that send, links that receive, workers, pservers, the machine, and one without limit.
        first_worker, machine = 2 * hosts, 2 * hosts + w + s
        self._capacity = np.full(machine + 2, np.inf)
        self._capacity[:first_worker] = cluster.bytes_per_s
        self._capacity[first_worker:machine] = cluster.process_cores
        if cluster.machine_cores is not None:
            self._capacity[machine] = cluster.machine_cores
        self._uses = np.full((2, w, s, 5), machine + 1)
        self._wired = np.zeros((2, w, s), bool)
        for worker in range(w):
            for pserver in range(s):
                host = cluster.pserver_host(pserver)
                self._uses[:, worker, pserver, 2:] = first_worker + worker, first_worker + w + pserver, machine
                if host != worker:
                    self._wired[:, worker, pserver] = True
                    self._uses[0, worker, pserver, :2] = worker, hosts + host
                    self._uses[1, worker, pserver, :2] = host, hosts + worker

    def __call__(self, active: Mask, cost_s: Array) -> Array:
        rates = np.full(active.shape, UNLIMITED)
        where = np.flatnonzero(active)
        uses = self._uses.reshape(-1, 5)[where]
        cost = cost_s.reshape(-1)[where]
        amounts = np.empty(uses.shape)
        amounts[:, :2] = self._wired.reshape(-1, 1)[where]
        amounts[:, 2:4] = cost[:, None]
        amounts[:, 4] = 2 * cost
        left, count = self._capacity.copy(), len(self._capacity)
        flat = rates.reshape(-1)
        while len(where):
            demand = np.bincount(uses.ravel(), amounts.ravel(), count)
            shares = np.divide(left, demand, out=np.full(count, np.inf), where=demand > 0)
            rate = shares.min()
            if rate >= UNLIMITED:
                break
            fixed = ((shares <= rate * _TIE)[uses] & (amounts > 0)).any(axis=1)
            flat[where[fixed]] = rate
            left -= np.bincount(uses[fixed].ravel(), amounts[fixed].ravel() * rate, count)
            np.maximum(left, 0, out=left)
            keep = ~fixed
            where, uses, amounts = where[keep], uses[keep], amounts[keep]
        return rates


class SymmetricRates:
    """One worker that stands for all.

    All workers do the same at the same time, so a message to or from a pserver means one per worker. Host p, with
    worker and pserver, sends the pushes to all pservers but p, and the replies of pserver p to the other workers; it
    receives the mirror image. The stream inside a host is taken to keep step with the others.
    """

    def __init__(self, cluster: Cluster) -> None:
        w, s = cluster.workers, cluster.pservers
        self._workers, self._rate = w, cluster.bytes_per_s
        self._cores, self._machine = cluster.process_cores, cluster.machine_cores or np.inf
        self._remote = np.array([cluster.remote_workers(p) for p in range(s)], float)
        # Hosts that have both, and whether there are hosts with a worker only.
        self._mixed = self._remote < w
        self._plain = bool(cluster.dedicated or w > s)
        # What other hosts with workers there are for a push to p to leave from.
        self._leaves = self._remote > 0

    def __call__(self, active: Mask, cost_s: Array) -> Array:
        rates = np.full(active.shape, UNLIMITED)
        open_ = active[:, 0, :].copy()
        cost = cost_s[:, 0, :]
        fixed_rates = np.zeros(open_.shape)
        while open_.any():
            shares = self._shares(open_.astype(float), fixed_rates, cost)
            wire, pserver, worker = shares
            least = min(float(wire.min()), float(pserver.min()), worker)
            if least >= UNLIMITED:
                break
            limit = least * _TIE
            if worker <= limit:
                now = open_.copy()
            else:
                now = open_ & (pserver <= limit)[None, :]
                for direction in (0, 1):
                    now[direction] |= open_[direction] & self._stopped(wire <= limit, direction)
            fixed_rates[now] = least
            open_ &= ~now
        chosen = active[:, 0, :] & ~open_
        rates[:, 0, :][chosen] = fixed_rates[chosen]
        return rates

    def _shares(self, open_: Array, fixed: Array, cost: Array) -> tuple[Array, Array, float]:
        """What each resource could give every open stream: links (2, pservers + 1), pserver processes, workers."""
        wire = np.full((2, len(self._remote) + 1), np.inf)
        for direction in (0, 1):
            other = 1 - direction
            # Sending for direction 0: pushes of the host's worker and replies of its pserver; receiving is the mirror
            # image.
            amount = self._mixed * (open_[direction].sum() - open_[direction]) + self._remote * open_[other]
            used = self._mixed * (fixed[direction].sum() - fixed[direction]) + self._remote * fixed[other]
            _share(self._rate - used, amount, wire[direction, :-1])
            if self._plain and open_[direction].any():
                wire[direction, -1] = max(self._rate - float(fixed[direction].sum()), 0) / float(open_[direction].sum())
        pserver = np.full(len(self._remote), np.inf)
        _share(self._cores - self._workers * (fixed * cost).sum(0), self._workers * (open_ * cost).sum(0), pserver)
        load, used_s = float((open_ * cost).sum()), float((fixed * cost).sum())
        worker = np.inf if not load else max(self._cores - used_s, 0) / load
        if load and self._machine < np.inf:
            worker = min(worker, max(self._machine - 2 * self._workers * used_s, 0) / (2 * self._workers * load))
        return wire, pserver, float(worker)

    def _stopped(self, full: Mask, direction: int) -> Mask:
        """Which streams of `direction` pass one of the full links."""
        own, mirror = full[direction], full[1 - direction]
        # A push to p leaves from every host with a worker but p.
        others = own[:-1] & self._mixed
        stopped: Mask = (others.sum() - others > 0) | (own[-1] & self._leaves)
        stopped |= mirror[:-1] & self._leaves
        return stopped


def _share(left: Array, amount: Array, out: Array) -> None:
    np.divide(np.maximum(left, 0), amount, out=out, where=amount > 0)
