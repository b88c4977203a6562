"""The simulation of tools/: hand-computed cases, the lower bound, errors, the command."""

from __future__ import annotations

import json
import pathlib
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_profiles import MB, TWO_LAYERS, profile

from tfps.errors import ConfigError
from tfps.types import Argument, Function, Json, Options
from tools import model_profiles
from tools import simulate as command
from tools.model_profiles import Profile
from tools.simulation import POLICIES, Cluster, Policy, Settings, chrome_trace, lower_bound, simulate

MEGABYTE_PER_S = 0.008  # Gbit/s
modes = pytest.mark.parametrize("mode", ["exact", "symmetric"])


def cluster(workers: int, pservers: int, rate_gbit: float, **others: Argument) -> Cluster:
    """Without latency and processors' time, unless `others` say so."""
    return Cluster(workers, pservers, rate_gbit, **{"latency_s": 0.0, "cpu_slice_s": 0.0, "cpu_gb_s": 0.0, **others})


def step_s(model: Profile, hosts: Cluster, **options: Argument) -> float:
    return simulate(model, hosts, Settings(**options)).step_s


# Hand-computed

# TWO_LAYERS, 1 MB/s to one pserver. Backward ends b at 0.5 s and a at 1 s; forward takes 1 s each. In MB and s:
#   barrier               push b 1-3 a 3-4              reply b 3-5 a 5-6                 forward 6-8
#   overlap               push b 0.5-2.5 a 2.5-3.5      reply b 2.5-4.5 a 4.5-5.5         forward 5.5-7.5
#   overlap_send_barrier  the same                      reply b 3.5-5.5 a 5.5-6.5         forward 6.5-8.5
#   slices   push b0 0.5-1.5 b1 1.5-2.5 a 2.5-3.5       reply b0 1.5- b1 2.5- a 3.5-4.5   forward 4.5-6.5
#   priority push b0 0.5-1.5 a 1.5-2.5 b1 2.5-3.5       reply b0 1.5- a 2.5-3.5 b1 -4.5   forward a 3.5-4.5 b 4.5-5.5
EXPECTED_S: dict[Policy, float] = dict(zip(POLICIES, (8.0, 7.5, 8.5, 6.5, 5.5), strict=True))


@modes
@pytest.mark.parametrize("policy", POLICIES)
def test_two_layers_take_what_was_computed_by_hand(policy: Policy, mode: str) -> None:
    hosts = cluster(1, 1, MEGABYTE_PER_S, dedicated=True)
    result = simulate(TWO_LAYERS, hosts, Settings(policy=policy, slice_bytes=MB, mode=mode))  # type: ignore[arg-type]
    assert result.step_s == pytest.approx(EXPECTED_S[policy])
    assert result.step_times_s == pytest.approx([EXPECTED_S[policy]] * 2)
    assert result.wait_s == pytest.approx(EXPECTED_S[policy] - 3)
    assert result.tx_use == pytest.approx([3 / EXPECTED_S[policy]] * 2)


@modes
def test_two_workers_send_and_receive_as_much_as_the_layer_has(mode: str) -> None:
    """Host 0 owns the layer: worker 1 pushes for 1 s, the reply to it takes 1 s."""
    model, hosts = profile((1.0, 2.0, MB)), cluster(2, 2, MEGABYTE_PER_S)
    assert step_s(model, hosts, policy="barrier", mode=mode) == pytest.approx(5)
    # In quarters both hosts own two; all links are busy for 1 s, as the bound has it.
    assert step_s(model, hosts, slice_bytes=MB // 4, mode=mode) == pytest.approx(4)
    assert lower_bound(model, hosts) == pytest.approx(4)


@modes
def test_one_worker_beside_its_pserver_needs_no_link(mode: str) -> None:
    assert step_s(profile((1.0, 2.0, MB)), cluster(1, 1, 1e-6), mode=mode) == pytest.approx(3)


@modes
@pytest.mark.parametrize("policy", POLICIES)
def test_a_fast_network_leaves_computing(policy: Policy, mode: str) -> None:
    model = profile((0.1, 0.2, MB), (0.2, 0.4, MB))
    assert step_s(model, cluster(4, 4, 1e5), policy=policy, mode=mode) == pytest.approx(0.9, rel=1e-3)


@modes
@pytest.mark.parametrize("policy", ["overlap", "slices", "priority"])
def test_a_slow_network_leaves_the_wire(policy: Policy, mode: str) -> None:
    model, hosts = profile(*[(0.0, 0.0, 4 * MB)] * 25), cluster(4, 4, 1)
    # Each host sends 3/4 of 100 MB as pushes and 3 times 25 MB as replies.
    wire_s = 150 * MB / hosts.bytes_per_s
    assert lower_bound(model, hosts) == pytest.approx(wire_s)
    found = step_s(model, hosts, policy=policy, mode=mode, slice_bytes=MB // 4, window_bytes=100 * MB)
    assert wire_s <= found * (1 + 1e-9) < wire_s * 1.06


@modes
def test_a_small_window_limits_throughput_to_window_per_round_trip(mode: str) -> None:
    model = profile((0.0, 0.0, MB))
    hosts = cluster(1, 1, 1000, dedicated=True, latency_s=0.01)
    options = {"slice_bytes": MB // 10, "mode": mode}
    # Ten slices, each sent when the one before it is acknowledged; the replies follow them.
    assert step_s(model, hosts, window_bytes=MB // 10, **options) == pytest.approx(10 * 0.02, rel=1e-3)
    assert step_s(model, hosts, window_bytes=MB, **options) == pytest.approx(0.02, rel=1e-2)


@modes
def test_processors_limit_throughput(mode: str) -> None:
    model, options = profile(*[(0.0, 0.0, MB)] * 50), {"mode": mode, "slice_bytes": MB, "window_bytes": 50 * MB}
    # 2 GB/s for both ends of one stream, which both directions share: a pserver's process is busy for half of that.
    one = cluster(1, 1, 1e6, dedicated=True, cpu_gb_s=1.0)
    assert step_s(model, one, **options) == pytest.approx(0.05 / 2, rel=0.1)
    assert step_s(model, replace(one, workers=2), **options) == pytest.approx(2 * 0.05 / 2, rel=0.1)
    assert step_s(model, replace(one, machine_cores=0.5), **options) == pytest.approx(0.05 / 0.5, rel=0.1)


def test_a_message_alone_passes_sender_wire_and_receiver_one_after_the_other() -> None:
    hosts = cluster(1, 1, 8, dedicated=True, latency_s=0.01, cpu_slice_s=0.4, cpu_gb_s=400.0)
    # Per direction: 0.2 s at each end (0.1 s for a slice, 0.1 s for 1 MB), 1 ms of wire, latency.
    model = profile((0.0, 0.0, MB))
    assert step_s(model, hosts, slice_bytes=MB) == pytest.approx(2 * (2 * 0.2 + 0.001 + 0.01))


def test_updates_take_their_time_one_after_the_other() -> None:
    model, hosts = profile((0.0, 0.0, MB), (0.0, 0.0, MB)), cluster(1, 1, 1e6, dedicated=True, apply_gb_s=1000.0)
    assert step_s(model, hosts, slice_bytes=MB) == pytest.approx(2.0, rel=1e-3)


def test_fused_layers_travel_when_the_last_gradient_exists() -> None:
    model, hosts = profile((0.0, 1.0, MB), (0.0, 1.0, MB)), cluster(1, 1, MEGABYTE_PER_S, dedicated=True)
    assert step_s(model, hosts, slice_bytes=2 * MB, first_bytes=2 * MB) == pytest.approx(2 + 2 + 2)
    assert step_s(model, hosts, slice_bytes=2 * MB) == pytest.approx(1 + 1 + 1 + 1)  # the first bucket stays small
    assert step_s(model, hosts, slice_bytes=2 * MB, fuse=False) == pytest.approx(1 + 1 + 1 + 1)


# Properties

layers = st.tuples(
    st.one_of(st.just(0.0), st.floats(1e-6, 0.01)),
    st.one_of(st.just(0.0), st.floats(1e-6, 0.02)),
    st.one_of(st.just(0), st.integers(1, 1000), st.integers(1, 1_500_000)).map(lambda items: 4 * items),
)
profiles = st.lists(layers, min_size=1, max_size=6).filter(lambda found: any(nbytes for _, _, nbytes in found))
clusters = st.builds(
    Cluster,
    workers=st.integers(1, 5),
    pservers=st.integers(1, 5),
    rate_gbit=st.sampled_from([0.5, 1.0, 10.0, 100.0]),
    latency_s=st.sampled_from([0.0, 5e-5, 1e-3]),
    dedicated=st.booleans(),
    cpu_slice_s=st.sampled_from([0.0, 0.25e-3]),
    cpu_gb_s=st.sampled_from([0.0, 1.7]),
    machine_cores=st.sampled_from([None, 2.0]),
    apply_gb_s=st.sampled_from([0.0, 0.5]),
)
slices = st.sampled_from([128 * 1024, 1024 * 1024])


@modes
@given(
    found=profiles,
    hosts=clusters,
    slice_bytes=slices,
    slices_in_window=st.sampled_from([1, 4, 100]),
    fuse=st.booleans(),
)
@settings(max_examples=100)
def test_no_policy_beats_the_lower_bound(
    found: list[tuple[float, float, int]],
    hosts: Cluster,
    slice_bytes: int,
    slices_in_window: int,
    fuse: bool,
    mode: str,
) -> None:
    model = profile(*found)
    least = lower_bound(model, hosts)
    options = {"slice_bytes": slice_bytes, "window_bytes": slices_in_window * slice_bytes, "fuse": fuse}
    for policy in POLICIES:
        assert step_s(model, hosts, policy=policy, mode=mode, warmup_steps=0, **options) >= least * (1 - 1e-9), policy


@modes
@given(found=profiles, hosts=clusters, slice_bytes=slices)
@settings(max_examples=100)
def test_priority_is_no_worse_than_overlap_but_for_a_slice(
    found: list[tuple[float, float, int]], hosts: Cluster, slice_bytes: int, mode: str
) -> None:
    """Where slices cost nothing, the window is wide and nothing is fused: see docs/lower_bound.md."""
    assume(hosts.workers > 1)
    model, hosts = profile(*found), replace(hosts, cpu_slice_s=0.0, cpu_gb_s=0.0, apply_gb_s=0.0)
    options = {"slice_bytes": slice_bytes, "window_bytes": 2**40, "fuse": False, "mode": mode, "warmup_steps": 0}
    # One pserver may own a slice more than others; all workers push it to one link and get it from there.
    slice_s = 2 * hosts.workers * slice_bytes / hosts.bytes_per_s
    priority, overlap = (step_s(model, hosts, policy=policy, **options) for policy in ("priority", "overlap"))
    assert priority <= 1.01 * overlap + slice_s


@pytest.mark.parametrize("options", [{}, {"jitter": 0.2, "seed": 3}])
def test_equal_arguments_give_equal_results(options: Options) -> None:
    model, hosts = model_profiles.load("resnet50"), Cluster(3, 2, 5.0)
    first, second = (simulate(model, hosts, Settings(trace=True, **options)) for _ in range(2))
    assert first == second


def test_jitter_makes_workers_wait_for_the_slowest() -> None:
    model, hosts = profile((0.1, 0.2, 4000)), cluster(8, 8, 100)
    result = simulate(model, hosts, Settings(jitter=0.1, steps=20))
    assert result.step_s > 1.05 * 0.3
    assert result.compute_s == pytest.approx(0.3, rel=0.05)
    assert simulate(model, hosts, Settings(jitter=0.1, steps=20, seed=1)).step_s != result.step_s


@pytest.mark.parametrize("policy", POLICIES)
def test_one_worker_may_stand_for_all(policy: Policy) -> None:
    model, hosts = model_profiles.load("vgg19"), Cluster(6, 6, 10.0)
    exact, symmetric = (simulate(model, hosts, Settings(policy=policy, mode=m)) for m in ("exact", "symmetric"))
    assert (exact.exact, symmetric.exact) == (True, False)
    assert symmetric.step_s == pytest.approx(exact.step_s, rel=0.03)


@pytest.mark.long
def test_sixty_four_workers_are_simulated_exactly() -> None:
    model = model_profiles.load("resnet50")
    assert simulate(model, Cluster(64, 64, 10.0), Settings(warmup_steps=0, steps=1)).exact


@pytest.mark.long
def test_a_thousand_workers_are_simulated_within_the_bound() -> None:
    model = model_profiles.load("resnet50")
    many = Cluster(1024, 1024, 10.0)
    result = simulate(model, many, Settings())
    assert not result.exact
    assert result.step_s >= lower_bound(model, many)


# The bound


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
    hosts = cluster(workers, pservers, MEGABYTE_PER_S)
    assert lower_bound(profile((0.0, 0.0, MB)), hosts) == pytest.approx(busiest)


def test_the_bound_exposes_the_first_layers_and_all_bytes() -> None:
    hosts = cluster(1, 1, MEGABYTE_PER_S, dedicated=True)
    assert lower_bound(TWO_LAYERS, hosts) == pytest.approx(0.5 + 1 + 3)  # all bytes, beside b's own passes
    heavy_first = profile((1.0, 0.5, 2 * MB), (1.0, 0.5, MB // 2))
    assert lower_bound(heavy_first, hosts) == pytest.approx(3 + 2)  # the first layer, beside nothing
    assert lower_bound(profile((1.0, 0.5, MB)), replace(hosts, latency_s=0.25)) == pytest.approx(1.5 + 1 + 0.5)


# Errors, the timeline, the command


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (Cluster, {"workers": 0}, "workers must be a whole number, at least 1, got 0"),
        (Cluster, {"pservers": 1.5}, "pservers must be a whole number, at least 1, got 1.5"),
        (Cluster, {"rate_gbit": 0.0}, "rate_gbit must be a number, positive, got 0.0"),
        (Cluster, {"goodput": 2.0}, "goodput must be at most 1, got 2.0"),
        (Cluster, {"latency_s": -1.0}, "latency_s must be a number, at least 0, got -1.0"),
        (Cluster, {"machine_cores": 0}, "machine_cores must be a number, positive, got 0"),
        (Settings, {"policy": "fifo"}, "policy must be one of 'barrier', .*, got 'fifo'"),
        (Settings, {"mode": "fast"}, "mode must be one of 'auto', 'exact', 'symmetric', got 'fast'"),
        (Settings, {"slice_bytes": 3}, "slice_bytes must be a whole number, at least 4, got 3"),
        (Settings, {"steps": 0}, "steps must be a whole number, at least 1, got 0"),
        (Settings, {"jitter": 0.1, "mode": "symmetric"}, "jitter must be 0 in mode 'symmetric'"),
    ],
)
def test_settings_out_of_range_are_refused(kind: Function, values: dict[str, Json], message: str) -> None:
    base = {"workers": 1, "pservers": 1, "rate_gbit": 1.0} if kind is Cluster else {}
    with pytest.raises(ConfigError, match=message):
        kind(**{**base, **values})


def test_too_many_workers_for_jitter_are_refused() -> None:
    with pytest.raises(ConfigError, match="workers x pservers must be at most 4096 to simulate every worker, got 4160"):
        simulate(TWO_LAYERS, Cluster(65, 64, 1.0), Settings(jitter=0.1))


def test_the_timeline_has_every_message_once_and_in_the_order_of_urgency() -> None:
    hosts = cluster(1, 1, MEGABYTE_PER_S, dedicated=True)
    result = simulate(TWO_LAYERS, hosts, Settings(slice_bytes=MB, trace=True, warmup_steps=0, steps=1))
    pushes = [(s.name, s.start_s, s.end_s) for s in result.spans if s.track == "to pserver 0" and s.args["step"] == 0]
    assert pushes == [("push 1.0", 0.5, 1.5), ("push 0.0", 1.5, 2.5), ("push 1.1", 2.5, 3.5)]
    replies = [s.name for s in result.spans if s.process == "pserver 0" and s.args["step"] == 0]
    assert replies == ["reply 1.0", "reply 0.0", "reply 1.1"]
    computing = [s.name for s in result.spans if s.track == "compute" and s.args["step"] == 0]
    assert computing == ["backward b", "backward a", "wait for a", "forward a", "forward b"]
    events = chrome_trace(result)["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"worker 0", "pserver 0"}
    assert sum(event["ph"] == "X" for event in events) == len(result.spans)


def test_the_command_prints_a_row_per_policy_and_rate_and_writes_files(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written, trace = tmp_path / "out.json", tmp_path / "trace.json"
    command.main(["--profile", "sockeye", "--sweep-rate", "1,10", "--scale", "10", "--json", str(written)])
    assert len(capsys.readouterr().out.splitlines()) == 2 + 2 * len(POLICIES)
    rows = json.loads(written.read_text())
    assert [row["cluster"]["rate_gbit"] for row in rows] == [1.0] * 5 + [10.0] * 5
    assert all(row["result"]["step_s"] >= row["lower_bound_s"] for row in rows)
    command.main(["--profile", "sockeye", "--scale", "10", "--policy", "priority", "--trace", str(trace)])
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "alexnet"], "profile must be one of"),
        (["--profile", "vgg16", "--workers", "0"], "workers must be a whole number, at least 1, got 0"),
        (["--profile", "vgg16", "--trace", "x"], "--trace writes one run"),
    ],
)
def test_the_command_names_what_is_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err
