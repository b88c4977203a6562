"""What is sent each step: layers in buckets, buckets in pieces, and which pserver owns each piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfps.exchange.layout import Placer, bucket_limit, cut
from tools.model_profiles import ITEM_BYTES, Profile
from tools.simulation.settings import Cluster, Settings


@dataclass(frozen=True, slots=True)
class Piece:
    """A message of each worker and step, and of the reply: a slice, or under the older policies a variable or a
    part."""

    number: int
    bucket: int
    index: int
    nbytes: int
    owner: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The exchange of one step.

    Attributes:
        layers: per bucket, the layers in it, in forward order; a bucket's number is its priority.
        pieces: per bucket.
    """

    layers: list[list[int]]
    pieces: list[list[Piece]]

    def bytes_per_pserver(self, pservers: int) -> list[int]:
        """What each owns."""
        owned = [0] * pservers
        for pieces in self.pieces:
            for piece in pieces:
                owned[piece.owner] += piece.nbytes
        return owned


def make_plan(profile: Profile, cluster: Cluster, settings: Settings) -> Plan:
    """Buckets and pieces as tfps makes them, or, for the policies with barriers, as PaddlePaddle does."""
    fuse_bytes = settings.slice_bytes if settings.fuse_bytes is None else settings.fuse_bytes
    layers = _fused(profile, 0 if settings.barriers or not settings.fuse else fuse_bytes, settings.first_bytes)
    placer = Placer(range(cluster.pservers), "round_robin" if settings.barriers else "balanced")
    pieces, number = [], 0
    for bucket, members in enumerate(layers):
        nbytes = sum(profile.layers[layer].nbytes for layer in members)
        if not settings.barriers:
            sizes = [piece.nbytes for piece in cut(nbytes, settings.slice_bytes, ITEM_BYTES)]
            owners = placer.place(sizes)
        elif nbytes < settings.split_parameters * ITEM_BYTES:
            sizes, owners = [nbytes], placer.place([nbytes])
        else:
            sizes = _evenly(nbytes, cluster.pservers)
            owners = list(range(len(sizes)))
        pieces.append([Piece(number + i, bucket, i, s, o) for i, (s, o) in enumerate(zip(sizes, owners, strict=True))])
        number += len(sizes)
    return Plan(layers, pieces)


def _fused(profile: Profile, fuse_bytes: int, first_bytes: int) -> list[list[int]]:
    """The layers that have parameters; neighbours together while they stay within the limit, as tfps fuses them."""
    buckets: list[list[int]] = []
    filled = before = 0
    for number, layer in enumerate(profile.layers):
        if not layer.nbytes:
            continue
        limit = bucket_limit(before - filled, fuse_bytes, first_bytes) if fuse_bytes else 0
        before += layer.nbytes
        if buckets and filled + layer.nbytes <= limit:
            buckets[-1].append(number)
            filled += layer.nbytes
        else:
            buckets.append([number])
            filled = layer.nbytes
    return buckets


def _evenly(nbytes: int, parts: int) -> list[int]:
    """Sizes of up to `parts` pieces of whole items that differ by at most one item."""
    items = nbytes // ITEM_BYTES
    parts = min(parts, items)
    return [(items // parts + (i < items % parts)) * ITEM_BYTES for i in range(parts)]


def link_bytes(cluster: Cluster, owned: Sequence[int]) -> tuple[list[int], list[int]]:
    """Bytes that each host sends and receives through its link per step."""
    tx, rx = [0] * cluster.hosts, [0] * cluster.hosts
    for pserver, nbytes in enumerate(owned):
        host, remote = cluster.pserver_host(pserver), cluster.remote_workers(pserver)
        tx[host] += nbytes * remote
        rx[host] += nbytes * remote
        for worker in range(cluster.workers):
            if worker != host:
                tx[worker] += nbytes
                rx[worker] += nbytes
    return tx, rx
