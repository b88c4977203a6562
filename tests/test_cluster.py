"""Who takes part, from arguments, cluster resolvers, TF_CONFIG and the launcher's environment."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest
import tensorflow as tf

import tfps
from tfps.cluster import Cluster, resolve

TASKS = {"chief": ["c:1"], "worker": ["w0:1", "w1:1"], "ps": ["p0:1", "p1:1"]}


def tf_config(task: Any, cluster: Any = TASKS) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def test_without_anything_the_pserver_is_embedded() -> None:
    assert resolve(None, {}) == Cluster()


def test_tf_config_gives_pservers_rank_and_workers_chief_first() -> None:
    expected = [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)]
    for kind, index, rank in expected:
        assert resolve(None, tf_config({"type": kind, "index": index})) == Cluster(("p0:1", "p1:1"), rank, 3)


def test_explicit_addresses_win_and_the_rank_still_comes_from_tf_config() -> None:
    assert resolve(["x:1"], tf_config({"type": "worker", "index": 1})) == Cluster(("x:1",), 2, 3)


def test_the_launcher_wins_over_tf_config() -> None:
    environment = {
        **tf_config({"type": "worker", "index": 1}),
        "TFPS_PSERVERS": "l:1",
        "TFPS_RANK": "0",
        "TFPS_WORKERS": "5",
    }
    assert resolve(None, environment) == Cluster(("l:1",), 0, 5)


def test_without_any_rank_the_order_of_joining_decides() -> None:
    assert resolve(["x:1", "y:2"], {}) == Cluster(("x:1", "y:2"), None, None)


def test_a_cluster_resolver_is_asked() -> None:
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": ["w0:1", "w1:1"], "ps": ["p:1"]}), task_type="worker", task_id=1
    )
    assert resolve(resolver, {}) == Cluster(("p:1",), 1, 2)


def test_an_evaluator_trains_alone() -> None:
    assert resolve(None, tf_config({"type": "evaluator", "index": 0})) == Cluster()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "TF_CONFIG must be JSON like .* got '{'"),
        ("[1]", r"TF_CONFIG must be an object like .* got '\[1\]'"),
        ('{"cluster": [1]}', "TF_CONFIG must be an object"),
        ('{"cluster": {"worker": "w:1"}}', r"cluster\['worker'\] must be a list of 'host:port', got 'w:1'"),
        ('{"cluster": {"worker": [1]}}', r"cluster\['worker'\] must be a list"),
        (
            '{"cluster": {"worker": ["w:1"], "ps": ["p"]}, "task": {"type": "worker", "index": 0}}',
            "'host:port' .* got 'p'",
        ),
        ('{"cluster": {"worker": ["w:1"], "ps": ["p:1"]}, "task": 3}', "task must be an object"),
    ],
)
def test_a_malformed_tf_config_is_refused_by_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(tfps.ConfigError, match=message):
        resolve(None, {"TF_CONFIG": text})


def test_a_task_outside_the_cluster_is_refused_with_what_there_is() -> None:
    with pytest.raises(tfps.ConfigError, match=r"chief 0, worker 0, worker 1\), got type 'worker' index 7"):
        resolve(None, tf_config({"type": "worker", "index": 7}))


def test_a_ps_task_is_told_to_run_the_pserver() -> None:
    with pytest.raises(tfps.ConfigError, match="run tfps_pserver"):
        resolve(None, tf_config({"type": "ps", "index": 0}))


def test_workers_without_a_ps_task_are_told_to_start_one() -> None:
    with pytest.raises(tfps.ConfigError, match="2 workers but no 'ps' task; start one with tfps_pserver"):
        resolve(None, tf_config({"type": "worker", "index": 0}, {"worker": ["a:1", "b:1"]}))


@pytest.mark.parametrize(
    ("pservers", "message"),
    [
        ("host:1", "pservers must be a list of 'host:port', got the string 'host:1'"),
        ([], "at least one 'host:port', got an empty list"),
        (["a:1", "a:1"], "pservers must be different addresses"),
        (["a"], "'host:port'"),
    ],
)
def test_bad_addresses_are_refused(pservers: Any, message: str) -> None:
    with pytest.raises(tfps.ConfigError, match=message):
        resolve(pservers, {})
