"""The lower bound of docs/lower_bound.md in cases computed by hand.

tests/test_site.py compares the calculator of docs/size.md with it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from bounds import Cluster, lower_bound

from tools.model_profiles import Layer, Profile

MB = 1_000_000
MEGABYTE_PER_S = 0.008  # Gbit/s


def profile(*layers: tuple[float, float, int]) -> Profile:
    return Profile("test", tuple(Layer(chr(97 + i), *layer) for i, layer in enumerate(layers)), "made for a test")


def cluster(workers: int, pservers: int, *, dedicated: bool = False) -> Cluster:
    return Cluster(workers, pservers, MEGABYTE_PER_S, latency_s=0.0, cpu_gb_s=0.0, dedicated=dedicated)


@pytest.mark.parametrize(
    ("workers", "pservers", "busiest"),
    [
        (1, 3, 0.0),
        (2, 1, 1.0),
        (2, 2, 1.0),
        (3, 4, 1.2),
        (4, 1, 3.0),
        (4, 2, 2.0),
        (4, 4, 1.5),
        (4, 8, 1.0),
        (8, 8, 1.75),
    ],
)
def test_the_busiest_link_of_the_best_placement(workers: int, pservers: int, busiest: float) -> None:
    """N of both: 2 (N - 1) / N. 3 and 4: host 3 owns 0.4, sends 1.2; the others own 0.2 each, send 0.8 + 0.4."""
    assert lower_bound(profile((0.0, 0.0, MB)), cluster(workers, pservers)) == pytest.approx(busiest)


def test_the_bound_exposes_the_first_layers_and_all_bytes() -> None:
    hosts = cluster(1, 1, dedicated=True)
    two_layers = profile((1.0, 0.5, MB), (1.0, 0.5, 2 * MB))
    assert lower_bound(two_layers, hosts) == pytest.approx(0.5 + 1 + 3)  # all bytes, beside b's own passes
    heavy_first = profile((1.0, 0.5, 2 * MB), (1.0, 0.5, MB // 2))
    assert lower_bound(heavy_first, hosts) == pytest.approx(3 + 2)  # the first layer, beside nothing
    assert lower_bound(profile((1.0, 0.5, MB)), replace(hosts, latency_s=0.25)) == pytest.approx(1.5 + 1 + 0.5)
