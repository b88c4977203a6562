"""What a cluster makes of manifests: pods with resolved variables, mounted Secrets and DNS names, run as processes.

The rules are those of Kubernetes, JobSet and Kubeflow's operators, for what tfps_launch writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tfps.types import Json

Manifest = dict[str, Json]  # as YAML has it
NAMESPACE = "default"
_EXPANSION = re.compile(r"\$\$|\$\(([^()\s]+)\)")


@dataclass(frozen=True)
class Pod:
    """One pod with one container, as its kubelet starts it.

    Attributes:
        domain: what it is called in the cluster's DNS, without NAMESPACE.svc.cluster.local; "": it has no name.
        mounts: path -> name of file -> content.
        claims: path -> PersistentVolumeClaim.
    """

    name: str
    role: str
    labels: Mapping[str, str]
    domain: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    mounts: Mapping[str, Mapping[str, str]]
    claims: Mapping[str, str]
    spec: Manifest = field(repr=False)
    container: Manifest = field(repr=False)

    @property
    def dns_name(self) -> str:
        return f"{self.domain}.{NAMESPACE}.svc.cluster.local" if self.domain else ""


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """$(NAME) is replaced where NAME is known, $$ is a $."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return _EXPANSION.sub(value, text)


def _field(path: str, metadata: Manifest) -> str:
    match = re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path)
    return str(metadata[match[1]][match[2]] if match else metadata[path.removeprefix("metadata.")])


def pod(
    name: str, template: Manifest, secrets: Mapping[str, Mapping[str, str]], domain: str = "", **metadata: Json
) -> Pod:
    """The pod `name` from its template; `metadata`: labels and annotations that its controller adds."""
    known: Manifest = {"name": name, "namespace": NAMESPACE}
    for kind in ("labels", "annotations"):
        known[kind] = {**template["metadata"].get(kind, {}), **metadata.get(kind, {})}
    spec = template["spec"]
    (container,) = spec["containers"]
    env: dict[str, str] = {}
    for each in container["env"]:
        source = each.get("valueFrom")
        env[each["name"]] = _field(source["fieldRef"]["fieldPath"], known) if source else expanded(each["value"], env)
    volumes = {each["name"]: each for each in spec["volumes"]}
    mounts, claims = {}, {}
    for mount in container["volumeMounts"]:
        volume = volumes[mount["name"]]
        if "secret" in volume:
            mounts[mount["mountPath"]] = secrets[volume["secret"]["secretName"]]
        elif "persistentVolumeClaim" in volume:
            claims[mount["mountPath"]] = volume["persistentVolumeClaim"]["claimName"]
    argv = tuple(expanded(part, env) for part in (*container["command"], *container.get("args", ())))
    role = known["labels"]["app.kubernetes.io/component"]
    return Pod(name, role, known["labels"], domain, argv, env, mounts, claims, spec, container)


def _indexed(
    name: str, spec: Manifest, secrets: Mapping[str, Mapping[str, str]], subdomain: str = "", **labels: str
) -> Iterator[Pod]:
    """Pods of an Indexed Job."""
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    for index in range(spec["completions"]):
        host = f"{name}-{index}"
        annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
        domain = f"{host}.{subdomain}" if subdomain else ""
        yield pod(f"{host}-abcde", spec["template"], secrets, domain, annotations=annotations, labels=labels)


def _job_set(name: str, spec: Manifest, secrets: Mapping[str, Mapping[str, str]]) -> Iterator[Pod]:
    network = spec["network"]
    assert network["enableDNSHostnames"]
    for each in spec["replicatedJobs"]:
        assert each["replicas"] == 1
        labels = {"jobset.sigs.k8s.io/jobset-name": name}
        job = f"{name}-{each['name']}-0"
        yield from _indexed(job, each["template"]["spec"], secrets, network.get("subdomain", name), **labels)


def _tf_job(name: str, spec: Manifest, secrets: Mapping[str, Mapping[str, str]]) -> Iterator[Pod]:
    """As the training operator: a headless service and a TF_CONFIG for every pod."""
    replicas = spec["tfReplicaSpecs"]
    cluster: dict[str, list[str]] = {}
    for kind, each in replicas.items():
        (container,) = each["template"]["spec"]["containers"]
        assert container["name"] == "tensorflow"
        ports = [port["containerPort"] for port in container.get("ports", ()) if port["name"] == "tfjob-port"]
        cluster[kind.lower()] = [
            f"{name}-{kind.lower()}-{index}.{NAMESPACE}.svc:{ports[0] if ports else 2222}"
            for index in range(each["replicas"])
        ]
    for kind, each in replicas.items():
        for index in range(each["replicas"]):
            task = {"type": kind.lower(), "index": index}
            text = json.dumps({"cluster": cluster, "task": task, "environment": "cloud"}, separators=(",", ":"))
            host = f"{name}-{kind.lower()}-{index}"
            made = pod(host, each["template"], secrets, host)
            yield replace(made, env={**made.env, "TF_CONFIG": text})


def _train_job(made: Manifest, runtime: Manifest, secrets: Mapping[str, Mapping[str, str]]) -> Iterator[Pod]:
    """As Kubeflow's trainer: a JobSet with the name of the TrainJob from the template of the runtime."""
    assert made["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    spec = runtime["spec"]["template"]["spec"]
    (node,) = (
        each["template"]
        for each in spec["replicatedJobs"]
        if "trainer.kubeflow.org/trainjob-ancestor-step" in each["template"].get("metadata", {}).get("labels", {})
    )
    node["spec"]["completions"] = node["spec"]["parallelism"] = runtime["spec"]["mlPolicy"]["numNodes"]
    yield from _job_set(made["metadata"]["name"], spec, secrets)


def is_ended_by_restarts(tf_job: Manifest, restarts: Mapping[str, int]) -> bool:
    """Whether the training operator ends a TFJob (its PastBackoffLimit); `restarts`: of all running pods of a kind."""
    spec = tf_job["spec"]
    counts = ("OnFailure", "Always", "ExitCode")
    counted = sum(n for kind, n in restarts.items() if spec["tfReplicaSpecs"][kind]["restartPolicy"] in counts)
    limit: int = spec["runPolicy"]["backoffLimit"]
    return counted >= max(limit, 1)


def pods(documents: Sequence[Manifest], secrets: Mapping[str, Mapping[str, str]]) -> list[Pod]:
    """The pods of these manifests; `secrets`: name -> key -> content."""
    found: list[Pod] = []
    for each in documents:
        name, spec = each["metadata"]["name"], each.get("spec", {})
        if each["kind"] == "StatefulSet":
            (service,) = (
                one for one in documents if (one["kind"], one["metadata"]["name"]) == ("Service", spec["serviceName"])
            )
            assert service["spec"]["clusterIP"] == "None"
            labels = spec["template"]["metadata"]["labels"]
            assert service["spec"]["selector"].items() <= labels.items()
            found += [
                pod(f"{name}-{index}", spec["template"], secrets, f"{name}-{index}.{spec['serviceName']}")
                for index in range(spec["replicas"])
            ]
        elif each["kind"] == "Job":
            found += _indexed(name, spec, secrets)
        elif each["kind"] == "JobSet":
            found += _job_set(name, spec, secrets)
        elif each["kind"] == "TFJob":
            found += _tf_job(name, spec, secrets)
        elif each["kind"] == "TrainJob":
            (runtime,) = (one for one in documents if one["kind"] == "ClusterTrainingRuntime")
            found += _train_job(each, runtime, secrets)
    return found
