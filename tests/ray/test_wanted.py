"""What a user asks Ray for is checked before anything starts; needs no Ray."""

from __future__ import annotations

import pytest

from tfps.errors import ConfigError
from tfps.ray.wanted import (
    as_options,
    check_count,
    check_placement,
    check_pservers,
    check_resources,
    check_timeout,
    spread,
)
from tfps.types import Argument


def test_each_node_that_has_workers_gets_one_pserver() -> None:
    assert spread(["b", "b", "a", "c", "a"], None) == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("count", "nodes"), [(1, ["b"]), (2, ["b", "a"]), (3, ["b", "a", "b"]), (5, ["b", "a", "b", "a", "b"])]
)
def test_pservers_take_the_nodes_of_workers_in_turn(count: int, nodes: list[str]) -> None:
    assert spread(["b", "b", "a"], count) == nodes


def test_resources_become_the_arguments_that_ray_has_for_them() -> None:
    assert as_options({"CPU": 2, "GPU": 0.5, "memory": 2**30, "fast_disk": 1}, {"pip": ["numpy"]}) == {
        "num_cpus": 2,
        "num_gpus": 0.5,
        "memory": 2**30,
        "runtime_env": {"pip": ["numpy"]},
        "resources": {"fast_disk": 1},
    }


def test_what_is_not_asked_for_is_not_reserved() -> None:
    assert as_options({}, None) == {"num_cpus": 0, "num_gpus": 0, "resources": {}}


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2", None])
def test_a_number_of_processes_is_whole_and_positive(count: Argument) -> None:
    with pytest.raises(ConfigError, match=r"^workers must be a whole number from 1, got "):
        check_count("workers", count)


def test_no_number_of_pservers_is_a_number() -> None:
    check_pservers(None, None)
    with pytest.raises(ConfigError, match=r"^pservers must be .* or None for one on each node that has .*, got 0$"):
        check_pservers(0, None)


@pytest.mark.parametrize("resources", [4, [("CPU", 1)], {"CPU": -1}, {"CPU": "1"}, {"CPU": float("inf")}])
def test_resources_are_amounts_by_name(resources: Argument) -> None:
    with pytest.raises(ConfigError, match=r"^resources_per_pserver must be amounts from 0 by name such as "):
        check_pservers(None, resources)
    with pytest.raises(ConfigError, match=r"^resources_per_worker must be amounts from 0 by name such as "):
        check_resources("resources_per_worker", resources)


@pytest.mark.parametrize(
    ("resources", "strategy", "message"),
    [
        ({}, "PACK", 'resources_per_worker must have an amount above 0 such as {"CPU": 1}, got {}'),
        ({"CPU": 0}, "PACK", "resources_per_worker must have an amount above 0"),
        (None, "pack", "placement_strategy must be one of PACK, SPREAD, STRICT_PACK, STRICT_SPREAD, got 'pack'"),
    ],
)
def test_places_that_ray_would_refuse_without_naming_an_argument_are_refused(
    resources: Argument, strategy: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_placement(resources, strategy)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("inf"), float("nan"), "60", None, True])
def test_a_wait_has_an_end(timeout_s: Argument) -> None:
    with pytest.raises(ConfigError, match=r"^start_timeout_s must be a positive number of seconds, got "):
        check_timeout(timeout_s)
