"""Worker: joins one job after the other, each described in another way, and trains a little in each.

clustered.py RANK OUT PORT ...     a port of a pserver on this host for each of DESCRIPTIONS; rank 0 also evaluates
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import keras
import numpy as np
import tensorflow as tf
import training

import tfps
from tfps.types import Array, Value

resolvers = tf.distribute.cluster_resolver
HOST = "127.0.0.1"


def tasks(port: int) -> dict[str, list[str]]:
    return {"chief": [f"{HOST}:1"], "worker": [f"{HOST}:2"], "ps": [f"{HOST}:{port}"], "evaluator": [f"{HOST}:3"]}


def tf_config(rank: int, port: int) -> None:
    task = {"type": "chief" if rank == 0 else "worker", "index": 0}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": tasks(port), "task": task})


def simple(rank: int, port: int) -> Value:
    task_type = "chief" if rank == 0 else "worker"
    return resolvers.SimpleClusterResolver(tf.train.ClusterSpec(tasks(port)), task_type=task_type, task_id=0)


def slurm(rank: int, port: int) -> Value:
    """Process 0 of the step is the pserver; the GPUs that TensorFlow's class counts need not exist."""
    for name, value in (("PROCID", rank + 1), ("STEP_NUM_TASKS", 3), ("STEP_TASKS_PER_NODE", 3)):
        os.environ[f"SLURM_{name}"] = str(value)
    os.environ["SLURM_STEP_NODELIST"] = "localhost"
    return resolvers.SlurmClusterResolver(
        {"ps": 1, "worker": 2}, port_base=port, gpus_per_node=3, gpus_per_task=1, auto_set_gpu=False
    )


def kubernetes(rank: int, port: int) -> Value:
    """With a client that knows one node with all pods; the rank is that of joining."""

    def pods(label_selector: str) -> SimpleNamespace:
        names = [f"{label_selector}-{index}" for index in range(2 if label_selector == "worker" else 1)]
        status = SimpleNamespace(phase="Running", host_ip=HOST)
        return SimpleNamespace(items=[SimpleNamespace(metadata=SimpleNamespace(name=n), status=status) for n in names])

    return resolvers.KubernetesClusterResolver(
        {"worker": ["worker"], "ps": ["ps"]},
        tf_server_port=port,
        override_client=SimpleNamespace(list_pod_for_all_namespaces=pods),
    )


DESCRIPTIONS = {"tf_config": tf_config, "simple": simple, "slurm": slurm, "kubernetes": kubernetes}


def compiled(strategy: tfps.Strategy) -> tuple[keras.Model, Array, Array]:
    keras.utils.set_random_seed(strategy.rank)
    with strategy.scope():
        model, inputs, targets = training.mlp()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, inputs, targets


def main(rank: str, out: str, *ports: str) -> None:
    results = {}
    for (name, describe), port in zip(DESCRIPTIONS.items(), ports, strict=True):
        strategy = tfps.Strategy(describe(int(rank), int(port)))
        assert strategy.num_workers == 2, name
        assert name == "kubernetes" or strategy.rank == int(rank), name
        assert training.is_chief(strategy) == (strategy.rank == 0), name
        model, inputs, targets = compiled(strategy)
        model.fit(inputs, targets, batch_size=64, epochs=1, shuffle=False, verbose=0)
        results.update({f"{name}/{index}": weight for index, weight in enumerate(model.get_weights())})
        strategy.close()
        os.environ.pop("TF_CONFIG", None)
    np.savez(out, **results)
    if rank == "0":
        os.environ["TF_CONFIG"] = json.dumps({"cluster": tasks(1), "task": {"type": "evaluator", "index": 0}})
        strategy = tfps.Strategy()  # nobody listens at port 1: it must not want to connect
        assert (strategy.num_workers, strategy.pservers) == (1, ())
        assert strategy.cluster_resolver.task_type == "evaluator"
        model, inputs, targets = compiled(strategy)
        model.set_weights([results[f"simple/{index}"] for index in range(len(model.get_weights()))])
        print("evaluated", model.evaluate(inputs, targets, verbose=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
