"""A job as Kubernetes' own objects: pservers in a StatefulSet behind a headless Service, workers in an Indexed Job.

What is here are pure functions from a `KubernetesJob` to manifests, which are dicts as YAML has them. `kubeflow` puts
the same pods into objects of other controllers.

Tested in tests/launch/test_kubernetes.py, and with processes in tests/integration/test_kubernetes.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from tfps.config import check_address
from tfps.errors import ConfigError
from tfps.launch.job import Job
from tfps.types import Json

Manifest = dict[str, Json]

PORT = 7070  # where workers reach a pserver; slices go to the next port
TOKEN_FILE = "/run/secrets/tfps/token/token"
TLS_FOLDER = "/run/secrets/tfps/tls"
# Set by the Job controller on every pod of an Indexed Job, from 0 on; a pod that replaces another has its index.
RANK = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
CONNECT_TIMEOUT_S = 600  # pods start at different times: images are pulled, nodes are added
MAX_NAME = 40  # with what controllers append, names of pods stay below the 63 characters of a DNS label
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_INSTEAD_OF = {
    "TFPS_RANK": "leave it out, each pod learns its own",
    "TFPS_WORKERS": "use --workers",
    "TFPS_PSERVERS": "use --pservers, whose addresses it gets",
    "TFPS_JOB": "use --name",
    "TFPS_TOKEN_FILE": "use --token-secret",
    "TFPS_TLS_*": "use --tls-secret",
}
_MAY_EXCEED = ("cpu", "ephemeral-storage")  # what is requested of these is no limit; of devices it has to be one


@dataclass(frozen=True)
class KubernetesJob:
    """What to run, and on what.

    Args:
        name: of the job, a DNS label of up to 40 characters; other objects have names that begin with it.
        command: what a worker executes in `image`.
        workers, pservers: numbers of pods.
        pserver_image: "": `image`, which then needs the extra `metrics` too.
        namespace: "": that of kubectl's context.
        worker_resources, pserver_resources: what a pod requests, such as cpu -> 4 and memory -> 8Gi. All but cpu and
            ephemeral-storage is also the limit. By that of memory a pserver knows how much a job may declare.
        gpus: per worker, as `gpu_resource`.
        token_secret: Secret whose key `token` is the job token; "": NAME-token.
        tls_secret: Secret with `tls.crt`, `tls.key` and `ca.crt` for all pods; "": no TLS.
        metrics_port: of pservers, for Prometheus and probes; None: no metrics, probes only connect.
        restarts: how often all workers may start anew after one has failed.
        volumes: pairs of a PersistentVolumeClaim and its path in workers.
        variables: further environment variables of workers.
        user: numeric id that all pods run as; 0 is root.

    Raises:
        ConfigError: a value is out of range or malformed; the message names the option.
    """

    name: str
    image: str
    command: tuple[str, ...]
    workers: int = 1
    pservers: int = 1
    pserver_image: str = ""
    namespace: str = ""
    worker_resources: Mapping[str, str] = field(default_factory=lambda: {"cpu": "2", "memory": "4Gi"})
    pserver_resources: Mapping[str, str] = field(default_factory=lambda: {"cpu": "1", "memory": "2Gi"})
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    token_secret: str = ""
    tls_secret: str = ""
    metrics_port: int | None = 9100
    restarts: int = 3
    volumes: Sequence[tuple[str, str]] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    user: int = 10001

    def __post_init__(self) -> None:
        if len(self.name) > MAX_NAME or not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"--name must be up to {MAX_NAME} lowercase letters, digits and '-', beginning with a letter and not "
                f"ending with '-', got {self.name!r}"
            )
        for name, least in (("workers", 1), ("pservers", 1), ("gpus", 0), ("restarts", 0), ("user", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name} must be at least {least}, got {getattr(self, name)}")
        for role in ("worker", "pserver"):
            for name, quantity in getattr(self, f"{role}_resources").items():
                if not _QUANTITY.fullmatch(quantity):
                    raise ConfigError(
                        f"--{role}-resources: {name} must be a quantity such as 4 or 8Gi, got {quantity!r}"
                    )
        for name in self.variables:
            if not _VARIABLE.fullmatch(name):
                raise ConfigError(f"--env must be NAME=VALUE, got the name {name!r}")
            if instead := _INSTEAD_OF.get("TFPS_TLS_*" if name.startswith("TFPS_TLS_") else name):
                raise ConfigError(f"--env must not be a variable that tfps_launch sets itself, got {name}; {instead}")
        paths = [PurePosixPath(path) for _, path in self.volumes]
        for claim, path in self.volumes:
            if not path.startswith("/"):
                raise ConfigError(f"--volume must be CLAIM=PATH with an absolute path, got {claim}={path}")
        if twice := {path for path in paths if paths.count(path) > 1}:
            raise ConfigError(f"--volume must have another PATH each time, got {min(twice)} more than once; change one")

    @property
    def secret(self) -> str:
        """The name of the Secret with the job token."""
        return self.token_secret or f"{self.name}-token"

    @property
    def pserver_service(self) -> str:
        """The name of the StatefulSet and of the Service that gives its pods stable names."""
        return f"{self.name}-pserver"

    @property
    def pserver_host(self) -> str:
        """The name by which workers reach a pod of the StatefulSet, with {} for its index."""
        return f"{self.pserver_service}-{{}}.{self.pserver_service}"

    def launch_job(self, pservers: Sequence[str]) -> Job:
        """This job as its processes know it, with its pservers at `pservers`."""
        return Job(self.name, self.workers, tuple(pservers), TOKEN_FILE)

    def at(self, pserver: str) -> tuple[str, ...]:
        """Addresses of the pservers: `pserver` with {} for the index. Short names: pods look in their own namespace."""
        return tuple(check_address(f"{pserver.format(index)}:{PORT}") for index in range(self.pservers))


def literal(text: str) -> str:
    """`text` so that Kubernetes leaves it as it is: in arguments and values it replaces $(NAME), and $$ by $."""
    return text.replace("$", "$$")


def _resources(requests: Mapping[str, str], gpus: Mapping[str, str]) -> Manifest:
    limits = {name: quantity for name, quantity in requests.items() if name not in _MAY_EXCEED}
    return {"requests": {**requests, **gpus}, "limits": {**limits, **gpus}}


def _mounts(job: KubernetesJob) -> list[Manifest]:
    folders = {"token": str(PurePosixPath(TOKEN_FILE).parent), **({"tls": TLS_FOLDER} if job.tls_secret else {})}
    return [{"name": name, "mountPath": folder, "readOnly": True} for name, folder in folders.items()]


def labels(job: KubernetesJob, role: str) -> dict[str, str]:
    """What all pods of a role have, and nothing else."""
    return {
        "app.kubernetes.io/name": "tfps",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/component": role,
    }


def metadata(job: KubernetesJob, name: str, role: str) -> Manifest:
    """Of an object for the pods of a role."""
    place = {"namespace": job.namespace} if job.namespace else {}
    return {"name": name, **place, "labels": labels(job, role)}


def from_field(name: str, path: str) -> Manifest:
    """A variable whose value is a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def environment(variables: Mapping[str, str]) -> list[Manifest]:
    """Variables in their order: a value may use those before it as $(NAME)."""
    return [{"name": name, "value": value} for name, value in variables.items()]


def _common_variables(job: KubernetesJob) -> dict[str, str]:
    files = {"CA": "ca.crt", "CERT": "tls.crt", "KEY": "tls.key"} if job.tls_secret else {}
    return {f"TFPS_TLS_{name}": f"{TLS_FOLDER}/{file}" for name, file in files.items()}


def worker_environment(job: KubernetesJob, place: Sequence[Manifest]) -> list[Manifest]:
    """A worker's variables; `place` has those by which it finds its place in the job."""
    given = {name: literal(value) for name, value in job.variables.items()}
    settings = {"TFPS_CONNECT_TIMEOUT_S": str(CONNECT_TIMEOUT_S), "PYTHONUNBUFFERED": "1", **given}
    return [*place, *environment({**_common_variables(job), **settings})]


def _volume_names(job: KubernetesJob) -> dict[str, str]:
    """A pod's name for each claim, which may have several paths."""
    return {claim: f"volume-{index}" for index, claim in enumerate(dict(job.volumes))}


def worker_container(job: KubernetesJob, env: list[Manifest], name: str = "worker") -> Manifest:
    """Runs the script."""
    gpus = {job.gpu_resource: str(job.gpus)} if job.gpus else {}
    names = _volume_names(job)
    mounts = [{"name": names[claim], "mountPath": path} for claim, path in job.volumes]
    if job.gpus > 1:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    return {
        "name": name,
        "image": job.image,
        "command": [literal(part) for part in job.command],
        "env": env,
        "resources": _resources(job.worker_resources, gpus),
        "volumeMounts": [*_mounts(job), *mounts],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }


def pserver_container(
    job: KubernetesJob,
    launch: Job,
    *,
    name: str = "pserver",
    port: tuple[str, int] = ("grpc", PORT),
    env: Sequence[Manifest] = (),
) -> Manifest:
    """Runs `tfps_pserver` on `port`; `env`: variables before its own.

    Raises:
        ConfigError: its metrics cannot have the port that they are to have.
    """
    port_name, number = port
    if job.metrics_port is not None and (not 0 < job.metrics_port < 65536 or job.metrics_port in (number, number + 1)):
        raise ConfigError(
            f"--metrics-port must be from 1 to 65535 and not {number} or {number + 1}, which are a pserver's own, got "
            f"{job.metrics_port}"
        )
    arguments = launch.pserver_arguments("0.0.0.0", number, job.metrics_port)
    ports = [port]
    if not job.tls_secret:  # data connections have no TLS
        arguments += ["--data-port", str(number + 1)]
        ports.append(("data", number + 1))
    check: Manifest = {"tcpSocket": {"port": port_name}}
    if job.metrics_port is not None:
        arguments += ["--metrics-host", "0.0.0.0"]
        ports.append(("metrics", job.metrics_port))
        check = {"httpGet": {"path": "/healthz", "port": "metrics"}}
    return {
        "name": name,
        "image": job.pserver_image or job.image,
        "command": ["tfps_pserver"],
        "args": arguments,
        "env": [*env, *environment({**launch.pserver_variables(), **_common_variables(job)})],
        "ports": [{"name": each, "containerPort": listens} for each, listens in ports],
        "startupProbe": {**check, "periodSeconds": 2, "failureThreshold": 60},
        "readinessProbe": {**check, "periodSeconds": 5, "timeoutSeconds": 5},
        # A restart ends the job, and under full load a pserver may answer late: only after a minute of silence.
        "livenessProbe": {**check, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "resources": _resources(job.pserver_resources, {}),
        "volumeMounts": _mounts(job),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }


def pod(job: KubernetesJob, role: str, container: Manifest, restart: str | None = None) -> Manifest:
    """A template of pods with one container; `restart`: their restartPolicy, None: that of their controller."""
    volumes = [{"name": "token", "secret": {"secretName": job.secret, "defaultMode": 0o440}}]
    if job.tls_secret:
        volumes.append({"name": "tls", "secret": {"secretName": job.tls_secret, "defaultMode": 0o440}})
    if role == "worker":
        volumes += [
            {"name": name, "persistentVolumeClaim": {"claimName": claim}} for claim, name in _volume_names(job).items()
        ]
        if job.gpus > 1:  # NCCL joins the GPUs of a pod through shared memory, of which pods have 64 MB
            volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # the variables of a service called tfps-... would look like settings
        "securityContext": {
            "runAsNonRoot": job.user != 0,
            "runAsUser": job.user,
            "runAsGroup": job.user,
            "fsGroup": job.user,  # may read the files of Secrets
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }
    if restart is not None:
        spec["restartPolicy"] = restart
    if role == "pserver":
        # On different nodes if possible: each has a link of its own.
        spec["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels(job, role)},
            }
        ]
    return {"metadata": {"labels": labels(job, role)}, "spec": spec}


def indexed_job(job: KubernetesJob, role: str, template: Manifest, failures: Manifest, disrupted: str) -> Manifest:
    """The spec of a Job with an index for every pod.

    Args:
        failures: fields that say how many pods may fail.
        disrupted: action for a pod that Kubernetes itself ends (preemption, a node that is gone), which is not the
            program's fault.
    """
    count = job.workers if role == "worker" else job.pservers
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        **failures,
        "podFailurePolicy": {
            "rules": [{"action": disrupted, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
        "template": template,
    }


def disruption_budget(job: KubernetesJob, role: str) -> Manifest:
    """No pod of the role may be evicted to drain a node: the job would end with it."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(job, f"{job.name}-{role}", role),
        # As a number: the controllers of most of these pods do not tell how many there should be.
        "spec": {
            "minAvailable": job.pservers if role == "pserver" else job.workers,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": labels(job, role)},
        },
    }


def service_monitor(job: KubernetesJob) -> Manifest:
    """Makes the Prometheus operator scrape the pservers.

    Raises:
        ConfigError: they have no metrics.
    """
    if job.metrics_port is None:
        raise ConfigError("--service-monitor must come with metrics, got --no-metrics")
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": metadata(job, job.pserver_service, "pserver"),
        "spec": {
            "selector": {"matchLabels": labels(job, "pserver")},
            "endpoints": [{"port": "metrics", "path": "/metrics", "interval": "15s"}],
        },
    }


def manifests(job: KubernetesJob) -> list[Manifest]:
    """Service, StatefulSet and Job, and budgets for their pods."""
    launch = job.launch_job(job.at(job.pserver_host))
    pserver = pserver_container(job, launch)
    service: Manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, job.pserver_service, "pserver"),
        "spec": {
            "clusterIP": "None",
            # Workers may know a pserver's address before it is ready: they wait for it anyway.
            "publishNotReadyAddresses": True,
            "selector": labels(job, "pserver"),
            "ports": [
                {"name": each["name"], "port": each["containerPort"], "targetPort": each["name"]}
                for each in pserver["ports"]
            ],
        },
    }
    stateful_set: Manifest = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(job, job.pserver_service, "pserver"),
        "spec": {
            "serviceName": job.pserver_service,
            "replicas": job.pservers,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels(job, "pserver")},
            "template": pod(job, "pserver", pserver),
        },
    }
    env = worker_environment(job, [from_field("TFPS_RANK", RANK), *environment(launch.worker_variables())])
    template = pod(job, "worker", worker_container(job, env), "Never")
    # One worker that fails makes all others fail. If these counted together, each would double the wait for a restart.
    failures = {"backoffLimitPerIndex": job.restarts, "maxFailedIndexes": 0}
    spec = indexed_job(job, "worker", template, failures, "Ignore")
    workers: Manifest = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(job, f"{job.name}-worker", "worker"),
        "spec": spec,
    }
    return [service, stateful_set, workers, disruption_budget(job, "pserver"), disruption_budget(job, "worker")]
