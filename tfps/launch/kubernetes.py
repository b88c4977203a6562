"""`tfps_launch --kubernetes --print`: writes the manifests of a job for `kubectl apply -f -`.

The files in `templates` are the manifests; what is here checks what is asked for and fills them. Tested in
tests/launch/test_kubernetes.py, and with processes in tests/integration/test_kubernetes.py.
"""

from __future__ import annotations

import argparse
import json
import re
import secrets
import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath
from string import Template

from tfps.errors import ConfigError
from tfps.launch.job import Job
from tfps.types import Json

PORT = 7070  # where workers reach a pserver; slices go to the next port
_TEMPLATES = Path(__file__).with_name("templates")
_FORMS = ("job", "jobset", "runtime", "tfjob")
_TOKEN_FILE = PurePosixPath("/run/secrets/tfps/token/token")
_TLS_FOLDER = "/run/secrets/tfps/tls"
# Set by the Job controller on every pod of an Indexed Job, from 0 on; a pod that replaces another has its index.
_RANK = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
# Kubeflow's trainer makes a JobSet with the name of its TrainJob, which the runtime does not know.
_JOB_SET_NAME = "metadata.labels['jobset.sigs.k8s.io/jobset-name']"
# What its trainer and its training operator look for. The operator puts the port into the addresses of TF_CONFIG.
_TRAINER_CONTAINER, _TF_CONTAINER, _TF_PORT = "node", "tensorflow", ("tfjob-port", 2222)
_CONNECT_TIMEOUT_S = 600  # pods start at different times: images are pulled, nodes are added
_MAX_NAME = 40  # with what controllers append, names of pods stay below the 63 characters of a DNS label
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
_NOT_IN_YAML = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\ufffe\uffff]")
_MAY_EXCEED = ("cpu", "ephemeral-storage")  # what is requested of these is no limit; of devices it has to be one


_USAGE = (
    "tfps_launch --kubernetes --print --image IMAGE [options] script.py [args ...]\n"
    "       tfps_launch --kubernetes --print --image IMAGE [options] -m module [args ...]"
)


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
        form: Job and StatefulSet, JobSet, TFJob, or ClusterTrainingRuntime and TrainJob.
        generate_token: whether the Secret is written, too, with a new token.
        service_monitor: whether a ServiceMonitor of the Prometheus operator is.

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
    form: str = "job"
    generate_token: bool = False
    service_monitor: bool = False

    def __post_init__(self) -> None:
        if len(self.name) > _MAX_NAME or not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"--name must be up to {_MAX_NAME} lowercase letters, digits and '-', beginning with a letter and not "
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
        if self.service_monitor and self.form != "job":
            raise ConfigError(
                f"--service-monitor must come with --as job, whose Service it selects, got --as {self.form}"
            )
        if self.service_monitor and self.metrics_port is None:
            raise ConfigError("--service-monitor must come with metrics, got --no-metrics")
        port = self.port[1]
        if self.metrics_port is not None and (
            not 0 < self.metrics_port < 65536 or self.metrics_port in (port, port + 1)
        ):
            raise ConfigError(
                f"--metrics-port must be from 1 to 65535 and not {port} or {port + 1}, which are a pserver's own, got "
                f"{self.metrics_port}"
            )

    @property
    def secret(self) -> str:
        """The name of the Secret with the job token."""
        return self.token_secret or f"{self.name}-token"

    @property
    def port(self) -> tuple[str, int]:
        """The name and number of a pserver's port."""
        return _TF_PORT if self.form == "tfjob" else ("grpc", PORT)

    def hosts(self, name: str) -> list[str]:
        """The pservers' hosts as workers call them. Short names: pods look in their own namespace."""
        pattern = {
            "job": f"{name}-pserver-{{}}.{name}-pserver",  # POD.SERVICE
            "tfjob": f"{name}-ps-{{}}.{self.namespace or 'NAMESPACE'}.svc",
        }.get(self.form, f"{name}-pserver-0-{{}}.{name}")  # JOBSET-JOB-REPLICA-INDEX.SUBDOMAIN
        return [pattern.format(index) for index in range(self.pservers)]


def parse(argv: Sequence[str]) -> KubernetesJob:
    """Parses what follows `--kubernetes`; exits with usage and code 2 if it is malformed."""
    parser = argparse.ArgumentParser(
        prog="tfps_launch --kubernetes",
        usage=_USAGE,
        description="Writes the manifests of a job for Kubernetes: pipe them to `kubectl apply -f -`. "
        "docs/kubernetes.md says what they need.",
    )
    add = parser.add_argument
    add("--print", action="store_true", help="write the manifests (there is nothing else to do yet: required)")
    add(
        "--as",
        dest="form",
        choices=_FORMS,
        default=KubernetesJob.form,
        help="Job and StatefulSet, JobSet, TFJob, or ClusterTrainingRuntime and TrainJob (default: job)",
    )
    add("--image", required=True, help="has the script, tfps and TensorFlow (deploy/docker/worker.Dockerfile)")
    add("--pserver-image", default="", metavar="IMAGE", help="has tfps[metrics] (default: the same)")
    add("--name", default="", help="of the job (default: that of the script)")
    add("--namespace", default="", metavar="NAME", help="(default: that of kubectl's context)")
    add("--workers", type=int, default=1, metavar="N", help="pods that run the script (default 1)")
    add("--pservers", type=int, default=1, metavar="N", help="pserver pods (default 1)")
    for role in ("worker", "pserver"):
        add(
            f"--{role}-resources",
            type=_pairs,
            metavar="NAME=QUANTITY,...",
            help=f"of each {role}, such as cpu=4,memory=8Gi; all but cpu and ephemeral-storage is also its limit",
        )
    add("--gpus", type=int, default=0, metavar="N", help="GPUs of each worker (default 0)")
    add("--gpu-resource", default=KubernetesJob.gpu_resource, metavar="NAME", help="(default %(default)s)")
    add("--token-secret", default="", metavar="NAME", help="Secret with the job token as `token` (default: NAME-token)")
    add("--generate-token", action="store_true", help="write that Secret too, with a new token: keep the output secret")
    add("--tls-secret", default="", metavar="NAME", help="Secret with tls.crt, tls.key and ca.crt: turns TLS on")
    metrics = parser.add_mutually_exclusive_group()
    metrics.add_argument(
        "--metrics-port",
        type=int,
        default=KubernetesJob.metrics_port,
        metavar="PORT",
        help="of pservers, for Prometheus and probes (default %(default)s)",
    )
    metrics.add_argument(
        "--no-metrics", dest="metrics_port", action="store_const", const=None, help="probes only connect to pservers"
    )
    add("--service-monitor", action="store_true", help="also a ServiceMonitor of the Prometheus operator")
    add(
        "--restarts",
        type=int,
        default=KubernetesJob.restarts,
        metavar="N",
        help="how often the workers may start anew after a failure (default %(default)s)",
    )
    for name, dest, form, what in (
        ("--volume", "volumes", "CLAIM=PATH", "a volume claim for workers"),
        ("--env", "variables", "NAME=VALUE", "a variable for workers"),
    ):
        add(name, dest=dest, type=_pair, action="append", default=[], metavar=form, help=what)
    add("--user", type=int, default=KubernetesJob.user, metavar="ID", help="that pods run as (default %(default)s)")
    add("-m", dest="is_module", action="store_true", help="the script is the name of a module")
    add("command", nargs=argparse.REMAINDER, metavar="script.py [args ...]", help="what workers run in the image")
    given = vars(parser.parse_args(argv))
    prints, is_module, command = (given.pop(name) for name in ("print", "is_module", "command"))
    command = command[1:] if command[:1] == ["--"] else command
    if not command:
        parser.error("what to run is missing: tfps_launch --kubernetes --print --image IMAGE script.py")
    if not prints:
        parser.error("--print is missing: tfps_launch writes manifests, `kubectl apply -f -` starts them")
    given["name"] = given["name"] or _name_of(command[0], is_module)
    given["variables"] = dict(given["variables"])
    given = {name: value for name, value in given.items() if value is not None or name == "metrics_port"}
    try:
        return KubernetesJob(command=("python", *(["-m"] if is_module else []), *command), **given)
    except ConfigError as error:
        parser.error(str(error))


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


def _pairs(text: str) -> dict[str, str]:
    return dict(_pair(part) for part in text.split(","))


def _name_of(script: str, is_module: bool) -> str:
    """A name made of that of a script or module."""
    stem = script.rpartition(".")[2] if is_module else PurePath(script).stem
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:_MAX_NAME].strip("-")


def as_yaml(job: KubernetesJob, argv: Sequence[str]) -> str:
    """The manifests as one file; `argv`: what asked for them."""
    lines = (part for line in _comment(job, argv) for part in line.splitlines())  # arguments may have line breaks
    made = "".join(f"# {_escaped(line)}\n" for line in lines)
    values: dict[str, Json] = {
        "name": job.name,
        "namespace": _text(job.namespace) if job.namespace else "",
        "workers": job.workers,
        "pservers": job.pservers,
        **{f"{role}_labels": _labels(job, role) for role in ("pserver", "worker", "token", "runtime")},
        "labels": _labels(job, "job"),
    }
    if job.generate_token:
        made += _filled("token", **values, secret=_text(job.secret), token=secrets.token_hex(32))
    made += _filled(job.form, **values, **_pods(job))
    if job.form != "runtime":
        made += _filled("budgets", **values)
    return made + (_filled("service_monitor", **values) if job.service_monitor else "")


def _filled(template: str, /, **values: Json) -> str:
    """A template with its values: texts as they are, others as JSON, which is YAML.

    A line that ends with "# if NAME" is there only if that value is true. A line with nothing but `$NAME` becomes the
    lines of that value, indented like it.
    """
    lines: list[str] = []
    ready = {key: value if isinstance(value, str) else _text(value) for key, value in values.items()}
    for full in (_TEMPLATES / f"{template}.yaml").read_text(encoding="utf-8").splitlines():
        line, _, condition = full.partition("  # if ")
        if not condition or values[condition]:
            filled = Template(line).substitute(ready)
            indent = line[: len(line) - len(line.lstrip())]
            is_block = line.lstrip().startswith("$")
            lines.append(textwrap.indent(filled.strip(), indent) if is_block else filled)
    return "\n".join(lines) + "\n"


def _text(value: Json) -> str:
    """`value` as JSON that YAML reads alike."""
    return _escaped(json.dumps(value, ensure_ascii=False))


def _escaped(text: str) -> str:
    """`text` without the characters that YAML does not allow, or takes for line breaks."""
    return _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _items(values: Iterable[Json]) -> str:
    """A list, an item a line."""
    return "\n".join(f"- {_text(value)}" for value in values)


def _labels(job: KubernetesJob, role: str) -> str:
    """What all pods of a role have, and nothing else."""
    names = {"name": "tfps", "instance": f'"{job.name}"', "component": role}
    return f"{{{', '.join(f'app.kubernetes.io/{name}: {value}' for name, value in names.items())}}}"


def _pods(job: KubernetesJob) -> dict[str, Json]:
    """What the template of a form needs to know of pods and of the Jobs that make them."""
    of_trainer = job.form == "runtime"
    launch = Job("$(TFPS_JOB)" if of_trainer else job.name, job.workers, token_file=str(_TOKEN_FILE))
    launch = launch.at([f"{host}:{PORT}" for host in job.hosts(launch.name)])
    variables = launch.worker_variables()
    named = [_from_field("TFPS_JOB", variables.pop("TFPS_JOB") and _JOB_SET_NAME)] if of_trainer else []
    place = [*named, _from_field("TFPS_RANK", _RANK), *_environment(variables)]
    if job.form == "tfjob":  # whose operator sets TF_CONFIG
        place = _environment({"TFPS_JOB": job.name, **launch.pserver_variables()})
    worker_name = _TRAINER_CONTAINER if of_trainer else "worker"
    ports = _ports(job)
    restart = "" if job.form == "tfjob" else "Never"
    pserver = _pserver_pod(job, launch, named, ports, "" if job.form == "job" else restart)
    worker = _worker_pod(job, place, _TF_CONTAINER if job.form == "tfjob" else worker_name, restart)
    # One worker that fails makes all others fail. If these counted together, each would double the wait for a restart.
    failures = f"backoffLimitPerIndex: {job.restarts}\nmaxFailedIndexes: 0" if job.form == "job" else "backoffLimit: 0"
    counting = {"failures": failures, "disrupted": "Ignore" if job.form == "job" else "FailJob"}
    jobs = {
        "pserver_job": _filled("indexed_job", **counting, count=job.pservers, pod=pserver),
        "worker_job": _filled("indexed_job", **counting, count=job.workers, pod=worker),
    }
    job_set = _filled(
        "job_set_spec",
        **jobs,
        name=job.name,
        subdomain=not of_trainer,
        worker=worker_name,
        trainer=of_trainer,
        restarts=job.restarts,
    )
    return {
        **jobs,
        "job_set": job_set,
        "pserver_pod": pserver,
        "worker_pod": worker,
        "all_restarts": job.restarts * job.workers + 1,
        "service_ports": _items({"name": name, "port": port, "targetPort": name} for name, port in ports.items()),
    }


def _ports(job: KubernetesJob) -> dict[str, int]:
    """A pserver's, by name. Data connections have no TLS."""
    name, number = job.port
    data = {} if job.tls_secret else {"data": number + 1}
    return {name: number, **data, **({} if job.metrics_port is None else {"metrics": job.metrics_port})}


def _pserver_pod(job: KubernetesJob, launch: Job, named: list[Json], ports: Mapping[str, int], restart: str) -> str:
    arguments = launch.pserver_arguments("0.0.0.0", job.port[1], job.metrics_port)
    if "data" in ports:
        arguments += ["--data-port", str(ports["data"])]
    if "metrics" in ports:
        arguments += ["--metrics-host", "0.0.0.0"]
    probe = "httpGet: {path: /healthz, port: metrics}"
    if "metrics" not in ports:
        probe = f"tcpSocket: {{port: {job.port[0]}}}"
    return _pod(
        job,
        "pserver",
        container=_TF_CONTAINER if job.form == "tfjob" else "pserver",
        image=_text(job.pserver_image or job.image),
        command=["tfps_pserver"],
        args=arguments,
        env=_items([*named, *_environment({**launch.pserver_variables(), **_tls_variables(job)})]),
        ports=_items({"name": name, "containerPort": port} for name, port in ports.items()),
        probe=probe,
        resources=_resources(job.pserver_resources, {}),
        restart=restart,
    )


def _worker_pod(job: KubernetesJob, place: list[Json], container: str, restart: str) -> str:
    settings = {
        **_tls_variables(job),
        "TFPS_CONNECT_TIMEOUT_S": str(_CONNECT_TIMEOUT_S),
        "PYTHONUNBUFFERED": "1",
        **{name: _literal(value) for name, value in job.variables.items()},
    }
    names = {claim: f"volume-{index}" for index, claim in enumerate(dict(job.volumes))}  # each may have several paths
    volumes = [{"name": name, "persistentVolumeClaim": {"claimName": claim}} for claim, name in names.items()]
    mounts = [{"name": names[claim], "mountPath": path} for claim, path in job.volumes]
    if job.gpus > 1:  # NCCL joins the GPUs of a pod through shared memory, of which pods have 64 MB
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    return _pod(
        job,
        "worker",
        volumes,
        mounts,
        container=container,
        image=_text(job.image),
        command=[_literal(part) for part in job.command],
        env=_items([*place, *_environment(settings)]),
        resources=_resources(job.worker_resources, {job.gpu_resource: str(job.gpus)} if job.gpus else {}),
        restart=restart,
        **dict.fromkeys(("args", "ports", "probe"), ""),
    )


def _pod(
    job: KubernetesJob, role: str, volumes: Sequence[Json] = (), mounts: Sequence[Json] = (), **values: Json
) -> str:
    """A template of pods with one container, which has the Secrets besides its `volumes` at its `mounts`."""
    files = [("token", job.secret, str(_TOKEN_FILE.parent))]
    if job.tls_secret:
        files.append(("tls", job.tls_secret, _TLS_FOLDER))
    kept = [{"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}} for name, secret, _ in files]
    mounted = [{"name": name, "mountPath": folder, "readOnly": True} for name, _, folder in files]
    return _filled(
        "pod",
        labels=_labels(job, role),
        not_root=job.user != 0,
        user=job.user,
        pserver=role == "pserver",
        volumes=_items([*kept, *volumes]),
        mounts=_items([*mounted, *mounts]),
        **values,
    )


def _resources(requests: Mapping[str, str], gpus: Mapping[str, str]) -> Json:
    limits = {name: quantity for name, quantity in requests.items() if name not in _MAY_EXCEED}
    return {"requests": {**requests, **gpus}, "limits": {**limits, **gpus}}


def _literal(text: str) -> str:
    """`text` so that Kubernetes leaves it as it is: in arguments and values it replaces $(NAME), and $$ by $."""
    return text.replace("$", "$$")


def _from_field(name: str, path: str) -> Json:
    """A variable whose value is a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _environment(variables: Mapping[str, str]) -> list[Json]:
    """Variables in their order: a value may use those before it as $(NAME)."""
    return [{"name": name, "value": value} for name, value in variables.items()]


def _tls_variables(job: KubernetesJob) -> dict[str, str]:
    files = {"CA": "ca.crt", "CERT": "tls.crt", "KEY": "tls.key"} if job.tls_secret else {}
    return {f"TFPS_TLS_{name}": f"{_TLS_FOLDER}/{file}" for name, file in files.items()}


def _comment(job: KubernetesJob, argv: Sequence[str]) -> list[str]:
    """What somebody who has only the manifests must know."""
    place = f"kubectl -n {job.namespace}" if job.namespace else "kubectl"
    lines = [f"Written by: {shlex.join(['tfps_launch', '--kubernetes', *argv])}"]
    if job.generate_token:
        lines.append(f"The Secret {job.secret} has the job token in clear: do not commit this.")
    else:
        key = _TOKEN_FILE.name
        lines += [
            f"The job token is in the Secret {job.secret}, which is not here. Make it once, for this job only:",
            f"  openssl rand -hex 32 | {place} create secret generic {job.secret} --from-file={key}=/dev/stdin",
        ]
    if job.tls_secret:
        lines += [
            f"Nor is the Secret {job.tls_secret}. Its ca.crt must have signed its tls.crt, which must name pservers:",
            *(f"  {name}" for name in job.hosts(job.name)),
        ]
    if job.form == "runtime":
        lines.append(f"A TrainJob must have {job.workers} nodes: pservers wait for so many workers.")
    return lines


def main(argv: Sequence[str]) -> int:
    """Writes what `argv`, which follows `--kubernetes`, asks for to standard output; the exit code."""
    sys.stdout.write(as_yaml(parse(argv), argv))
    return 0
