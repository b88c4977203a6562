"""Combinations of mode, update, compression, sparse gradients, policy, transport train, or are refused by name."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import processes
import pytest

import tfps
from tfps.types import Json

MODES: list[dict[str, Json]] = [
    {"mode": "sync"},
    {"mode": "async"},
    {"mode": "async", "staleness": 1},
    {"mode": "async", "delay_compensation": 0.5},
    {"mode": "async", "staleness": 2, "delay_compensation": 0.5},
    {"mode": "diloco", "inner_steps": 3},
    {"mode": "diloco", "inner_steps": 3, "fragments": 2, "overlap_steps": 1},
    {"mode": "local", "inner_steps": 2},
]
UPDATES = ("worker", "server")
EXCEPTIONS = {"*": "int8", "bias": "none", "embeddings": "bfloat16"}
CODECS = ("none", "bfloat16", "float16", "int8", "topk:0.25", "onebit", EXCEPTIONS)
POLICIES, TRANSPORTS, SPARSE, OPTIMIZERS = ("priority", "fifo"), ("tcp", "grpc", "auto"), (False, True), ("sgd", "adam")
SMALL = {"slice_bytes": 8192, "window_bytes": 16384, "check_every": 2}
PATIENCE = {"step_timeout_s": 300.0, "connect_timeout_s": 300.0}  # rank 0 alone also trains without tfps


def transported(policy: str, transport: str) -> dict[str, Json]:
    return {"policy": policy, "transport": transport, "shared_memory": transport == "auto"}


ALL = [
    {
        **SMALL,
        **PATIENCE,
        **mode,
        "update": update,
        "compression": codec,
        **transported(policy, transport),
        "sparse": sparse,
        "optimizer": optimizer,
        "deterministic": deterministic,
    }
    for mode, update, codec, policy, transport, sparse, optimizer, deterministic in itertools.product(
        MODES, UPDATES, CODECS, POLICIES, TRANSPORTS, SPARSE, OPTIMIZERS, (False, True)
    )
]
WORKERS = 2
OF_MODES = ("staleness", "delay_compensation", "inner_steps", "fragments", "overlap_steps")
#: Codec -> norm of the difference to plain Keras' weights, relative to that of the way that these have made.
STRAYED = {"bfloat16": 0.01, "float16": 0.01, "int8": 0.1, str(EXCEPTIONS): 0.1, "topk:0.25": 0.8, "onebit": 0.8}
pytestmark = pytest.mark.timeout(1800)


def allowed(settings: dict[str, Json]) -> bool:
    """As docs/modes.md and docs/update_on_server.md have it."""
    needed = {"async": "server", "diloco": "worker", "local": "worker"}
    squares_rows = settings["update"] == "server" and settings["sparse"] and settings["optimizer"] == "adam"
    never_repeats = settings["mode"] == "async" and settings["deterministic"]
    served = settings["update"] == needed.get(settings["mode"], settings["update"])
    return bool(served and not squares_rows and not never_repeats)


def some(seed: int) -> list[dict[str, Json]]:
    """A random allowed combination of each mode."""
    drawn = random.Random(seed)
    modes = dict.fromkeys(each["mode"] for each in MODES)
    return [drawn.choice([each for each in ALL if allowed(each) and each["mode"] == mode]) for mode in modes]


def covering() -> list[dict[str, Json]]:
    """Allowed combinations in which every two values occur together that may."""

    def pairs(settings: Json) -> set[tuple[str, str]]:
        facts = [str((key, value)) for key, value in settings.items() if key not in {**SMALL, **PATIENCE}]
        return set(itertools.combinations(sorted(facts), 2))

    candidates = [(each, pairs(each)) for each in ALL if allowed(each)]
    missing = set().union(*(found for _, found in candidates))
    chosen = []
    while missing:
        best, found = max(candidates, key=lambda each: len(each[1] & missing))
        chosen.append(best)
        missing -= found
    return chosen


def carried_otherwise(settings: dict[str, Json]) -> dict[str, Json]:
    """The same with another policy and another transport."""
    policies, transports = (*POLICIES, *POLICIES), (*TRANSPORTS, *TRANSPORTS)
    policy = policies[policies.index(settings["policy"]) + 1]
    return {**settings, **transported(policy, transports[transports.index(settings["transport"]) + 1])}


def check(combinations: list[dict[str, Json]], tmp_path: Path, workers: int = WORKERS) -> list[Json]:
    """Ranks end equal, the loss falls, and what is near plain Keras is; returns the digests of the weights."""
    arguments = [[str(tmp_path / str(rank)), json.dumps(combinations)] for rank in range(workers)]
    with (
        processes.pservers(2, workers) as addresses,
        processes.started("combinations.py", addresses, workers, arguments) as running,
    ):
        said = processes.outputs(running, timeout_s=1500.0)
    ranks = [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in said]
    assert [len(found) for found in ranks] == [len(combinations)] * workers
    for settings, first, *others in zip(combinations, *ranks, strict=True):
        for other in others:
            assert first["weights"] == other["weights"], f"ranks differ: {settings}"
            assert first["evaluated"] == other["evaluated"], f"ranks differ: {settings}"
        assert first["losses"][-1] < first["losses"][0], f"the loss does not fall: {settings} {first['losses']}"
        check_near(settings, first, workers)
    return [each["weights"] for each in ranks[0]]


def check_near(settings: dict[str, Json], found: dict[str, Json], workers: int) -> None:
    """Checks how far from plain Keras a job has ended, if its mode allows."""
    near = settings["mode"] == "sync" or (workers == 1 and settings["mode"] != "diloco")
    assert ("strayed" in found) == near, settings
    if not near:
        return
    most = STRAYED.get(str(settings["compression"]))
    if most is None:
        # Pservers add the rows of a sparse gradient in an order of their own, and "local" adds a difference.
        added = settings["mode"] == "local" or (settings["sparse"] and settings["update"] == "server")
        most = 1e-5 if added or workers > 1 else 0.0
    assert found["strayed"] <= most, f"{found['strayed']} of the way from plain Keras, not {most}: {settings}"


def check_also_carried_otherwise(combinations: list[dict[str, Json]], tmp_path: Path) -> None:
    """`check`; and those that repeat end bitwise equal with another policy and another transport."""
    repeat = [number for number, each in enumerate(combinations) if each["deterministic"]]
    assert repeat
    ends = check([*combinations, *(carried_otherwise(combinations[number]) for number in repeat)], tmp_path)
    for number, end in zip(repeat, ends[len(combinations) :], strict=True):
        assert end == ends[number], f"policy and transport change the weights: {combinations[number]}"


def test_random_combinations_of_each_mode_train_and_end_where_they_must(tmp_path: Path) -> None:
    drawn = some(seed=1026)
    assert any("int8" in str(each["compression"]) for each in drawn)
    assert any((each["mode"], each["compression"]) == ("sync", "none") for each in drawn)
    check(drawn, tmp_path)


@pytest.mark.long
def test_every_two_settings_go_together_and_end_where_they_must(tmp_path: Path) -> None:
    check_also_carried_otherwise(covering(), tmp_path)


def exhaustive(seed: int) -> list[dict[str, Json]]:
    """Every allowed mode, update, codec, and kind of gradients together; the rest is drawn for each."""
    drawn = random.Random(seed)
    kinds: dict[str, list[dict[str, Json]]] = {}
    for each in filter(allowed, ALL):
        kind = [each[name] for name in ("mode", *OF_MODES, "update", "compression", "sparse") if name in each]
        kinds.setdefault(str(kind), []).append(each)
    return [drawn.choice(each) for each in kinds.values()]


@pytest.mark.long
@pytest.mark.parametrize("modes", [("sync", "async"), ("diloco", "local")])
@pytest.mark.parametrize("workers", [WORKERS, 1])
def test_every_mode_update_codec_and_kind_of_gradients_goes_together(
    workers: int, modes: tuple[str, ...], tmp_path: Path
) -> None:
    combinations = [each for each in exhaustive(seed=2026) if each["mode"] in modes]
    assert len(combinations) == (84 if "sync" in modes else 42)
    ends = check(combinations, tmp_path, workers)
    if workers == 1 and "sync" in modes:  # sparse gradients: dense ones are bitwise those of plain Keras
        alike = [
            end
            for each, end in zip(combinations, ends, strict=True)
            if (each["update"], each["compression"], each["sparse"]) == ("server", "none", True)
        ]
        assert len(alike) == 5
        assert len(set(alike)) == 1, "async is not bitwise sync"


def plainly(**settings: Json) -> dict[str, Json]:
    """Settings of `combinations.py` that a test does not choose."""
    return {**SMALL, "update": "server", "compression": "none", "sparse": False, "optimizer": "sgd", **settings}


@pytest.mark.long
def test_one_worker_in_mode_async_is_bitwise_plain_keras_and_near_it_with_a_codec(tmp_path: Path) -> None:
    check([plainly(mode="async", staleness=0), plainly(mode="async", compression="int8")], tmp_path, workers=1)


REFUSED = [each for each in ALL if not allowed({**each, "sparse": False, "deterministic": False})]


@pytest.mark.parametrize("settings", REFUSED[::59])
def test_what_does_not_go_together_is_refused_by_name(settings: dict[str, Json]) -> None:
    own = {key: value for key, value in settings.items() if key not in ("sparse", "optimizer", "deterministic")}
    with pytest.raises(tfps.ConfigError, match=f"mode='{settings['mode']}' needs update="):
        tfps.Config(**own)
