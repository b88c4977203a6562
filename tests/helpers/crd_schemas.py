"""Fields of objects that are not Kubernetes' own, as far as tfps_launch writes them.

Written by hand after the published definitions: JobSet 0.10 (v1alpha2), training operator 1.9 (TFJob v1), Kubeflow
trainer 2.3 (v1alpha1), Prometheus operator 0.80 (ServiceMonitor v1). Whatever is not listed is refused. Templates of
Jobs and pods in them are Kubernetes' own: `of` returns those of pods to be checked so.
"""

from __future__ import annotations

from kubelet import Manifest

from tfps.types import Json

NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
STRING, FLAG, ANYTHING = {"type": "string"}, {"type": "boolean"}, {"type": "object"}
LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}


def one_of(*values: str) -> Json:
    return {"enum": list(values)}


def items(schema: Json) -> Json:
    return {"type": "array", "items": schema, "minItems": 1}


def fields(*required: str, **known: Json) -> Json:
    return {"type": "object", "properties": known, "required": list(required), "additionalProperties": False}


def manifest(version: str, kind: str, spec: Json) -> Json:
    metadata = fields("name", name=NAME, namespace=NAME, labels=LABELS)
    every = {"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": metadata, "spec": spec}
    return fields(*every, **every)


INDEXED_JOB = fields(
    "template",
    completionMode=one_of("Indexed"),
    completions=COUNT,
    parallelism=COUNT,
    backoffLimit=COUNT,
    podFailurePolicy=fields(
        "rules",
        rules=items(
            fields(
                "action",
                action=one_of("FailJob", "Ignore", "Count", "FailIndex"),
                onPodConditions=items(fields("type", "status", type=STRING, status=one_of("True", "False", "Unknown"))),
            )
        ),
    ),
    template=ANYTHING,
)
FAILURE_RULE = fields(
    "name",
    "action",
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    action=one_of("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
    onJobFailureReasons=items(
        one_of(
            *("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded"),
            "PodFailurePolicy",
        )
    ),
)
JOB_SET_SPEC = fields(
    "replicatedJobs",
    network=fields(enableDNSHostnames=FLAG, publishNotReadyAddresses=FLAG, subdomain=NAME),
    successPolicy=fields("operator", operator=one_of("All", "Any"), targetReplicatedJobs=items(NAME)),
    failurePolicy=fields(maxRestarts=COUNT, rules=items(FAILURE_RULE)),
    replicatedJobs=items(
        fields(
            "name",
            "template",
            name=NAME,
            replicas=COUNT,
            template=fields("spec", metadata=fields(labels=LABELS), spec=INDEXED_JOB),
        )
    ),
)
REPLICAS = fields(
    "template", replicas=COUNT, restartPolicy=one_of("Always", "OnFailure", "Never", "ExitCode"), template=ANYTHING
)
ALL = {
    "JobSet": manifest("jobset.x-k8s.io/v1alpha2", "JobSet", JOB_SET_SPEC),
    "TFJob": manifest(
        "kubeflow.org/v1",
        "TFJob",
        fields(
            "tfReplicaSpecs",
            successPolicy=one_of("", "AllWorkers"),
            runPolicy=fields(cleanPodPolicy=one_of("None", "All", "Running"), backoffLimit=COUNT),
            tfReplicaSpecs=fields(PS=REPLICAS, Worker=REPLICAS),
        ),
    ),
    "ClusterTrainingRuntime": manifest(
        "trainer.kubeflow.org/v1alpha1",
        "ClusterTrainingRuntime",
        fields("template", mlPolicy=fields(numNodes=COUNT), template=fields("spec", spec=JOB_SET_SPEC)),
    ),
    "TrainJob": manifest(
        "trainer.kubeflow.org/v1alpha1", "TrainJob", fields("runtimeRef", runtimeRef=fields("name", name=NAME))
    ),
    "ServiceMonitor": manifest(
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
        fields(
            "selector",
            "endpoints",
            selector=fields(matchLabels=LABELS),
            endpoints=items(fields(port=STRING, path=STRING, interval=STRING)),
        ),
    ),
}


def of(made: Manifest) -> tuple[Json, list[Manifest]]:
    """The schema of a manifest, and the templates of pods in it."""
    kind, spec = made["kind"], made["spec"]
    if kind == "TFJob":
        templates = [each["template"] for each in spec["tfReplicaSpecs"].values()]
    elif kind in ("JobSet", "ClusterTrainingRuntime"):
        inner = spec if kind == "JobSet" else spec["template"]["spec"]
        jobs = [each["template"]["spec"] for each in inner.get("replicatedJobs", [])]
        templates = [each["template"] for each in jobs if "template" in each]
    else:
        templates = []
    return ALL[kind], templates
