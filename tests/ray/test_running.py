"""`tfps.ray.run` on a cluster of several nodes: where everything is, what comes back, who is blamed."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import jobs
import on_ray
import pytest

import tfps
import tfps.ray
from tfps.config import Config, Launch, Security
from tfps.errors import ConfigError, ConnectError, WaitTimeoutError, WorkerLostError
from tfps.protos import tfps_pb2 as pb
from tfps.types import Argument, Options
from tfps.wire.control import Pserver

ray = pytest.importorskip("ray", reason=on_ray.NEEDS_RAY)
pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.usefixtures("clean")]
for module in (sys.modules[__name__], on_ray, jobs):  # which Ray's processes cannot import
    ray.cloudpickle.register_pickle_by_value(module)


def trained() -> Options:
    """A short training, and where it was."""
    import keras
    import numpy as np

    strategy = tfps.Strategy()
    keras.utils.set_random_seed(strategy.rank)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(4)])
        model.compile("sgd", "mse")
    inputs, targets = np.ones((64, 8), "float32"), np.ones((64, 4), "float32")
    losses = model.fit(inputs, targets, batch_size=16, epochs=3, verbose=0).history["loss"]
    return {
        "rank": (strategy.rank, strategy.num_workers),
        "weights": b"".join(weight.tobytes() for weight in model.get_weights()),
        "learned": losses[-1] < losses[0],
        "pservers": strategy.pservers,
        "shared": [link.shared_memory for link in strategy._runtime.exchange.info.links()],
        "node": ray.get_runtime_context().get_node_id(),
        "pserver nodes": {each["Address"]["NodeID"] for each in on_ray.actors("TfpsPserver")},
        "in pservers": {name for each in on_ray.actors("TfpsPserver") for name in loaded(each["Pid"])},
    }


def loaded(pid: int) -> set[str]:
    """Which of some libraries a process has in memory."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {name for name in ("tensorflow", "pandas", "grpc") if f"/{name}/" in maps}


def test_workers_train_together_with_a_pserver_on_the_node_of_each() -> None:
    first, second = tfps.ray.run(trained, workers=2, placement_strategy="STRICT_SPREAD")
    assert (first["rank"], second["rank"]) == ((0, 2), (1, 2))
    assert first["weights"] == second["weights"]
    assert first["learned"]
    assert first["node"] != second["node"]
    assert first["pserver nodes"] == {first["node"], second["node"]}
    assert len(first["pservers"]) == 2
    assert first["shared"] == second["shared"] == [True, True]
    assert first["in pservers"] == {"grpc"}


def named(folder: Path) -> tuple[int | None, int | None, str]:
    """The place of this process. The last rank ends first."""
    launch = Launch.from_environment()
    rank, workers = launch.rank or 0, launch.workers or 0
    if rank + 1 < workers:
        on_ray.wait_for(folder / f"ended{rank + 1}")
    (folder / f"ended{rank}").touch()
    return launch.rank, launch.workers, ray.get_runtime_context().get_node_id()


def test_values_come_back_in_rank_order_and_workers_share_pservers_of_their_nodes(tmp_path: Path) -> None:
    values = tfps.ray.run(partial(named, tmp_path), workers=4, pservers=1)
    assert [value[:2] for value in values] == [(rank, 4) for rank in range(4)]
    assert len({value[2] for value in values}) == 2


def raises(folder: Path, how: str) -> None:
    """Rank 1 fails as `how` says, while rank 0 waits for it in an exchange, and notes how that ends."""
    worker = on_ray.join()
    if worker.rank == 1:
        on_ray.wait_for(folder / "joined0")
        if how == "raises":
            raise ValueError("no such column: 'price'")
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / "joined0").touch()
    try:
        worker.declare([on_ray.SUM])
    except Exception as error:
        (folder / "said").write_text(f"{type(error).__name__}: {error}")
        raise


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raises", "^rank 1 of 2 failed: ValueError: no such column: 'price'; all others were ended$"),
        ("dies", r"^rank 1 of 2 failed: its process ended \(The actor died .*; all others were ended$"),
    ],
)
def test_a_worker_that_fails_ends_the_others_and_is_named_everywhere(how: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerLostError, match=says) as caught:
        tfps.ray.run(partial(raises, tmp_path, how), workers=2)
    assert isinstance(caught.value.__cause__, ValueError if how == "raises" else ray.exceptions.RayActorError)
    assert (tmp_path / "said").read_text().startswith("WorkerLostError: rank 1 (")


def secret() -> tuple[str, tuple[str, ...], str, str]:
    launch = Launch.from_environment()
    on_ray.join().close()
    stranger = Pserver(launch.pservers[0], Security())
    try:
        stranger.call("Status", pb.StatusRequest(), jobs.DEADLINE_S)
        said = "welcome"
    except ConnectError as error:
        said = str(error)
    stranger.close()
    return on_ray.token(), launch.pservers, said, ray.util.get_node_ip_address()


def test_pservers_want_the_token_which_no_log_has(cluster: Argument) -> None:
    ((token, pservers, said, host),) = tfps.ray.run(secret)
    assert [pserver.rpartition(":")[0] for pserver in pservers] == [host]
    assert "wants a job token, this client sent none" in said
    logs = Path(cluster.head_node.get_session_dir_path())
    files = [path for path in logs.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert len(token) >= 32
    assert not [path for path in files if token.encode() in path.read_bytes()]
    known = [*ray._private.state.actors().values()]
    assert known
    assert token not in repr(known)


def test_without_room_for_the_workers_it_says_what_they_need_and_what_there_is() -> None:
    with pytest.raises(
        WaitTimeoutError,
        match=r"no room for 2 workers within 1 s: each needs \{'CPU': 8\} \(PACK\), of which the cluster has "
        r"\{'CPU': 4.0\} in all, used or not; ask for less",
    ):
        tfps.ray.run(os.getpid, workers=2, resources_per_worker={"CPU": 8}, start_timeout_s=1)


def setting() -> str:
    return Config.from_environment().transport


def test_settings_reach_workers_by_the_runtime_environment() -> None:
    assert tfps.ray.run(setting, runtime_env={"env_vars": {"TFPS_TRANSPORT": "grpc"}}) == ["grpc"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"workers": 0}, "workers must be a whole number from 1, got 0"),
        ({"resources_per_worker": {"CPU": -1}}, "resources_per_worker must be amounts"),
        ({"placement_strategy": "pack"}, "placement_strategy must be one of PACK, SPREAD"),
        ({"resources_per_pserver": 2}, "resources_per_pserver must be amounts"),
        ({"min_workers": 2}, "min_workers must be a whole number from 1 to workers=1, or None"),
        ({"train_fn": "train"}, "train_fn must be a function without arguments, got 'train'"),
    ],
)
def test_arguments_are_checked_before_anything_starts(
    arguments: Options, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("placement_group", "Job"):
        monkeypatch.delattr(f"tfps.ray.running.{name}")  # whatever starts something fails
    with pytest.raises(ConfigError, match=f"^{says}"):
        tfps.ray.run(**{"train_fn": os.getpid, **arguments})
