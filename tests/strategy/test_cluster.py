"""Who takes part, from arguments, cluster resolvers, TF_CONFIG and the launcher's environment."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest
import tensorflow as tf
import training

import tfps
from tfps.strategy.strategy import Cluster, find, resolve
from tfps.types import Argument, Json

TASKS = {"chief": ["c:1"], "worker": ["w0:1", "w1:1"], "ps": ["p0:1", "p1:1"]}


def tf_config(task: Json, cluster: Json = TASKS) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def test_without_anything_the_pserver_is_embedded() -> None:
    assert resolve(None, {}) == Cluster()


def test_tf_config_gives_pservers_rank_and_workers_chief_first() -> None:
    expected = [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)]
    for kind, index, rank in expected:
        assert resolve(None, tf_config({"type": kind, "index": index})) == Cluster(("p0:1", "p1:1"), rank, 3)


def test_what_the_operator_of_tfjobs_writes_is_understood() -> None:
    text = (
        '{"cluster":{"ps":["train-ps-0.research.svc:2222"],"worker":["train-worker-0.research.svc:2222",'
        '"train-worker-1.research.svc:2222"]},"task":{"type":"%s","index":%d},"environment":"cloud"}'
    )
    expected = Cluster(("train-ps-0.research.svc:2222",), 1, 2, "train")
    assert resolve(None, {"TF_CONFIG": text % ("worker", 1), "TFPS_JOB": "train"}) == expected
    with pytest.raises(tfps.ConfigError, match="run `tfps_pserver --port 2222 --workers 2`"):
        resolve(None, {"TF_CONFIG": text % ("ps", 0)})


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


MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
STEP = {"SLURM_PROCID": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(("variables", "rank"), [(MPIRUN, 1), (STEP, 2)])
def test_mpirun_and_srun_give_ranks(variables: dict[str, str], rank: int) -> None:
    expected = Cluster(("x:1",), rank, 4)
    assert resolve(["x:1"], variables) == expected
    assert resolve(None, {**variables, "TFPS_PSERVERS": "x:1"}) == expected
    assert resolve(["x:1"], {**variables, "TFPS_WORKERS": "4"}) == expected


def test_explicit_ranks_win_over_those_of_mpirun() -> None:
    assert resolve(["x:1"], {**MPIRUN, "TFPS_RANK": "3", "TFPS_WORKERS": "8"}) == Cluster(("x:1",), 3, 8)
    assert resolve(["x:1"], {**MPIRUN, "TFPS_WORKERS": "8"}) == Cluster(("x:1",), None, 8)
    worker = tf_config({"type": "worker", "index": 1})
    assert resolve(["x:1"], {**MPIRUN, **worker}) == Cluster(("x:1",), 2, 3)
    assert resolve(simple(TASKS, "worker", 1), MPIRUN) == Cluster(("p0:1", "p1:1"), 2, 3)


def test_a_resolver_that_does_not_know_its_task_takes_the_rank_of_mpirun_if_the_numbers_agree() -> None:
    four = {**TASKS, "worker": ["w0:1", "w1:1", "w2:1"]}
    assert resolve(simple(four), MPIRUN) == Cluster(("p0:1", "p1:1"), 1, 4)
    assert resolve(simple(), MPIRUN) == Cluster(("p0:1", "p1:1"), None, 3)


def test_processes_of_mpirun_without_pservers_have_to_meet() -> None:
    cluster = resolve(None, MPIRUN)
    assert cluster.others is not None
    assert (cluster.pservers, cluster.others.rank, cluster.others.workers) == ((), 1, 4)
    assert resolve(None, {**MPIRUN, "TFPS_WORKERS": "4"}).others == cluster.others


def test_processes_of_mpirun_that_are_to_train_alone_do() -> None:
    assert resolve(None, {**MPIRUN, "TFPS_WORKERS": "1"}) == Cluster()
    assert resolve(None, {**MPIRUN, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}) == Cluster()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TFPS_RANK": "1", "TFPS_WORKERS": "2"}, r"this process is rank 1 of 2 workers .* but no pservers are named"),
        ({"TFPS_RANK": "1"}, "this process is rank 1 of several workers"),
        ({"TFPS_WORKERS": "2"}, r"this process is rank \? of 2 workers"),
        (
            {**MPIRUN, "TFPS_RANK": "0"},
            r"mpirun \(Open MPI\) has started 4 processes, but .* rank 0 of an unknown number",
        ),
        ({**MPIRUN, "TFPS_RANK": "0", "TFPS_WORKERS": "2"}, "this process is rank 0 of 2 workers"),
        ({"PMIX_RANK": "0"}, None),
        (
            {**MPIRUN, **tf_config({"type": "worker", "index": 0}, {"worker": ["w:1"]})},
            "started 4 processes, but TFPS_RANK, TF_CONFIG or the cluster resolver says that this one is rank 0 of 1",
        ),
    ],
)
def test_nobody_trains_alone_who_has_others(variables: dict[str, str], message: str | None) -> None:
    if message is None:  # how many there are is found out later, or is an error then
        assert resolve(None, variables).others is not None
        return
    with pytest.raises(tfps.ConfigError, match=message):
        resolve(None, variables)


def test_pservers_without_tls_are_not_started_for_workers_with_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in MPIRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        tfps.ConfigError, match=r"that processes of mpirun \(Open MPI\) start .* have no TLS, but tls_ca"
    ):
        find(None, tfps.Config(tls_ca="ca.pem"))


def test_an_embedded_pserver_does_not_stand_in_for_those_that_several_processes_lack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met = {"TFPS_PSERVERS": "", "TFPS_RANK": "1", "TFPS_WORKERS": "4"}
    for name, value in {**MPIRUN, **met}.items():
        monkeypatch.setenv(name, value)
    for name in met:  # until the processes have met; the test's own end removes them
        monkeypatch.delenv(name)
    monkeypatch.setattr("tfps.strategy.strategy.rendezvous", lambda *_: met)
    with pytest.raises(tfps.ConfigError, match="has started 4 processes, but none of them has started a pserver"):
        find(None, tfps.Config())


def test_without_any_rank_the_order_of_joining_decides() -> None:
    assert resolve(["x:1", "y:2"], {}) == Cluster(("x:1", "y:2"), None, None)


def simple(
    tasks: Json = TASKS, task_type: str | None = None, task_id: int | None = None
) -> tf.distribute.cluster_resolver.ClusterResolver:
    spec = tf.train.ClusterSpec(tasks)
    return tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type=task_type, task_id=task_id)


def test_a_cluster_resolver_is_asked_and_decides_alone() -> None:
    environment = {**tf_config({"type": "chief", "index": 0}), "TFPS_PSERVERS": "l:1", "TFPS_RANK": "0"}
    assert resolve(simple(TASKS, "worker", 1), environment) == Cluster(("p0:1", "p1:1"), 2, 3)


def test_a_resolver_that_does_not_know_its_task_leaves_ranks_to_the_environment_or_to_joining() -> None:
    assert resolve(simple(), {}) == Cluster(("p0:1", "p1:1"), None, 3)
    assert resolve(simple(), {"TFPS_RANK": "2"}) == Cluster(("p0:1", "p1:1"), 2, 3)


def test_an_empty_resolver_means_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert resolve(simple({}), {}) == Cluster()
    assert resolve(tf.distribute.cluster_resolver.TFConfigClusterResolver(), {}) == Cluster()


def test_tf_configs_own_resolver_gives_what_tf_config_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", tf_config({"type": "worker", "index": 0})["TF_CONFIG"])
    assert resolve(tf.distribute.cluster_resolver.TFConfigClusterResolver(), {}) == Cluster(("p0:1", "p1:1"), 1, 3)


def slurm(
    monkeypatch: pytest.MonkeyPatch, process: int, **arguments: Argument
) -> tf.distribute.cluster_resolver.ClusterResolver:
    """TensorFlow's resolver in process `process` of 4 on two nodes."""
    variables = {"PROCID": process, "STEP_NUM_TASKS": 4, "STEP_NODELIST": "node[07-08]", "STEP_TASKS_PER_NODE": "2(x2)"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    return tf.distribute.cluster_resolver.SlurmClusterResolver({"ps": 1, "worker": 3}, **arguments)


def test_slurm_gives_the_first_tasks_to_the_pservers(monkeypatch: pytest.MonkeyPatch) -> None:
    for process in (1, 2, 3):
        assert resolve(slurm(monkeypatch, process), {}) == Cluster(("node07:8888",), process - 1, 3)
    with pytest.raises(tfps.ConfigError, match=r"SlurmClusterResolver says .* `tfps_pserver --port 8888 --workers 3`"):
        resolve(slurm(monkeypatch, 0), {})


class Pods:
    """As much of a Kubernetes client as TensorFlow's resolver asks."""

    def __init__(self, **addresses: list[str]) -> None:
        self.addresses = addresses

    def list_pod_for_all_namespaces(self, label_selector: str) -> SimpleNamespace:
        name = label_selector.removeprefix("job-name=")
        status = [SimpleNamespace(phase="Running", host_ip=address) for address in self.addresses[name]]
        pods = [
            SimpleNamespace(metadata=SimpleNamespace(name=f"{name}-{index}"), status=each)
            for index, each in enumerate(status)
        ]
        return SimpleNamespace(items=pods)


def kubernetes(pods: Pods) -> tf.distribute.cluster_resolver.ClusterResolver:
    labels = {name: [f"job-name={name}"] for name in pods.addresses}
    return tf.distribute.cluster_resolver.KubernetesClusterResolver(labels, override_client=pods)


def test_kubernetes_gives_addresses_and_the_task_if_it_is_set() -> None:
    resolver = kubernetes(Pods(worker=["10.0.0.1", "10.0.0.2"], ps=["10.0.0.3"]))
    assert resolve(resolver, {}) == Cluster(("10.0.0.3:8470",), None, 2)
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolve(resolver, {}) == Cluster(("10.0.0.3:8470",), 1, 2)


def test_pservers_of_a_resolver_must_differ_and_must_be_there() -> None:
    with pytest.raises(tfps.ConfigError, match=r"different addresses, got 10\.0\.0\.3:8470, 10\.0\.0\.3:8470"):
        resolve(kubernetes(Pods(worker=["10.0.0.1"], ps=["10.0.0.3", "10.0.0.3"])), {})
    with pytest.raises(tfps.ConfigError, match="KubernetesClusterResolver has 2 workers but no 'ps' task"):
        resolve(kubernetes(Pods(worker=["10.0.0.1", "10.0.0.2"])), {})


@pytest.mark.parametrize("cluster", [TASKS, {**TASKS, "evaluator": ["e:1"]}])
@pytest.mark.parametrize("given", [None, ["x:1"]])
def test_an_evaluator_is_alone_and_takes_no_rank(cluster: Json, given: list[str] | None) -> None:
    assert resolve(given, tf_config({"type": "evaluator", "index": 0}, cluster)) == Cluster()
    assert resolve(simple(cluster, "evaluator", 0), {}) == Cluster()


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


@pytest.mark.parametrize("given", [None, ["x:1"]])
def test_a_ps_task_is_told_how_to_run_the_pserver(given: list[str] | None) -> None:
    with pytest.raises(tfps.ConfigError, match="run `tfps_pserver --port 7071 --workers 3` there instead"):
        resolve(given, tf_config({"type": "ps", "index": 1}, {**TASKS, "ps": ["p0:7070", "p1:7071"]}))


def test_workers_without_a_ps_task_are_told_to_start_one() -> None:
    with pytest.raises(tfps.ConfigError, match="2 workers but no 'ps' task; start one with tfps_pserver"):
        resolve(None, tf_config({"type": "worker", "index": 0}, {"worker": ["a:1", "b:1"]}))


@pytest.mark.parametrize(
    ("pservers", "message"),
    [
        ("host:1", "pservers must be a list of 'host:port', got 'host:1'; write ..host:1.."),
        ([], "at least one 'host:port', got an empty list"),
        (["a:1", "a:1"], "pservers must be different addresses"),
        (["a"], "'host:port'"),
    ],
)
def test_bad_addresses_are_refused(pservers: Argument, message: str) -> None:
    with pytest.raises(tfps.ConfigError, match=message):
        resolve(pservers, {})


def test_every_strategy_says_which_task_it_is(strategy: tfps.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = strategy.cluster_resolver
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 0, "")
    assert resolver.cluster_spec().as_dict() == {"worker": ["worker-0:0"]}
    assert training.is_chief(strategy)
    monkeypatch.setenv("TF_CONFIG", tf_config({"type": "worker", "index": 1})["TF_CONFIG"])  # of another job
    assert (strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id) == ("worker", 0)


def test_a_strategy_returns_the_resolver_that_it_got_if_that_knows_its_task() -> None:
    for tasks, returns in (({"worker": ["w:1"]}, True), ({}, False)):
        given = simple(tasks, "worker", 0)
        strategy = tfps.Strategy(given)
        assert (strategy.cluster_resolver is given) == returns
        assert training.is_chief(strategy)
        strategy.close()
    strategy = tfps.Strategy(simple({"worker": ["w:1"]}, "evaluator", 0))
    assert strategy.cluster_resolver.task_type == "evaluator"
    assert not training.is_chief(strategy)
    strategy.close()
