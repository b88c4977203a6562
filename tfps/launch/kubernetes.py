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
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath
from string import Template

from tfps.errors import REFUSED, ConfigError
from tfps.launch.job import HASHES_ALIKE, Job
from tfps.types import Json

PORT = 7070  # where workers reach a pserver; slices go to the next port
_TEMPLATES = Path(__file__).with_name("templates")
_FORMS = ("job", "jobset", "runtime", "tfjob")
_TOKEN_FILE = "/run/secrets/tfps/token/token"
# Set by the Job controller on every pod of an Indexed Job, from 0 on; a pod that replaces another has its index.
_RANK = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
# Kubeflow's trainer makes a JobSet with the name of its TrainJob, which the runtime does not know.
_JOB_SET_NAME = "metadata.labels['jobset.sigs.k8s.io/jobset-name']"
# What its training operator looks for. It puts the port into the addresses of TF_CONFIG.
_TF_CONTAINER, _TF_PORT = "tensorflow", ("tfjob-port", 2222)
_CONNECT_TIMEOUT_S = 600  # pods start at different times: images are pulled, nodes are added
_LEAVE_S = 45  # what a worker may take to end its step and to leave: tfps/strategy/preemption.py waits up to 30 s
_ELASTIC = ("job", "tfjob")  # forms whose controller starts one worker anew and leaves the others alone
_MAX_NAME = 40  # with what controllers append, names of pods stay below the 63 characters of a DNS label
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_INSTEAD_OF = {
    "TFPS_RANK": "leave it out, each pod learns its own",
    "TFPS_WORKERS": "use --workers",
    "TFPS_PSERVERS": "use --pservers, whose addresses it gets",
    "TFPS_JOB": "use --name",
    "TFPS_MIN_WORKERS": "use --min-workers",
    "TFPS_MAX_WORKERS": "use --max-workers",
    "TFPS_TOKEN_FILE": "use --token-secret",
    "TFPS_TLS_*": "use --tls-secret",
}
_NOT_IN_YAML = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\ufffe\uffff]")
_MAY_EXCEED = ("cpu", "ephemeral-storage")  # what is requested of these is no limit; of devices it has to be one


@dataclass(frozen=True)
class KubernetesJob:
    """What to run, and on what: the options of the command, whose help describes them."""

    name: str
    image: str
    command: tuple[str, ...]  # what a worker executes
    workers: int = 1
    pservers: int = 1
    min_workers: int | None = None  # with which the others go on without those that are lost; None: all are needed
    max_workers: int | None = None  # up to which there may be more, once the Job is scaled; None: no more
    pserver_image: str = ""
    namespace: str = ""
    worker_resources: Mapping[str, str] = field(default_factory=lambda: {"cpu": "2", "memory": "4Gi"})
    # By its limit of memory a pserver knows how much a job may declare.
    pserver_resources: Mapping[str, str] = field(default_factory=lambda: {"cpu": "1", "memory": "2Gi"})
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    token_secret: str = ""
    tls_secret: str = ""
    metrics_port: int | None = 9100
    restarts: int = 3
    volumes: Sequence[tuple[str, str]] = ()  # claims, and their paths in workers
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
        if self.min_workers is not None:
            if not 1 <= self.min_workers <= self.workers:
                raise ConfigError(f"--min-workers must be from 1 to {self.workers} (--workers), got {self.min_workers}")
            if self.form not in _ELASTIC:
                raise ConfigError(
                    f"--min-workers must come with --as {' or '.join(_ELASTIC)}, got --as {self.form}: when a worker "
                    "fails, a JobSet starts all its pods anew"
                )
        if self.max_workers is not None and (self.min_workers is None or self.max_workers < self.workers):
            raise ConfigError(
                f"--max-workers must be at least {self.workers} (--workers) and needs --min-workers, got "
                f"{self.max_workers} with --min-workers {self.min_workers}"
            )
        if self.max_workers is not None and self.form != "job":
            raise ConfigError(f"--max-workers must come with --as job, which can be scaled, got --as {self.form}")
        for role in ("worker", "pserver"):
            for name, quantity in getattr(self, f"{role}_resources").items():
                if not _QUANTITY.fullmatch(quantity):
                    text = f"{name} must be a quantity such as 4 or 8Gi, got {quantity!r}"
                    raise ConfigError(f"--{role}-resources: {text}")
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
        port, metrics_port = self.port[1], self.metrics_port
        if metrics_port is not None and (not 0 < metrics_port < 65536 or metrics_port in (port, port + 1)):
            raise ConfigError(
                f"--metrics-port must be from 1 to 65535 and not {port} or {port + 1}, which are a pserver's own, got "
                f"{metrics_port}"
            )

    @property
    def secret(self) -> str:
        return self.token_secret or f"{self.name}-token"

    @property
    def port(self) -> tuple[str, int]:
        """The name and number of a pserver's port."""
        return _TF_PORT if self.form == "tfjob" else ("grpc", PORT)

    @property
    def ports(self) -> dict[str, int]:
        """A pserver's ports by name."""
        name, number = self.port
        ports = {name: number}
        if not self.tls_secret:  # data connections have no TLS
            ports["data"] = number + 1
        return ports if self.metrics_port is None else {**ports, "metrics": self.metrics_port}

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
        usage="tfps_launch --kubernetes --print --image IMAGE [options] script.py [args ...]\n"
        "       tfps_launch --kubernetes --print --image IMAGE [options] -m module [args ...]",
        description="Writes the manifests of a job for Kubernetes: pipe them to `kubectl apply -f -`. "
        "docs/kubernetes.md says what they need.",
    )
    add = parser.add_argument
    add("--print", action="store_true", help="write the manifests (there is nothing else to do yet: required)")
    text = "Job and StatefulSet, JobSet, TFJob, or ClusterTrainingRuntime and TrainJob (default: job)"
    add("--as", dest="form", choices=_FORMS, default=KubernetesJob.form, help=text)
    add("--image", required=True, help="has the script, tfps and TensorFlow (deploy/docker/worker.Dockerfile)")
    add("--pserver-image", default="", metavar="IMAGE", help="has tfps[metrics] (default: the same)")
    add("--name", default="", help="of the job (default: that of the script)")
    add("--namespace", default="", metavar="NAME", help="(default: that of kubectl's context)")
    add("--workers", type=int, default=1, metavar="N", help="pods that run the script (default 1)")
    add("--pservers", type=int, default=1, metavar="N", help="pserver pods (default 1)")
    text = "go on when workers are lost, with no fewer than N; lost ones come back (default: if one fails, all do)"
    add("--min-workers", type=int, metavar="N", help=text)
    text = "with --min-workers: let more join while the job trains, up to N in all, once its Job is scaled"
    add("--max-workers", type=int, metavar="N", help=text)
    text = "such as cpu=4,memory=8Gi; all but cpu and ephemeral-storage is also its limit"
    for role in ("worker", "pserver"):
        add(f"--{role}-resources", type=_pairs, metavar="NAME=QUANTITY,...", help=f"of each {role}, {text}")
    add("--gpus", type=int, default=0, metavar="N", help="GPUs of each worker (default 0)")
    add("--gpu-resource", default=KubernetesJob.gpu_resource, metavar="NAME", help="(default %(default)s)")
    add("--token-secret", default="", metavar="NAME", help="Secret with the job token as `token` (default: NAME-token)")
    add("--generate-token", action="store_true", help="write that Secret too, with a new token: keep the output secret")
    add("--tls-secret", default="", metavar="NAME", help="Secret with tls.crt, tls.key and ca.crt: turns TLS on")
    metrics = parser.add_mutually_exclusive_group()
    text = "of pservers, for Prometheus and probes (default %(default)s)"
    metrics.add_argument("--metrics-port", type=int, default=KubernetesJob.metrics_port, metavar="PORT", help=text)
    metrics.add_argument(
        "--no-metrics", dest="metrics_port", action="store_const", const=None, help="probes only connect to pservers"
    )
    add("--service-monitor", action="store_true", help="also a ServiceMonitor of the Prometheus operator")
    text = "how often the workers may start anew after a failure (default %(default)s)"
    add("--restarts", type=int, default=KubernetesJob.restarts, metavar="N", help=text)
    several: dict[str, Json] = {"type": _pair, "action": "append", "default": []}
    add("--volume", dest="volumes", metavar="CLAIM=PATH", help="a volume claim for workers", **several)
    add("--env", dest="variables", metavar="NAME=VALUE", help="a variable for workers", **several)
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
    if not given["name"]:
        stem = command[0].rpartition(".")[2] if is_module else PurePath(command[0]).stem
        given["name"] = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:_MAX_NAME].strip("-")
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


def as_yaml(job: KubernetesJob, argv: Sequence[str]) -> str:
    """The manifests as one file, and what somebody who has only these must know; `argv`: what asked for them."""
    place = f"kubectl -n {job.namespace}" if job.namespace else "kubectl"
    notes = [f"Written by: {shlex.join(['tfps_launch', '--kubernetes', *argv])}"]
    if job.generate_token:
        notes.append(f"The Secret {job.secret} has the job token in clear: do not commit this.")
    else:
        key = PurePath(_TOKEN_FILE).name
        notes += [
            f"The job token is in the Secret {job.secret}, which is not here. Make it once, for this job only:",
            f"  openssl rand -hex 32 | {place} create secret generic {job.secret} --from-file={key}=/dev/stdin",
        ]
    if job.tls_secret:
        notes += [
            f"Nor is the Secret {job.tls_secret}. Its ca.crt must have signed its tls.crt, which must name pservers:",
            *(f"  {name}" for name in job.hosts(job.name)),
        ]
    if job.max_workers is not None:
        most = f'{{"spec":{{"completions":{job.max_workers},"parallelism":{job.max_workers}}}}}'
        notes += ["More workers join while it trains, here as many as there may be, by:"]
        notes += [f"  {place} patch job {job.name}-worker --patch '{most}'"]
    if job.form == "runtime":
        notes.append(f"A TrainJob must have {job.workers} nodes: pservers wait for so many workers.")
    # Arguments may have line breaks.
    made = "".join(f"# {_escaped(line)}\n" for note in notes for line in note.splitlines())
    values: dict[str, Json] = {
        "name": job.name,
        "namespace": _text(job.namespace) if job.namespace else "",
        "workers": job.workers,
        "pservers": job.pservers,
        "needed": job.workers if job.min_workers is None else job.min_workers,
        "elastic": job.min_workers is not None,
        "whole": job.min_workers is None,
        **{f"{role}_labels": _labels(job, role) for role in ("pserver", "worker", "token", "runtime")},
        "labels": _labels(job, "job"),
        "job_pods": _labels(job),
        "own_ports": _items({"port": port} for name, port in job.ports.items() if name != "metrics"),
        "metrics_port": job.metrics_port or "",
    }
    if job.generate_token:
        made += _filled("token", **values, secret=_text(job.secret), token=secrets.token_hex(32))
    made += _filled(job.form, **values, **_pods(job))
    if job.form != "runtime":
        made += _filled("budgets", **values) + _filled("network_policy", **values)
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
            indent, _, _ = line.partition("$")
            is_block = not indent.strip()
            lines += textwrap.indent(filled.strip(), indent).splitlines() if is_block else [filled]
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


def _labels(job: KubernetesJob, role: str = "") -> str:
    """What all pods of a role, or of the job, have, and nothing else."""
    about = "app.kubernetes.io"
    component = f", {about}/component: {role}" if role else ""
    return f'{{{about}/name: tfps, {about}/instance: "{job.name}"{component}}}'


def _pods(job: KubernetesJob) -> dict[str, Json]:
    """What the template of a form needs to know of pods and of the Jobs that make them."""
    of_job, of_trainer, of_operator = (job.form == form for form in ("job", "runtime", "tfjob"))
    launch = Job("$(TFPS_JOB)" if of_trainer else job.name, job.workers, token_file=_TOKEN_FILE)
    launch = launch.at([f"{host}:{PORT}" for host in job.hosts(launch.name)])
    variables = launch.worker_variables()
    named = [_from_field("TFPS_JOB", variables.pop("TFPS_JOB") and _JOB_SET_NAME)] if of_trainer else []
    place = [*named, _from_field("TFPS_RANK", _RANK), *_environment(variables)]
    if of_operator:  # which sets TF_CONFIG
        place = _environment({"TFPS_JOB": job.name, **launch.pserver_variables()})
    (port, number), ports = job.port, job.ports
    arguments = launch.pserver_arguments("0.0.0.0", number, job.metrics_port)
    if "data" in ports:
        arguments += ["--data-port", str(ports["data"])]
    if "metrics" in ports:
        arguments += ["--metrics-host", "0.0.0.0"]
    settings = {"TFPS_CONNECT_TIMEOUT_S": str(_CONNECT_TIMEOUT_S), "PYTHONUNBUFFERED": "1", **HASHES_ALIKE}
    elastic = job.min_workers is not None
    if elastic:
        settings["TFPS_MIN_WORKERS"] = str(job.min_workers)
    if job.max_workers is not None:
        settings["TFPS_MAX_WORKERS"] = str(job.max_workers)
    # In arguments and values Kubernetes replaces $(NAME), and $$ by $.
    settings |= {name: value.replace("$", "$$") for name, value in job.variables.items()}
    claims = {claim: f"volume-{index}" for index, claim in enumerate(dict(job.volumes))}  # each may have several paths
    common: dict[str, Json] = {
        "secret": _text(job.secret),
        "tls": _text(job.tls_secret) if job.tls_secret else "",
        "user": job.user,
        "not_root": job.user != 0,
    }
    probe = "httpGet: {path: /healthz, port: metrics}" if "metrics" in ports else f"tcpSocket: {{port: {port}}}"
    pserver = _filled(
        "pod",
        **common,
        **dict.fromkeys(("worker", "shm", "settings", "volumes", "mounts"), ""),
        pserver=True,
        grace="",
        labels=_labels(job, "pserver"),
        container=_TF_CONTAINER if of_operator else "pserver",
        image=_text(job.pserver_image or job.image),
        command=["tfps_pserver"],
        args=arguments,
        env=_items([*named, *_environment(launch.pserver_variables())]),
        ports=_items({"name": name, "containerPort": listens} for name, listens in ports.items()),
        probe=probe,
        ready=probe.replace("/healthz", "/busy"),
        metrics="metrics" in ports,
        resources=_resources(job.pserver_resources, {}),
        never=not of_job and not of_operator,
    )
    role = "node" if of_trainer else "worker"  # as the trainer calls it
    worker = _filled(
        "pod",
        **common,
        **dict.fromkeys(("pserver", "args", "ports", "probe", "ready", "metrics"), ""),
        worker=True,
        grace=_LEAVE_S if elastic else "",
        labels=_labels(job, "worker"),
        container=_TF_CONTAINER if of_operator else role,
        image=_text(job.image),
        command=[part.replace("$", "$$") for part in job.command],
        env=_items(place),
        settings=_items(_environment(settings)),
        resources=_resources(job.worker_resources, {job.gpu_resource: str(job.gpus)} if job.gpus else {}),
        volumes=_items({"name": name, "persistentVolumeClaim": {"claimName": claim}} for claim, name in claims.items()),
        mounts=_items({"name": claims[claim], "mountPath": path} for claim, path in job.volumes),
        shm=job.gpus > 1,
        never=not of_operator,
    )
    # One worker that fails may make all others fail. If these counted together, each would double the wait for a
    # restart. As many as the others can do without may fail for good.
    spare = 0 if job.min_workers is None else job.workers - job.min_workers
    failures = f"backoffLimitPerIndex: {job.restarts}\nmaxFailedIndexes: {spare}" if of_job else "backoffLimit: 0"
    rules: dict[str, Json] = {
        "disrupted": "Ignore" if of_job else "FailJob",
        "refused": [REFUSED] if of_job and elastic else [],
    }
    jobs = {
        name: _filled("indexed_job", count=count, pod=pod, failures=failures, **rules)
        for name, count, pod in (("pserver_job", job.pservers, pserver), ("worker_job", job.workers, worker))
    }
    return {
        **jobs,
        "job_set": _filled(
            "job_set_spec",
            **jobs,
            name=job.name,
            worker=role,
            trainer=of_trainer,
            subdomain=not of_trainer,
            restarts=job.restarts,
        ),
        "pserver_pod": pserver,
        "worker_pod": worker,
        "all_restarts": job.restarts * job.workers + 1,
        "service_ports": _items({"name": name, "port": port, "targetPort": name} for name, port in ports.items()),
    }


def _resources(requests: Mapping[str, str], gpus: Mapping[str, str]) -> Json:
    limits = {name: quantity for name, quantity in requests.items() if name not in _MAY_EXCEED}
    return {"requests": {**requests, **gpus}, "limits": {**limits, **gpus}}


def _from_field(name: str, path: str) -> Json:
    """A variable whose value is a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _environment(variables: Mapping[str, str]) -> list[Json]:
    """Variables in their order: a value may use those before it as $(NAME)."""
    return [{"name": name, "value": value} for name, value in variables.items()]
