"""Combinations of mode, update, compression, sparse gradients, policy, transport train, or are refused by name."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import processes
import pytest

import tfps
from tfps.pserver.server import ParameterServer
from tfps.types import Json

MODES: list[dict[str, Json]] = [
    {"mode": "sync"},
    {"mode": "async"},
    {"mode": "async", "staleness": 1},
    {"mode": "async", "delay_compensation": 0.5},
    {"mode": "diloco", "inner_steps": 3},
    {"mode": "diloco", "inner_steps": 3, "fragments": 2, "overlap_steps": 1},
    {"mode": "local", "inner_steps": 2},
]
UPDATES = ("worker", "server")
CODECS = ("none", "bfloat16", "int8", "topk:0.25", "onebit")
POLICIES, TRANSPORTS, SPARSE = ("priority", "fifo"), ("tcp", "grpc", "auto"), (False, True)
SMALL = {"slice_bytes": 8192, "window_bytes": 16384, "check_every": 2, "step_timeout_s": 60.0}
ALL = [
    {
        **SMALL,
        **mode,
        "update": update,
        "compression": codec,
        "policy": policy,
        "transport": transport,
        "shared_memory": transport == "auto",
        "sparse": sparse,
    }
    for mode, update, codec, policy, transport, sparse in itertools.product(
        MODES, UPDATES, CODECS, POLICIES, TRANSPORTS, SPARSE
    )
]
WORKERS = 2
pytestmark = pytest.mark.timeout(1800)


def allowed(settings: dict[str, Json]) -> bool:
    """As docs/modes.md has it."""
    needed = {"async": "server", "diloco": "worker", "local": "worker"}
    return bool(settings["update"] == needed.get(settings["mode"], settings["update"]))


def some(count: int, seed: int) -> list[dict[str, Json]]:
    """Random allowed combinations."""
    return random.Random(seed).sample([each for each in ALL if allowed(each)], count)


def covering() -> list[dict[str, Json]]:
    """Allowed combinations in which every two values occur together that may."""

    def pairs(settings: Json) -> set[tuple[str, str]]:
        facts = [str((key, value)) for key, value in settings.items() if key not in SMALL]
        return set(itertools.combinations(sorted(facts), 2))

    candidates = [each for each in ALL if allowed(each)]
    missing = set().union(*map(pairs, candidates))
    chosen = []
    while missing:
        best = max(candidates, key=lambda each: len(pairs(each) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def check(combinations: list[dict[str, Json]], tmp_path: Path) -> None:
    servers = [ParameterServer("127.0.0.1", 0, workers=WORKERS) for _ in range(2)]
    arguments = [[str(tmp_path / str(rank)), json.dumps(combinations)] for rank in range(WORKERS)]
    addresses = [server.address for server in servers]
    try:
        with processes.started("combinations.py", addresses, WORKERS, arguments) as running:
            said = processes.outputs(running, timeout_s=1500.0)
    finally:
        for server in servers:
            server.stop()
    ranks = [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in said]
    assert [len(found) for found in ranks] == [len(combinations)] * WORKERS
    for settings, first, second in zip(combinations, *ranks, strict=True):
        assert first["weights"] == second["weights"], f"ranks differ: {settings}"
        assert first["evaluated"] == second["evaluated"], f"ranks differ: {settings}"
        assert first["losses"][-1] < first["losses"][0], f"the loss does not fall: {settings} {first['losses']}"


def test_random_combinations_train_and_ranks_end_bitwise_equal(tmp_path: Path) -> None:
    check(some(3, seed=1), tmp_path)


@pytest.mark.long
def test_every_two_settings_go_together(tmp_path: Path) -> None:
    check(covering(), tmp_path)


@pytest.mark.parametrize("settings", [each for each in ALL if not allowed(each)][::7])
def test_what_does_not_go_together_is_refused_by_name(settings: dict[str, Json]) -> None:
    own = {key: value for key, value in settings.items() if key != "sparse"}
    with pytest.raises(tfps.ConfigError, match=f"mode='{settings['mode']}' needs update="):
        tfps.Config(**own)
