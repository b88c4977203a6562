"""One process of a job: makes the strategy, then runs programs one after the other. Started by compare_strategies.py.

worker.py STRATEGY FOLDER PROGRAM ...    STRATEGY is one of STRATEGIES

In FOLDER it writes, for each program, PROGRAM.RANK.npz with its results, or .error with what was raised.
"""

from __future__ import annotations

import io
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tools.strategies.job import Job
from tools.strategies.programs import PROGRAMS


def alone() -> tuple[tf.distribute.Strategy | None, int]:
    return None, 0


def tfps() -> tuple[tf.distribute.Strategy | None, int]:
    import tfps

    strategy = tfps.Strategy()
    return strategy, strategy.rank


def multi_worker_mirrored() -> tuple[tf.distribute.Strategy | None, int]:
    return tf.distribute.MultiWorkerMirroredStrategy(), json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def parameter_server() -> tuple[tf.distribute.Strategy | None, int]:
    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if cluster.task_type != "chief":
        server = tf.distribute.Server(
            cluster.cluster_spec(), job_name=cluster.task_type, task_index=cluster.task_id, protocol="grpc", start=True
        )
        server.join()
    return tf.distribute.ParameterServerStrategy(cluster), 0


STRATEGIES: dict[str, Callable[[], tuple[tf.distribute.Strategy | None, int]]] = {
    "alone": alone,
    "tfps": tfps,
    "mwms": multi_worker_mirrored,
    "ps": parameter_server,
}


def write(path: pathlib.Path, content: bytes) -> None:
    """Writes so that the file is complete as soon as it is there."""
    partial = path.with_name(f".{path.name}")
    partial.write_bytes(content)
    partial.rename(path)


def main(name: str, folder: pathlib.Path, programs: list[str]) -> None:
    strategy, rank = STRATEGIES[name]()
    for program in programs:
        own = folder / program
        own.mkdir(exist_ok=True)
        keras.utils.set_random_seed(1)
        try:
            found = PROGRAMS[program].run(Job(strategy, rank, own))
        except Exception as error:
            text = json.dumps({"type": type(error).__name__, "text": str(error), "trace": traceback.format_exc()})
            write(folder / f"{program}.{rank}.error", text.encode())
            continue
        content = io.BytesIO()
        np.savez(content, **found)
        write(folder / f"{program}.{rank}.npz", content.getvalue())


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:])
