"""The report: what the times of gradients and updates say about a step."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tfps
from tfps.exchange.interface import Link
from tfps.runtime.report import History, Report, Round, make_report
from tools import model_profiles

LAYERS = [(0.010, 0.020, 400_000), (0.020, 0.040, 100_000), (0.010, 0.020, 4_000_000), (0.005, 0.010, 1_000_000)]


def history(layers: list[tuple[float, float, int]], bytes_per_s: float, steps: int = 8) -> list[History]:
    """A worker with these layers (forward, backward, bytes) on a link that sends the most urgent gradient first."""
    count = len(layers)
    rounds: list[list[Round]] = [[] for _ in layers]
    clock_s, done = 0.0, [0.0] * count
    for _ in range(steps):
        for index, (forward_s, _, _) in enumerate(layers):
            clock_s = max(clock_s, done[index]) + forward_s
        ready = [0.0] * count
        for index in reversed(range(count)):
            clock_s += layers[index][1]
            ready[index] = clock_s
        left = {index: layers[index][2] / bytes_per_s for index in range(count)}
        wire_s = min(ready)
        while left:  # the link, from one gradient to the next
            waiting = [index for index in left if ready[index] <= wire_s]
            if not waiting:
                wire_s = min(ready[index] for index in left)
                continue
            urgent = min(waiting)
            until_s = min([ready[index] for index in left if ready[index] > wire_s], default=float("inf"))
            spent_s = min(left[urgent], until_s - wire_s)
            wire_s, left[urgent] = wire_s + spent_s, left[urgent] - spent_s
            if left[urgent] <= 1e-12:
                del left[urgent]
                done[urgent] = wire_s
        for index in range(count):
            rounds[index].append(Round(ready[index], done[index]))
    return [History(f"layer {n}", n, layers[n][2], tuple(rounds[n])) for n in range(count)]


def report(bytes_per_s: float, links: int = 1) -> Report:
    each = [Link(f"host:{n}", bytes_per_s / links) for n in range(links)]
    return make_report(history(LAYERS, bytes_per_s), each)


def test_a_fast_network_leaves_only_computation() -> None:
    found = report(1e12)
    assert found.compute_s == pytest.approx(sum(f + b for f, b, _ in LAYERS), rel=0.01)
    assert found.exposed_wait_s == pytest.approx(0, abs=1e-4)
    assert found.limit == "computation"
    assert "would not help" in str(found)
    assert "makes no difference" in str(found)


def test_a_slow_network_shows_as_exposed_wait_and_names_the_link() -> None:
    found = report(20e6)
    assert found.step_s == pytest.approx(5.5e6 / 20e6, rel=0.15)
    assert found.exposed_wait_s == pytest.approx(found.step_s - 0.135, rel=0.25)
    assert found.limit == "this worker's link (160 Mbit/s to all pservers)"
    assert found.with_twice_the_bandwidth_s < 0.7 * found.step_s
    assert found.with_one_more_pserver_s == pytest.approx(found.step_s)


def test_layers_share_forward_and_backward_as_they_were() -> None:
    layers = report(1e12).layers
    assert [layer.backward_s for layer in layers[:3]] == pytest.approx([b for _, b, _ in LAYERS[:3]], rel=0.01)
    # The last layer's backward is not seen, so that forward is found within what that may hide.
    assert sum(layer.forward_s for layer in layers) == pytest.approx(0.045, rel=0.4)


def test_a_slow_pserver_is_named_and_one_more_would_help() -> None:
    links = [Link("a:1", 2e6), Link("b:1", 9e6), Link("c:1", 9e6)]
    found = make_report(history(LAYERS, 20e6), links)
    assert found.limit == "pserver a:1: its link (16 Mbit/s)"
    assert found.with_one_more_pserver_s < found.step_s


def test_compression_is_suggested_with_what_it_would_bring_where_a_link_is_the_limit() -> None:
    found = report(20e6)
    assert list(found.with_codec_s) == ["bfloat16", "int8"]
    assert found.with_codec_s["bfloat16"] == found.with_twice_the_bandwidth_s
    assert found.compute_s < found.with_codec_s["int8"] < found.with_codec_s["bfloat16"]
    assert f"with compression='int8': {found.with_codec_s['int8']:.3g} s a step" in str(found)
    assert found.with_inner_steps_s == pytest.approx(found.compute_s + found.exposed_wait_s / 50)
    assert f"with mode='diloco', inner_steps=50: {found.with_inner_steps_s:.3g} s a step, but" in str(found)
    links = [Link("a:1", 20e6)]
    compressed = [dataclasses.replace(each, sent_bytes=each.nbytes // 2) for each in history(LAYERS, 20e6)]
    exact = [dataclasses.replace(each, compressible=False) for each in history(LAYERS, 20e6)]
    for none in (*(make_report(each, links) for each in (compressed, exact)), report(1e12)):
        assert not none.with_codec_s
        assert "with compression" not in str(none)


def test_a_pserver_without_cpu_left_is_named() -> None:
    found = make_report(history(LAYERS, 20e6), [Link("a:1", 20e6, cpu_s_per_step=0.27)])
    assert found.limit.startswith("pserver a:1: its CPU (")


def test_waiting_on_an_idle_link_is_waiting_for_other_workers() -> None:
    found = make_report(history(LAYERS, 20e6), [Link("a:1", 1e9)])
    assert found.limit.startswith("other workers")


def test_a_single_worker_waits_for_no_other() -> None:
    found = make_report(history(LAYERS, 20e6), [Link("a:1", 1e9)], other_workers=False)
    assert found.limit == "round trips and the work per message, not bytes"


def test_of_two_ways_the_network_counts_and_not_shared_memory() -> None:
    links = [Link("a:1", 10e6), Link("b:1", 5e9, shared_memory=True)]
    found = make_report(history(LAYERS, 20e6), links)
    assert found.bytes_per_s == pytest.approx(20e6)  # in the time that the network takes, as much stays on the host
    assert found.limit == "this worker's link (80 Mbit/s to all pservers)"
    assert found.with_twice_the_bandwidth_s < found.step_s


def test_without_a_network_the_host_is_the_limit() -> None:
    links = [Link(f"{name}:1", 10e6, shared_memory=True) for name in "ab"]
    found = make_report(history(LAYERS, 20e6), links)
    assert found.bytes_per_s == pytest.approx(20e6)
    assert found.limit == "this host's memory and processors (20 MB/s to all pservers)"


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(tfps.TfpsError, match="at least 4 training steps after the first ones, got 3"):
        make_report(history(LAYERS, 1e9, steps=3), [])
    with pytest.raises(tfps.TfpsError, match="got 0"):
        make_report([], [])


def test_a_step_that_only_waits_without_a_network_has_no_better_estimate() -> None:
    found = make_report([History("all", 0, 4, tuple(Round(step, step + 1.0) for step in range(6)))], [])
    assert (found.step_s, found.exposed_wait_s, found.compute_s) == (1.0, 1.0, 0.0)
    assert found.with_twice_the_bandwidth_s == found.with_one_more_pserver_s == found.without_schedule_s == 1.0
    assert "waiting for parameters" in str(found)


def test_buckets_of_another_model_are_left_out() -> None:
    rare = History("other", 0, 4, (Round(0.0, 1.0),))
    links = [Link("a:1", 20e6)]
    assert make_report([*history(LAYERS, 20e6), rare], links) == make_report(history(LAYERS, 20e6), links)


def test_the_profile_has_the_form_that_the_tools_read(tmp_path: Path) -> None:
    found = report(20e6)
    found.save_profile(tmp_path / "mine.json")
    content = json.loads((tmp_path / "mine.json").read_text())
    assert content["name"] == "mine"
    assert [layer["nbytes"] for layer in content["layers"]] == [nbytes for _, _, nbytes in LAYERS]
    assert all(set(layer) == {"name", "forward_s", "backward_s", "nbytes"} for layer in content["layers"])
    assert model_profiles.load(tmp_path / "mine.json").compute_s == pytest.approx(
        sum(layer.forward_s + layer.backward_s for layer in found.layers)
    )


@given(
    layers=st.lists(
        st.tuples(st.floats(1e-4, 1e-2), st.floats(1e-4, 1e-2), st.integers(1, 10**6).map(lambda n: 4 * n)),
        min_size=1,
        max_size=6,
    ),
    bytes_per_s=st.floats(1e6, 1e10),
)
def test_no_times_are_negative_and_parts_add_up(layers: list[tuple[float, float, int]], bytes_per_s: float) -> None:
    found = make_report(history(layers, bytes_per_s), [Link("a:1", bytes_per_s)])
    assert found.compute_s + found.exposed_wait_s == pytest.approx(found.step_s)
    assert 0 <= found.exposed_wait_s <= found.step_s
    assert 0 <= found.overlap <= 1
    assert found.with_twice_the_bandwidth_s <= found.step_s * 1.001
    assert found.without_schedule_s >= found.step_s
    assert all(layer.forward_s >= 0 and layer.backward_s >= 0 for layer in found.layers)
