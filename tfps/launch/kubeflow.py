"""The pods of a job in objects of other controllers: JobSet, and Kubeflow's TFJob and ClusterTrainingRuntime.

Tested in tests/launch/test_kubernetes.py, and with processes in tests/integration/test_kubernetes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tfps.launch.job import Job
from tfps.launch.manifests import (
    RANK,
    KubernetesJob,
    Manifest,
    disruption_budget,
    environment,
    from_field,
    indexed_job,
    metadata,
    pod,
    pserver_container,
    worker_container,
    worker_environment,
)

# What the training operator looks for in a TFJob. It puts the port into the addresses that it writes to TF_CONFIG.
_TF_CONTAINER, _TF_PORT = "tensorflow", ("tfjob-port", 2222)
# Kubeflow's trainer gives a TrainJob's image, command, variables and number of nodes to the job with this label, in
# which the container has this name. A JobSet has the name of its TrainJob.
_TRAINER = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
_NODE = "node"
_JOB_SET_NAME = "metadata.labels['jobset.sigs.k8s.io/jobset-name']"


def job_set(job: KubernetesJob) -> list[Manifest]:
    """A JobSet, which ends the pservers when all workers have ended well, and starts all anew when one has failed."""
    launch = job.launch_job(job.at(pserver_host(job.name)))
    place = [from_field("TFPS_RANK", RANK), *environment(launch.worker_variables())]
    made = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(job, job.name, "job"),
        "spec": _job_set_spec(job, launch, place, (), job.name, "worker"),
    }
    return [made, disruption_budget(job, "pserver"), disruption_budget(job, "worker")]


def training_runtime(job: KubernetesJob) -> list[Manifest]:
    """A ClusterTrainingRuntime for so many workers and pservers, and a TrainJob that uses it."""
    # The runtime does not know the names of the TrainJobs that will use it: pods read them from a label.
    name = [from_field("TFPS_JOB", _JOB_SET_NAME)]
    launch = replace(job.launch_job(job.at(pserver_host("$(TFPS_JOB)"))), name="$(TFPS_JOB)")
    variables = launch.worker_variables()
    del variables["TFPS_JOB"]
    place = [*name, from_field("TFPS_RANK", RANK), *environment(variables)]
    spec = _job_set_spec(job, launch, place, name, None, _NODE)
    anywhere = replace(job, namespace="")
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": metadata(anywhere, f"tfps-{job.name}", "runtime"),
        "spec": {"mlPolicy": {"numNodes": job.workers}, "template": {"spec": spec}},
    }
    train_job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata(job, job.name, "job"),
        "spec": {"runtimeRef": {"name": f"tfps-{job.name}"}},
    }
    return [runtime, train_job]


def tf_job(job: KubernetesJob) -> list[Manifest]:
    """A TFJob: workers learn pservers, rank and number of workers from the TF_CONFIG that its operator sets."""
    launch = Job(job.name, job.workers, token_file=job.launch_job(()).token_file)
    variables = {"TFPS_JOB": job.name, **launch.pserver_variables()}
    worker = worker_container(job, worker_environment(job, environment(variables)), _TF_CONTAINER)
    pserver = pserver_container(job, launch, name=_TF_CONTAINER, port=_TF_PORT)
    replicas = {
        kind: {"replicas": count, "restartPolicy": "OnFailure", "template": pod(job, role, container)}
        for kind, role, count, container in (
            ("PS", "pserver", job.pservers, pserver),
            ("Worker", "worker", job.workers, worker),
        )
    }
    made = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "TFJob",
        "metadata": metadata(job, job.name, "job"),
        "spec": {
            # Without AllWorkers the job ends with worker 0, maybe before the others have saved what they save.
            "successPolicy": "AllWorkers",
            # cleanPodPolicy: pservers do not end by themselves. backoffLimit: one worker that fails makes all others
            # fail, and the operator ends the job when its pods have had that many restarts, not more.
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": job.restarts * job.workers + 1},
            "tfReplicaSpecs": replicas,
        },
    }
    return [made, disruption_budget(job, "pserver"), disruption_budget(job, "worker")]


def pserver_host(name: str) -> str:
    """Where a JobSet called `name` makes a pserver reachable: JOBSET-JOB-REPLICA-INDEX.SUBDOMAIN."""
    return f"{name}-pserver-0-{{}}.{name}"


def _job_set_spec(
    job: KubernetesJob,
    launch: Job,
    place: Sequence[Manifest],
    pserver_env: Sequence[Manifest],
    subdomain: str | None,
    worker_name: str,
) -> Manifest:
    pserver = pserver_container(job, launch, env=pserver_env)
    worker = worker_container(job, worker_environment(job, place), worker_name)
    # Every failure is for the JobSet: its restart begins with new pods for all.
    pservers, workers = (
        indexed_job(job, role, pod(job, role, container, "Never"), {"backoffLimit": 0}, "FailJob")
        for role, container in (("pserver", pserver), ("worker", worker))
    )
    labels = {"metadata": {"labels": _TRAINER}} if worker_name == _NODE else {}
    return {
        # By default the subdomain is the JobSet's name.
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
        | ({"subdomain": subdomain} if subdomain else {}),
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [worker_name]},
        "failurePolicy": {
            "maxRestarts": job.restarts,
            "rules": [
                {
                    "name": "disrupted",
                    "action": "RestartJobSetAndIgnoreMaxRestarts",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ],
        },
        "replicatedJobs": [
            {"name": "pserver", "replicas": 1, "template": {"spec": pservers}},
            {"name": worker_name, "replicas": 1, "template": {**labels, "spec": workers}},
        ],
    }
