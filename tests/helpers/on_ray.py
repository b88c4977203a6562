"""What training functions of Ray's tests do: in processes that Ray starts, most of them without TensorFlow."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import jobs
import psutil

from tfps.config import Config, Launch, Security
from tfps.exchange.interface import BucketSpec
from tfps.trace.recorder import Recorder
from tfps.types import Options
from tfps.worker.worker import Worker

NEEDS_RAY = "needs Ray: pip install 'tfps[ray]'"
# Ray would take a token that an earlier cluster has left in the home folder, and other processes of a test would not.
WITHOUT_AUTH = {"RAY_AUTH_MODE": "disabled"}
SPOT = {"CPU": 1, "spot": 1}  # what a worker needs that is to be on a node of the fixture `spot`
SUM = BucketSpec(("b",), "sum", 400, "float32", 0)


def join() -> Worker:
    """Joins the job as a strategy does, without TensorFlow."""
    launch = Launch.from_environment()
    config = Config(connect_timeout_s=jobs.DEADLINE_S, step_timeout_s=jobs.DEADLINE_S)
    options: Options = {"rank": launch.rank, "workers": launch.workers, "job": launch.job}
    return Worker(launch.pservers, **options, config=config, recorder=Recorder())


def token() -> str:
    return Path(Security.from_environment().token_file).read_text()


def actors(name: str) -> list[Options]:
    """Those of a class that live, as Ray describes them."""
    import ray

    known = ray._private.state.actors().values()
    return [each for each in known if each["ActorClassName"] == name and each["State"] == "ALIVE"]


def nothing_is_left() -> None:
    """Waits until the cluster is as before: no process of a job, and all CPUs free."""
    import ray

    def free() -> bool:
        every = ray.cluster_resources().get("CPU")
        return (
            not actors("TfpsPserver")
            and not actors("TfpsWorker")
            and ray.available_resources().get("CPU") == every
            and all(group["state"] == "REMOVED" for group in ray.util.placement_group_table().values())
        )

    jobs.poll(free)


def remove_groups() -> None:
    """Removes all placement groups."""
    import ray
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    for known in ray.util.placement_group_table():
        remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(known)))


def die(number: int) -> None:
    """Signals this process."""
    os.kill(os.getpid(), number)


def lose_node() -> None:
    """Ends this process as the loss of its host does: with all that Ray has on its node."""
    raylet = psutil.Process(os.getppid())
    if raylet.name() != "raylet":
        raise RuntimeError(f"the parent of a worker must be Ray's raylet, got {raylet}")
    own = os.getpid()
    others = [each for each in raylet.children(recursive=True) if each.pid != own]
    for each in (raylet, *others):  # each of them: what a dead raylet has started may stay
        each.kill()
    die(signal.SIGKILL)


def wait_to_be_ended() -> None:
    threading.Event().wait()


def wait_for(path: Path) -> None:
    """Until another process has made a file."""
    jobs.poll(path.exists)
