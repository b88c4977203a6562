"""What pods would run, run here: with their environment, arguments, users, files of Secrets and names in the DNS."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import kubelet
import numpy as np
import pods
import pytest
import yaml
from kubelet import Pod
from pods import Cluster, Running

from tfps.launch import kubernetes
from tools.certificates import Authority

REASON = pods.reason_against()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.long,
    pytest.mark.timeout(900),
]
OUT = "/run/claims/out"
TOKEN = "a job token of this test".replace(" ", "-")
OPTIONS = ("--image", "i", "--workers", "2", "--pservers", "2", "--volume", f"out={OUT}")


def made_of(secrets: dict[str, dict[str, str]], *options: str) -> tuple[list[Pod], list[Pod]]:
    """Pservers and workers of what tfps_launch writes."""
    arguments = ["--print", *options, *OPTIONS, "pod.py", OUT]
    documents = list(yaml.safe_load_all(kubernetes.as_yaml(kubernetes.parse(arguments), arguments)))
    found = kubelet.pods(documents, {"pod-token": {"token": TOKEN}, **secrets})
    return tuple([each for each in found if each.role == role] for role in ("pserver", "worker"))  # type: ignore[return-value]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(nodes=10)


def probed(pserver: Running) -> list[int]:
    """What the probes of a pserver get."""
    ports = {port["name"]: port["containerPort"] for port in pserver.pod.container["ports"]}
    probes = [pserver.pod.container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    return [pserver.get(ports[each["port"]], each["path"])[0] for each in probes]


def finish(workers: Sequence[Running], folder: Path) -> None:
    """Waits for workers that must end well, with equal weights."""
    pods.wait(lambda: all(each.process.poll() is not None for each in workers), "the workers")
    assert [each.process.returncode for each in workers] == [0, 0]
    one, other = (dict(np.load(folder / f"{rank}.npz")) for rank in (0, 1))
    assert one.keys() == other.keys()
    assert len(one) == 4
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)


def prepared(cluster: Cluster, *, begun: bool) -> Path:
    """The folder that workers write to."""
    shutil.copy(Path(__file__).with_name("pod.py"), cluster.image)
    folder = cluster.claim("out")
    if begun:
        (folder / "begun").touch()
    return folder


def begun(cluster: Cluster, pservers: list[Pod], workers: list[Pod]) -> tuple[Path, list[Running], list[Running]]:
    """The folder, the pservers and the workers of a job that has made its first steps."""
    folder = prepared(cluster, begun=False)
    serving = [cluster.start(each) for each in pservers]
    first = [cluster.start(each) for each in workers]
    pods.wait((folder / "begun").exists, "the first steps", first)
    return folder, serving, first


@pytest.mark.parametrize("form", ["job", "jobset", "tfjob", "runtime"])
def test_what_is_written_trains_to_the_end(cluster: Cluster, form: str) -> None:
    pservers, workers = made_of({}, "--as", form)
    with cluster:
        folder = prepared(cluster, begun=True)
        serving = [cluster.start(each) for each in pservers]
        training = [cluster.start(each) for each in workers]
        pods.wait(lambda: all(probed(each) == [200] * 3 for each in serving), "the probes", serving)
        finish(training, folder)
        for rank, each in enumerate(training):
            assert f"rank={rank} workers=2 pservers=pod-p" in each.log()
        assert not any("may be read by other users" in each.log() for each in cluster.running)
        assert all("tfps_received_bytes_total" in each.get(9100, "/metrics")[1] for each in serving)


def test_workers_wait_for_pservers_that_the_dns_does_not_know_yet(cluster: Cluster, tmp_path: Path) -> None:
    pservers, workers = made_of({})
    with cluster:
        folder = prepared(cluster, begun=True)
        training = [cluster.start(each) for each in workers]
        pods.wait(lambda: all("waits for pserver" in each.log() for each in training), "what workers say", training)
        for each in pservers:
            cluster.start(each)
        finish(training, folder)


def test_with_tls_workers_and_pservers_trust_only_each_other(cluster: Cluster, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pservers, _ = made_of({"tls": {"tls.crt": "", "tls.key": "", "ca.crt": ""}}, "--tls-secret", "tls")
    pair = authority.sign("job", ",".join(f"DNS:{each.domain}" for each in pservers))
    secret = pods.values({"tls.crt": pair.cert, "tls.key": pair.key, "ca.crt": authority.file})
    pservers, workers = made_of({"tls": secret}, "--tls-secret", "tls")
    with cluster:
        folder = prepared(cluster, begun=True)
        for each in pservers:
            cluster.start(each)
        finish([cluster.start(each) for each in workers], folder)


def test_a_job_goes_on_after_one_of_its_workers_was_killed(cluster: Cluster) -> None:
    pservers, workers = made_of({})
    with cluster:
        folder, _, first = begun(cluster, pservers, workers)
        first[1].kill()
        pods.wait(lambda: first[0].process.poll() is not None, "the other worker")
        assert first[0].process.returncode != 0
        finish([cluster.start(each) for each in workers], folder)


def test_a_job_goes_on_after_a_pserver_came_back_with_another_address(cluster: Cluster) -> None:
    pservers, workers = made_of({})
    with cluster:
        folder, serving, first = begun(cluster, pservers, workers)
        serving[0].kill()
        pods.wait(lambda: all(each.process.poll() is not None for each in first), "the workers")
        assert all(each.process.returncode != 0 for each in first)
        second = [cluster.start(each) for each in workers]
        # They still know the old address, where nothing answers.
        pods.wait(lambda: all("waits for pserver" in each.log() for each in second), "what workers say", second)
        cluster.start(pservers[0])
        finish(second, folder)


@pytest.mark.parametrize("options", [(), ("--min-workers", "1")], ids=["all are needed", "elastic"])
def test_a_worker_that_is_deleted_ends_at_once_or_leaves_the_others(cluster: Cluster, options: tuple[str, ...]) -> None:
    pservers, workers = made_of({}, *options)
    with cluster:
        _, serving, first = begun(cluster, pservers, workers)
        assert all(probed(each) == [200] * 3 for each in serving)
        first[1].terminate()
        pods.wait(lambda: first[1].process.poll() is not None, "the end of the deleted worker")
        assert first[1].process.returncode == 128 + signal.SIGTERM
        assert ("SIGTERM: this worker ends its step and leaves the job" in first[1].log()) == bool(options)
        if options:
            pods.wait(lambda: "goes on with 1 of 2 workers" in first[0].log(), "what the other worker says", first[:1])


def test_a_killed_worker_joins_the_others_where_they_can_do_without_it(cluster: Cluster) -> None:
    pservers, workers = made_of({}, "--min-workers", "1")
    with cluster:
        _, _, first = begun(cluster, pservers, workers)
        first[1].kill()
        pods.wait(lambda: "goes on with 1 of 2 workers" in first[0].log(), "what the other worker says", first[:1])
        again = cluster.start(workers[1])
        joined = "rank 1 takes part from now on, with 2 workers"
        both = [first[0], again]
        pods.wait(lambda: all(joined in each.log() for each in both), "what workers say", both)
        assert first[0].process.poll() is None
