"""What a user asks Ray for is checked before anything starts; how a process takes its place in a job; needs no Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jobs
import pytest
import training

import tfps
from tfps.config import Config, Launch
from tfps.errors import ClosedError, ConfigError
from tfps.launch.job import Job
from tfps.ray.job import (
    Recovery,
    as_options,
    check_count,
    check_placement,
    check_pservers,
    check_resources,
    default_sigterm,
    hashes_alike,
    program,
    spread,
    take_place,
)
from tfps.types import Argument
from tfps.wire.job_token import JobToken

SECRET = "the-token-of-this-job-0123456789"


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


def test_workers_have_one_order_of_sets_unless_the_user_says_otherwise() -> None:
    assert hashes_alike(None) == {"env_vars": {"PYTHONHASHSEED": "0"}}
    given = {"pip": ["numpy"], "env_vars": {"A": "b", "PYTHONHASHSEED": "7"}}
    assert hashes_alike(given) == given


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2", None])
def test_a_number_of_processes_is_whole_and_positive(count: Argument) -> None:
    with pytest.raises(ConfigError, match=r"^workers must be a whole number from 1, got "):
        check_count("workers", count)


def test_no_number_of_pservers_is_a_number() -> None:
    check_pservers(None, None, 1.0)
    with pytest.raises(ConfigError, match=r"^pservers must be .* or None for one on each node that has .*, got 0$"):
        check_pservers(0, None, 1.0)


@pytest.mark.parametrize("resources", [4, [("CPU", 1)], {"CPU": -1}, {"CPU": "1"}, {"CPU": float("inf")}])
def test_resources_are_amounts_by_name(resources: Argument) -> None:
    with pytest.raises(ConfigError, match=r"^resources_per_pserver must be amounts from 0 by name such as "):
        check_pservers(None, resources, 1.0)
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
        check_pservers(None, None, timeout_s)


@pytest.mark.parametrize("least", [0, 4, 1.0, True, "2"])
def test_the_fewest_workers_are_some_and_not_more_than_all(least: Argument) -> None:
    with pytest.raises(ConfigError, match=r"^min_workers must be a whole number from 1 to workers=3, or None .*, got "):
        Recovery(3, least)


@pytest.mark.parametrize(("failures", "least"), [(-1, 1), (1.5, 1), (True, 1), (None, 1), (1, None)])
def test_only_a_job_that_goes_on_without_a_worker_starts_it_again(failures: Argument, least: int | None) -> None:
    with pytest.raises(ConfigError, match=r"^max_failures must be a whole number from 0 and needs min_workers, got "):
        Recovery(3, least, failures)


def test_a_worker_starts_again_so_often_and_while_there_is_a_job_to_join() -> None:
    recovery = Recovery(4, min_workers=2, max_failures=3)
    assert [recovery.starts_again(before, ended_well=0) for before in range(5)] == [True, True, True, False, False]
    assert not recovery.starts_again(0, ended_well=1)
    assert not Recovery(4).starts_again(0, ended_well=0)


def test_a_job_goes_on_as_long_as_enough_are_left() -> None:
    assert [Recovery(4, min_workers=2).goes_on_without(lost) for lost in (1, 2, 3)] == [True, True, False]
    assert not Recovery(4).goes_on_without(1)
    assert (Recovery(4).least, Recovery(4).variables) == (4, {})
    assert (Recovery(4, 2).least, Recovery(4, 2).variables) == (2, {"TFPS_MIN_WORKERS": "2"})


def test_tfps_may_handle_the_signal_that_ray_would() -> None:
    def of_ray(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, of_ray)
    try:
        with default_sigterm():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is of_ray
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """One that is forgotten after the test."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TFPS_")}
    monkeypatch.setattr(os, "environ", variables)
    yield variables
    if path := variables.get("TFPS_TOKEN_FILE"):
        os.close(int(Path(path).name))


def test_a_process_finds_its_job_and_no_other(environment: dict[str, str]) -> None:
    environment["TF_CONFIG"] = "of another job"
    take_place(Job("train", 3).at(["a:1", "b:2"]), 2, SECRET, {"TFPS_MIN_WORKERS": "1"})
    assert Launch.from_environment(environment) == Launch(("a:1", "b:2"), 2, 3, "train")
    assert JobToken.read(environment["TFPS_TOKEN_FILE"]).reveal() == SECRET.encode()
    assert "TF_CONFIG" not in environment
    assert Config.from_environment(environment).min_workers == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_program_closes_its_strategies_however_it_ends(fails: bool) -> None:
    with contextlib.suppress(ZeroDivisionError), program():
        strategy = tfps.Strategy()
        model, inputs, targets = training.compiled(strategy)
        model.fit(inputs, targets, verbose=0)
        if fails:
            _ = 1 / 0
    with pytest.raises(ClosedError, match="the strategy is closed"):
        model.fit(inputs, targets, verbose=0)


def test_what_a_program_raises_is_what_its_caller_gets() -> None:
    with pytest.raises(ZeroDivisionError), program():
        _ = 1 / 0


def test_neither_tfps_nor_tfps_ray_imports_ray() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "import tfps, tfps.ray, tfps.ray.job\n"
        "try:\n    tfps.ray.run\nexcept tfps.ConfigError as error:\n    print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=jobs.ROOT, capture_output=True, text=True, timeout=60)
    assert said.stdout == "tfps.ray.run needs Ray, which is not installed: pip install 'tfps[ray]'\n", said.stderr
