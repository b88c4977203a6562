"""Emulated training: real workers and pservers that sleep instead of computing, on hosts with a bandwidth."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

import pytest

from tools import netlab
from tools.emulation import Emulation, Task
from tools.model_profiles import Layer, Profile
from tools.netlab import Netlab
from tools.simulation import POLICIES, Cluster, Policy, lower_bound

RATE_MBIT = 200.0
PROFILE = Profile(
    "tiny", tuple(Layer(f"layer {number}", 0.02, 0.04, 400_000) for number in range(5)), "made up for this test"
)

pytestmark = pytest.mark.skipif(netlab.unavailable() is not None, reason=str(netlab.unavailable()))


@pytest.fixture(scope="module")
def emulation() -> Iterator[Emulation]:
    with Netlab(2, RATE_MBIT) as lab, Emulation(lab.hosts, 2, 2) as emulation:
        yield emulation


def task(policy: Policy, steps: int = 3) -> Task:
    return Task(PROFILE, policy, 2, 2, 32 * 1024, 128 * 1024, split_parameters=50_000, warmup_steps=1, steps=steps)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_beats_the_lower_bound(emulation: Emulation, policy: Policy) -> None:
    found = emulation.run(task(policy))
    assert len(found["steps_s"]) == 3
    # What a shaper lets through unshaped after a pause is a few percent here.
    assert found["step_s"] > 0.9 * lower_bound(PROFILE, Cluster(2, 2, rate_gbit=RATE_MBIT / 1000))
    assert found["worker_cpu_s"] > 0
    assert found["pserver_cpu_s"] > 0


def test_a_barrier_after_backward_waits_for_the_whole_exchange(emulation: Emulation) -> None:
    found = emulation.run(task("barrier"))
    wire_s = PROFILE.nbytes * 8 / (RATE_MBIT * 1e6)  # of 2 workers on 2 hosts each sends half and gets half twice
    # What comes while a worker is kept from running has not been waited for: that may spoil a step, hardly all.
    assert max(found["steps_s"]) > PROFILE.compute_s + 0.8 * wire_s
    assert fmean(found["steps_s"]) == pytest.approx(PROFILE.compute_s + found["wait_s"])


def test_a_task_survives_its_way_to_another_process() -> None:
    assert Task.from_json(task("priority").to_json()) == task("priority")


def test_policies_with_barriers_split_large_variables_and_have_no_window() -> None:
    before, ours = task("overlap"), task("priority")
    assert [len(pieces) for pieces in before.plan.pieces] == [2] * 5
    assert (before.config.policy, before.config.window_bytes) == ("fifo", 2**40)
    assert (ours.config.policy, ours.config.window_bytes) == ("priority", 128 * 1024)
