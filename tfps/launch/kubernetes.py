"""`tfps_launch --kubernetes --print`: writes the manifests of a job for `kubectl apply -f -`."""

from __future__ import annotations

import argparse
import re
import secrets
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from tfps.errors import ConfigError
from tfps.launch import kubeflow
from tfps.launch.manifests import (
    MAX_NAME,
    TOKEN_FILE,
    KubernetesJob,
    Manifest,
    manifests,
    metadata,
    service_monitor,
)
from tfps.types import Argument

_FORMS: dict[str, Callable[[KubernetesJob], list[Manifest]]] = {
    "job": manifests,
    "jobset": kubeflow.job_set,
    "tfjob": kubeflow.tf_job,
    "runtime": kubeflow.training_runtime,
}
_USAGE = (
    "tfps_launch --kubernetes --print --image IMAGE [options] script.py [args ...]\n"
    "       tfps_launch --kubernetes --print --image IMAGE [options] -m module [args ...]"
)


@dataclass(frozen=True)
class Order:
    """What to write: a job, its form, and what else belongs into the manifests."""

    job: KubernetesJob
    form: str = "job"
    generate_token: bool = False
    monitor: bool = False

    def __post_init__(self) -> None:
        if self.monitor and self.form != "job":
            raise ConfigError(
                f"--service-monitor must come with --as job, whose Service it selects, got --as {self.form}"
            )


def parse(argv: Sequence[str]) -> Order:
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
        choices=sorted(_FORMS),
        default="job",
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
    add("--volume", type=_pair, action="append", default=[], metavar="CLAIM=PATH", help="a volume claim for workers")
    add("--env", type=_pair, action="append", default=[], metavar="NAME=VALUE", help="a variable for workers")
    add("--user", type=int, default=KubernetesJob.user, metavar="ID", help="that pods run as (default %(default)s)")
    add("-m", dest="is_module", action="store_true", help="the script is the name of a module")
    add("command", nargs=argparse.REMAINDER, metavar="script.py [args ...]", help="what workers run in the image")
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("what to run is missing: tfps_launch --kubernetes --print --image IMAGE script.py")
    if not options.print:
        parser.error("--print is missing: tfps_launch writes manifests, `kubectl apply -f -` starts them")
    resources = {name: given for name in ("worker_resources", "pserver_resources") if (given := getattr(options, name))}
    try:
        job = KubernetesJob(
            name=options.name or _name_of(command[0], options.is_module),
            image=options.image,
            command=("python", *(["-m"] if options.is_module else []), *command),
            workers=options.workers,
            pservers=options.pservers,
            pserver_image=options.pserver_image,
            namespace=options.namespace,
            gpus=options.gpus,
            gpu_resource=options.gpu_resource,
            token_secret=options.token_secret,
            tls_secret=options.tls_secret,
            metrics_port=options.metrics_port,
            restarts=options.restarts,
            volumes=tuple(options.volume),
            variables=dict(options.env),
            user=options.user,
            **resources,
        )
        return Order(job, options.form, options.generate_token, options.service_monitor)
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
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:MAX_NAME].strip("-")


def documents(order: Order) -> list[Manifest]:
    """The manifests of the order.

    Raises:
        ConfigError: what is asked for does not fit together.
    """
    made = _FORMS[order.form](order.job)
    if order.monitor:
        made.append(service_monitor(order.job))
    if order.generate_token:
        made.insert(0, token_secret(order.job, secrets.token_hex(32)))
    return made


def token_secret(job: KubernetesJob, token: str) -> Manifest:
    """The Secret with the job token, in clear: whoever reads this manifest has it."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job, job.secret, "token"),
        "type": "Opaque",
        "stringData": {"token": token},
    }


def comment(order: Order, argv: Sequence[str]) -> list[str]:
    """What somebody who has only the manifests must know."""
    job = order.job
    place = f"kubectl -n {job.namespace}" if job.namespace else "kubectl"
    lines = [f"Written by: {shlex.join(['tfps_launch', '--kubernetes', *argv])}"]
    if order.generate_token:
        lines.append(f"The Secret {job.secret} has the job token in clear: do not commit this.")
    else:
        key = PurePath(TOKEN_FILE).name
        lines += [
            f"The job token is in the Secret {job.secret}, which is not here. Make it once, for this job only:",
            f"  openssl rand -hex 32 | {place} create secret generic {job.secret} --from-file={key}=/dev/stdin",
        ]
    if job.tls_secret:
        lines += [
            f"Nor is the Secret {job.tls_secret}. Its ca.crt must have signed its tls.crt, which must name pservers:",
            *(f"  {name}" for name in _certificate_names(order)),
        ]
    if order.form == "runtime":
        lines.append(f"A TrainJob must have {job.workers} nodes: pservers wait for so many workers.")
    return lines


def _certificate_names(order: Order) -> list[str]:
    """The host names of pservers as workers call them."""
    job = order.job
    patterns = {"job": job.pserver_host, "tfjob": f"{job.name}-ps-{{}}.{job.namespace or 'NAMESPACE'}.svc"}
    pattern = patterns.get(order.form, kubeflow.pserver_host(job.name))
    return [pattern.format(index) for index in range(job.pservers)]


def as_yaml(order: Order, argv: Sequence[str]) -> str:
    """The manifests as one file.

    Raises:
        ConfigError: PyYAML is missing, or what is asked for does not fit together.
    """
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            "--kubernetes needs the package PyYAML, which is not installed: pip install 'tfps[kubernetes]'"
        ) from error

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Argument) -> bool:  # people would not expect references
            return True

    made = documents(order)
    lines = (part for line in comment(order, argv) for part in line.splitlines())  # arguments may have line breaks
    head = "".join(f"# {line}\n" for line in lines)
    # A width at which no line is folded.
    return head + yaml.dump_all(made, Dumper=Dumper, sort_keys=False, explicit_start=True, width=10_000)


def main(argv: Sequence[str]) -> int:
    """Writes what `argv`, which follows `--kubernetes`, asks for to standard output; the exit code."""
    order = parse(argv)
    try:
        sys.stdout.write(as_yaml(order, argv))
    except ConfigError as error:
        sys.stderr.write(f"tfps_launch: {error}\n")
        return 2
    return 0
