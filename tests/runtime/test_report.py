"""The report: what the times of gradients and updates say about a step."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tfps
from tfps.exchange.interface import Link
from tfps.runtime.report import History, Report, Round, Stepping, make_report
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


@pytest.mark.parametrize("bytes_per_s", [1e12, 1e7])
def test_where_nothing_leaves_the_host_nothing_is_said_of_a_network(bytes_per_s: float) -> None:
    rounds = history(LAYERS, bytes_per_s)
    for links in ([], [Link("host:0", bytes_per_s, shared_memory=True)]):
        said = str(make_report(rounds, links))
        assert "exchange under way" in said
        assert not re.search("network|bandwidth|link", said), said
    assert "network in use" in str(report(bytes_per_s))


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


@pytest.mark.parametrize(
    ("late_s", "said"),
    [
        ({0: 0.0, 1: 0.2}, "rank 1%, which comes 0.2 s later to each step than the first"),
        ({0: 0.15, 1: 0.0, 2: 0.2}, "ranks 0, 2%, which come 0.2 s later to each step than the first"),
        ({0: 0.15, 1: 0.2}, "workers that wait for each other: now one comes later, now another, by 0.2 s"),
        ({0: 0.0, 1: 1e-3}, "round trips and the work per message, not bytes"),
    ],
)
def test_the_latest_worker_is_named_alike_on_all_ranks(late_s: dict[int, float], said: str) -> None:
    links = [Link(f"{name}:1", 1e9, late_s=late_s) for name in "ab"]
    for rank in late_s:
        mark = "" if not late_s[rank] else " (this worker)" if said.startswith("rank ") else " (this worker is one)"
        found = make_report(history(LAYERS, 20e6), links, rank=rank)
        assert found.limit == said.replace("%", mark)


def test_one_process_has_nothing_to_exchange() -> None:
    found = make_report(history(LAYERS, 20e6), [], stepping=Stepping(waits=False))
    assert found.limit == "nothing to exchange: this process updates its variables by itself"
    assert not re.search("twice as fast|one more pserver", str(found)), found


def test_a_single_worker_waits_for_no_other() -> None:
    found = make_report(history(LAYERS, 20e6), [Link("a:1", 1e9)], stepping=Stepping(waits=False))
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


def rounds_of(stepping: Stepping, step_s: float, exchange_s: float, nbytes: int) -> list[History]:
    """A worker that exchanges each fragment, of two buckets, in `exchange_s`, and takes it `overlap_steps` later."""
    rounds: list[list[Round]] = [[] for _ in range(2 * stepping.fragments)]
    clock_s, done_s, mixed_in = 0.0, [0.0] * stepping.fragments, [-1] * stepping.fragments
    for step in range(1, 9 * stepping.inner_steps + 1):
        clock_s += step_s
        for part in range(stepping.fragments):
            if mixed_in[part] == step:
                clock_s = max(clock_s, done_s[part])
            if (step + part * stepping.inner_steps // stepping.fragments) % stepping.inner_steps == 0:
                done_s[part], mixed_in[part] = clock_s + exchange_s, step + stepping.overlap_steps
                for bucket in (2 * part, 2 * part + 1):
                    rounds[bucket].append(Round(clock_s, done_s[part]))
                if not stepping.overlap_steps:
                    clock_s = done_s[part]
    count = len(rounds)
    return [History(f"bucket {n}", n, nbytes // count, tuple(rounds[n][:8])) for n in range(count)]


STREAMING = Stepping(inner_steps=50, overlap_steps=20, every_step=False)


def test_an_exchange_behind_further_steps_costs_nothing_if_it_comes_back_in_time() -> None:
    found = make_report(rounds_of(STREAMING, 0.01, 0.1, 10**6), [Link("a:1", 1e7)], stepping=STREAMING)
    assert found.step_s == pytest.approx(0.5)
    assert found.exposed_wait_s == pytest.approx(0.0, abs=1e-6)
    assert (found.overlap, found.limit) == (1.0, "computation")
    assert found.wire_s == pytest.approx(0.1)
    assert found.with_twice_the_bandwidth_s == pytest.approx(0.5)
    assert "round of 50 steps 0.5 s: 0.5 s computing, 0.0 ms waiting" in str(found)
    assert "order of sending makes no difference" in str(found)


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("overlap_steps", [0, 4])
def test_what_comes_back_later_than_it_is_taken_is_waited_for(fragments: int, overlap_steps: int) -> None:
    stepping = Stepping(50, fragments, overlap_steps, every_step=False)
    found = make_report(rounds_of(stepping, 0.01, 0.1, fragments * 10**6), [Link("a:1", 1e7)], stepping=stepping)
    exposed_s = fragments * (0.1 - overlap_steps * 0.01)
    assert found.step_s == pytest.approx(0.5 + exposed_s)
    assert found.exposed_wait_s == pytest.approx(exposed_s, rel=0.01)
    assert found.limit == "this worker's link (80 Mbit/s to all pservers)"  # though a small part of the round
    twice_s = 0.5 + fragments * (0.05 - overlap_steps * 0.01)
    assert found.with_twice_the_bandwidth_s == pytest.approx(twice_s, rel=0.01)
    assert not found.with_codec_s
    assert found.with_inner_steps_s is None


@given(
    fragments=st.integers(1, 3),
    overlap_steps=st.integers(0, 5),
    exchange_s=st.floats(1e-4, 0.05),
    step_s=st.floats(1e-3, 0.1),
)
def test_no_times_of_rounds_are_negative(fragments: int, overlap_steps: int, exchange_s: float, step_s: float) -> None:
    stepping = Stepping(6, fragments, overlap_steps, every_step=False)
    found = make_report(rounds_of(stepping, step_s, exchange_s, 10**6), [Link("a:1", 1e7)], stepping=stepping)
    assert found.compute_s + found.exposed_wait_s == pytest.approx(found.step_s)
    assert 0 <= found.exposed_wait_s <= found.step_s
    assert 0 <= found.overlap <= 1
    assert found.with_twice_the_bandwidth_s <= found.step_s * 1.001
    assert found.without_schedule_s >= found.step_s


def test_in_mode_async_what_comes_back_is_not_compressed() -> None:
    stepping, links = Stepping(waits=False, uncoded_replies=True, every_step=False), [Link("a:1", 20e6)]
    plain = make_report(history(LAYERS, 20e6), links, stepping=stepping)
    assert plain.limit.startswith("this worker's link")
    assert not plain.with_codec_s  # what comes back takes as long
    assert plain.with_inner_steps_s is None
    compressed = [dataclasses.replace(each, sent_bytes=each.nbytes // 4) for each in history(LAYERS, 20e6)]
    found = make_report(compressed, links, stepping=stepping)
    assert (found.sent_bytes, found.received_bytes) == (5_500_000 // 4, 5_500_000)
    assert "compressed: a step sends 1.38 of 5.5 MB, and gets 5.5 MB back" in str(found)
    assert found.with_twice_the_bandwidth_s == plain.with_twice_the_bandwidth_s
    alike = make_report(compressed, links)
    assert alike.received_bytes == alike.sent_bytes
    assert "and gets as much back" in str(alike)


@pytest.mark.parametrize("waits", [True, False])
def test_other_workers_are_the_limit_only_where_one_waits_for_them(waits: bool) -> None:
    found = make_report(history(LAYERS, 20e6), [Link("a:1", 1e9)], stepping=Stepping(waits=waits))
    assert found.limit.startswith("other workers" if waits else "round trips")


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
