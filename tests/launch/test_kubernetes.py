"""Manifests: what they say, that Kubernetes knows every field of them, and what a process learns from them."""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import crd_schemas
import jsonschema
import kubelet
import kubernetes_validate
import launching
import pytest
import yaml
from kubelet import Manifest, Pod

from tfps.config import Config, Launch, Security
from tfps.errors import REFUSED
from tfps.launch import cli, kubernetes
from tfps.launch.cli import parse
from tfps.strategy.preemption import BETWEEN_UPDATES_S, SETTLE_S
from tfps.types import Json

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy" / "kubernetes"
FORMS = ("job", "jobset", "tfjob", "runtime")
FILES = {"job": "job.yaml", "jobset": "jobset.yaml", "tfjob": "tfjob.yaml", "runtime": "runtime.yaml"}
DEFAULT = ("--image", "tfps-worker", "--workers", "2", "--pservers", "2", "train.py")
# Every option that adds something, with values that need care.
EVERYTHING = (
    *("--image", "registry/me/train:1", "--pserver-image", "registry/me/pserver:1", "--namespace", "research"),
    *("--name", "my-job", "--workers", "3", "--pservers", "2", "--gpus", "2", "--restarts", "1", "--user", "0"),
    *("--worker-resources", "cpu=500m,memory=1.5Gi", "--pserver-resources", "cpu=2,memory=512Mi"),
    *("--tls-secret", "my-tls", "--token-secret", "my-token"),
    *("--volume", "data=/data", "--volume", "out=/out", "--volume", "data=/again"),
    *("--env", "TFPS_CHECK_EVERY=10", "--env", "PRICE=$5 $(HOME) $$", "-m", "my.module", "--text", "a: $(TFPS_RANK)"),
)
SECRETS = {
    "train-token": {"token": "t" * 32},
    "my-token": {"token": "t" * 32},
    "my-tls": {"ca.crt": "ca", "tls.crt": "cert", "tls.key": "key"},
}


def text_of(*arguments: str) -> str:
    return kubernetes.as_yaml(kubernetes.parse(["--print", *arguments]), ["--print", *arguments])


def documents(*arguments: str) -> list[Manifest]:
    return list(yaml.safe_load_all(text_of(*arguments)))


def by_kind(found: list[Manifest], kind: str) -> Manifest:
    (one,) = (each for each in found if each["kind"] == kind)
    return one


def pods(role: str, *arguments: str) -> list[Pod]:
    return [each for each in kubelet.pods(documents(*arguments), SECRETS) if each.role == role]


@functools.cache
def core_versions() -> list[str]:
    """The oldest Kubernetes that docs/kubernetes.md names, and the newest that is known here."""
    return ["1.29", str(kubernetes_validate.latest_version())]


def check(manifest: Manifest) -> None:
    """Raises an error if a field is unknown or has a wrong value."""
    if "/" in manifest["apiVersion"] and "." in manifest["apiVersion"].partition("/")[0].removesuffix(".k8s.io"):
        schema, templates = crd_schemas.of(manifest)
        jsonschema.Draft202012Validator(schema).validate(manifest)
        for pod_template in templates:
            whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": pod_template}
            check(whole)
        return
    for version in core_versions():
        kubernetes_validate.validate(manifest, version, strict=True)


def assert_contains(whole: Json, part: Json, where: str = "") -> None:
    """`whole` has all that `part` has, and maybe more."""
    if isinstance(part, dict):
        for name, value in part.items():
            assert name in whole, f"{where}.{name}"
            assert_contains(whole[name], value, f"{where}.{name}")
    elif isinstance(part, list):
        assert len(whole) == len(part), where
        for index, value in enumerate(part):
            assert_contains(whole[index], value, f"{where}[{index}]")
    else:
        assert whole == part, where


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [DEFAULT, EVERYTHING, ("--no-metrics", *DEFAULT)], ids=["default", "all", "bare"])
def test_every_field_is_known_to_kubernetes(form: str, options: tuple[str, ...]) -> None:
    found = documents("--as", form, "--generate-token", *options)
    assert len(found) >= 3
    for manifest in found:
        check(manifest)


@pytest.mark.parametrize("options", [DEFAULT, EVERYTHING], ids=["default", "all"])
@pytest.mark.parametrize("form", ["jobset", "runtime"])
def test_every_field_is_known_to_the_published_models(form: str, options: tuple[str, ...]) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs the package kubeflow-trainer-api")
    for manifest in documents("--as", form, *options):
        kind = manifest["kind"]
        if kind not in ("PodDisruptionBudget", "NetworkPolicy"):
            model = models.JobsetV1alpha2JobSet if kind == "JobSet" else getattr(models, f"TrainerV1alpha1{kind}")
            assert_contains(model.from_dict(manifest).to_dict(), manifest)  # what it does not know is dropped


def test_a_service_monitor_finds_the_metrics_of_the_service() -> None:
    found = documents("--service-monitor", *DEFAULT)
    monitor, service = by_kind(found, "ServiceMonitor"), by_kind(found, "Service")
    check(monitor)
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] in [port["name"] for port in service["spec"]["ports"]]


@pytest.mark.parametrize("wrong", [{"paralelism": 2}, {"template": {"spec": {"container": []}}}])
def test_a_misspelled_field_would_be_found(wrong: Manifest) -> None:
    job = by_kind(documents(*DEFAULT), "Job")
    with pytest.raises(kubernetes_validate.ValidationError):
        check({**job, "spec": {**job["spec"], **wrong}})
    job_set = by_kind(documents("--as", "jobset", *DEFAULT), "JobSet")
    with pytest.raises(jsonschema.ValidationError):
        check({**job_set, "spec": {**job_set["spec"], **wrong}})


@pytest.mark.parametrize("form", FORMS)
def test_the_files_of_the_repository_are_what_print_writes(form: str) -> None:
    options = ["--as", form] if form != "job" else []
    assert (DEPLOY / FILES[form]).read_text(encoding="utf-8") == text_of(*options, *DEFAULT)


def test_the_kustomize_base_is_what_print_writes() -> None:
    base = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text(encoding="utf-8"))
    assert base["resources"] == [FILES["job"]]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs the program kubectl for `kubectl kustomize`")
def test_kustomize_changes_image_and_namespace_and_nothing_that_the_job_depends_on(tmp_path: Path) -> None:
    shutil.copytree(DEPLOY, tmp_path / "base")
    (tmp_path / "kustomization.yaml").write_text(
        "resources: [base]\nnamespace: research\n"
        "images: [{name: tfps-worker, newName: registry/me/train, newTag: '1'}]\n"
    )
    command = ["kubectl", "kustomize", str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, check=True, timeout=launching.END_S).stdout
    options = ("--name", "train", "--namespace", "research", "--image", "registry/me/train:1", *DEFAULT[2:])

    def key(manifest: Manifest) -> tuple[str, str]:
        return manifest["kind"], manifest["metadata"]["name"]

    assert sorted(yaml.safe_load_all(built), key=key) == sorted(documents(*options), key=key)


@pytest.mark.parametrize("form", FORMS)
def test_a_worker_learns_its_place_from_its_variables(form: str) -> None:
    for rank, worker in enumerate(pods("worker", "--as", form, *DEFAULT)):
        launch = Launch.from_environment(worker.env)
        assert launch.job == "train"
        if form != "tfjob":  # there from TF_CONFIG: tests/strategy/test_cluster.py
            assert (launch.rank, launch.workers) == (rank, 2)
            domains = [pserver.domain for pserver in pods("pserver", "--as", form, *DEFAULT)]
            assert launch.pservers == tuple(f"{domain}:7070" for domain in domains)
        assert Config.from_environment(worker.env).connect_timeout_s == 600
        folder, _, file = Security.from_environment(worker.env).token_file.rpartition("/")
        assert worker.mounts[folder][file] == "t" * 32
        assert worker.argv == ("python", "train.py")


@pytest.mark.parametrize("restarts", [0, 1, 3])
@pytest.mark.parametrize("workers", [1, 5])
def test_a_restart_of_all_workers_counts_as_one_failure_of_each_and_not_as_many_of_the_job(
    workers: int, restarts: int
) -> None:
    options = ("--workers", str(workers), "--restarts", str(restarts), *DEFAULT[:2], "train.py")
    spec = by_kind(documents(*options), "Job")["spec"]
    assert "backoffLimit" not in spec  # of the job: the wait for a restart would double with every worker
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (restarts, 0)
    assert (spec["completionMode"], spec["template"]["spec"]["restartPolicy"]) == ("Indexed", "Never")


@pytest.mark.parametrize("form", ["job", "tfjob"])
def test_workers_that_others_can_do_without_come_back_and_may_be_evicted(form: str) -> None:
    options = ("--image", "i", "--workers", "5", "--pservers", "2", "--min-workers", "2", "--restarts", "4", "train.py")
    found = documents("--as", form, *options)
    for manifest in found:
        check(manifest)
    workers, pservers = pods("worker", "--as", form, *options), pods("pserver", "--as", form, *options)
    assert [Config.from_environment(worker.env).min_workers for worker in workers] == [2] * 5
    assert all("TFPS_MIN_WORKERS" not in pserver.env for pserver in pservers)
    # preemption.py waits for a step and for what it has sent, then the process ends; Kubernetes' own 30 s are too few.
    assert all(worker.spec["terminationGracePeriodSeconds"] > BETWEEN_UPDATES_S + SETTLE_S for worker in workers)
    assert all("terminationGracePeriodSeconds" not in pserver.spec for pserver in pservers)
    budgets = [each["spec"]["minAvailable"] for each in found if each["kind"] == "PodDisruptionBudget"]
    assert sorted(budgets) == [2, 2]
    if form == "job":
        spec = by_kind(found, "Job")["spec"]
        assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (4, 3)
        disrupted, refused = spec["podFailurePolicy"]["rules"]
        assert disrupted["action"] == "Ignore"
        assert refused == {"action": "FailIndex", "onExitCodes": {"operator": "In", "values": [REFUSED]}}


def test_a_job_that_may_grow_says_how_it_is_scaled() -> None:
    options = ("--image", "i", "--workers", "2", "--min-workers", "1", "--max-workers", "4", "--namespace", "n")
    worker, *_ = pods("worker", *options, "train.py")
    config = Config.from_environment(worker.env)
    assert (config.min_workers, config.max_workers, worker.env["TFPS_WORKERS"]) == (1, 4, "2")
    (command,) = re.findall("kubectl -n n patch job (.*)", text_of(*options, "train.py"))
    name, option, patch = shlex.split(command)
    job = by_kind(documents(*options, "train.py"), "Job")
    assert (name, option) == (job["metadata"]["name"], "--patch")
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2  # else they cannot be changed
    job["spec"] |= json.loads(patch)["spec"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 4
    check(job)


@pytest.mark.parametrize("form", ["job", "jobset", "runtime"])
def test_a_preempted_pod_does_not_count(form: str) -> None:
    found = documents("--as", form, *DEFAULT)
    if form == "job":
        specs, action = [by_kind(found, "Job")["spec"]], "Ignore"
    else:
        made = found[0]["spec"] if form == "jobset" else found[0]["spec"]["template"]["spec"]
        specs, action = [each["template"]["spec"] for each in made["replicatedJobs"]], "FailJob"
        (rule,) = made["failurePolicy"]["rules"]
        assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
        assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    for spec in specs:
        check({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec})
        (rule,) = spec["podFailurePolicy"]["rules"]
        assert rule["action"] == action
        assert [condition["type"] for condition in rule["onPodConditions"]] == ["DisruptionTarget"]


@pytest.mark.parametrize("restarts", [0, 1, 3])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_tf_job_survives_as_many_failures_of_all_workers_as_asked_for(workers: int, restarts: int) -> None:
    options = ("--workers", str(workers), "--restarts", str(restarts), *DEFAULT[:2], "train.py")
    job = by_kind(documents("--as", "tfjob", *options), "TFJob")
    most = workers * restarts
    assert not kubelet.is_ended_by_restarts(job, {"Worker": most})
    assert kubelet.is_ended_by_restarts(job, {"Worker": most + 1})
    assert kubelet.is_ended_by_restarts(job, {"Worker": most, "PS": 1})  # as docs/kubernetes.md says


@pytest.mark.parametrize("form", FORMS)
def test_files_of_tls_are_where_the_variables_say(form: str) -> None:
    found = kubelet.pods(documents("--as", form, *EVERYTHING), SECRETS)
    assert len(found) == 5
    for each in found:
        security = Security.from_environment(each.env)
        contents = [
            each.mounts[path.rpartition("/")[0]][path.rpartition("/")[2]]
            for path in (security.tls_ca, security.tls_cert, security.tls_key)
        ]
        assert contents == ["ca", "cert", "key"]
        assert "--data-port" not in each.argv


@pytest.mark.parametrize("form", FORMS)
def test_arguments_and_values_reach_the_script_as_they_are_given(form: str) -> None:
    for worker in pods("worker", "--as", form, *EVERYTHING):
        assert worker.argv == ("python", "-m", "my.module", "--text", "a: $(TFPS_RANK)")
        assert worker.env["PRICE"] == "$5 $(HOME) $$"
        assert worker.env["TFPS_CHECK_EVERY"] == "10"
        assert worker.claims == {"/data": "data", "/out": "out", "/again": "data"}


ODD = (
    *("true", "null", "1e3", "", " a: b # c", "- a", "{x}", "$name ${name} $$(A)"),
    *("q\" \\ '", "a\nb\t\x7f", "\u2028\x85 \U0001f600 \u00e9"),
)


@pytest.mark.parametrize("form", FORMS)
def test_whatever_is_given_arrives_as_text(form: str) -> None:
    variables = [option for index, value in enumerate(ODD) for option in ("--env", f"V{index}={value}")]
    for worker in pods("worker", "--as", form, "--image", "no", "--namespace", "null", *variables, "train.py", *ODD):
        assert worker.argv == ("python", "train.py", *ODD)
        assert [worker.env[f"V{index}"] for index in range(len(ODD))] == list(ODD)
        assert worker.container["image"] == "no"


def test_a_line_break_in_an_argument_does_not_end_the_comment() -> None:
    arguments = ("--env", "CONFIG=a\n---\nkind: Secret", *DEFAULT)
    head = text_of(*arguments).partition("\n---\n")[0]
    assert "CONFIG=a" in head
    assert all(line.startswith("# ") for line in head.splitlines())
    assert {each["kind"] for each in documents(*arguments)} == {each["kind"] for each in documents(*DEFAULT)}


@pytest.mark.parametrize("form", ["job", "jobset", "tfjob"])
def test_no_pod_may_be_evicted_while_the_job_runs(form: str) -> None:
    found = documents("--as", form, *EVERYTHING)
    budgets = [each["spec"] for each in found if each["kind"] == "PodDisruptionBudget"]
    made = kubelet.pods(found, SECRETS)
    assert len(budgets) == 2
    for budget in budgets:
        role = budget["selector"]["matchLabels"]["app.kubernetes.io/component"]
        assert budget["minAvailable"] == len([each for each in made if each.role == role])


def test_pservers_that_have_no_job_may_be_evicted() -> None:
    """A pod that is not ready may be, and a pserver without a job is not: tests/pserver/test_metrics.py."""
    found = documents(*DEFAULT)
    (budget,) = (each["spec"] for each in found if each["kind"] == "PodDisruptionBudget" and "pserver" in str(each))
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert [each.container["readinessProbe"]["httpGet"]["path"] for each in pods("pserver", *DEFAULT)] == ["/busy"] * 2
    assert by_kind(found, "Service")["spec"]["publishNotReadyAddresses"]  # and workers find it all the same


@pytest.mark.parametrize("options", [DEFAULT, EVERYTHING, ("--no-metrics", *DEFAULT)], ids=["default", "all", "bare"])
@pytest.mark.parametrize("form", ["job", "jobset", "tfjob"])
def test_only_pods_of_the_job_reach_its_pservers_and_everybody_their_metrics(
    form: str, options: tuple[str, ...]
) -> None:
    found = documents("--as", form, *options)
    policy, made = by_kind(found, "NetworkPolicy")["spec"], kubelet.pods(found, SECRETS)
    assert policy["policyTypes"] == ["Ingress"]
    own, *others = policy["ingress"]
    (source,) = own["from"]
    assert all(source["podSelector"]["matchLabels"].items() <= each.labels.items() for each in made)
    name = "my-job" if options == EVERYTHING else "train"
    assert source["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == name
    chosen = policy["podSelector"]["matchLabels"].items()
    assert [chosen <= each.labels.items() for each in made] == [each.role == "pserver" for each in made]
    ports = {each["name"]: each["containerPort"] for each in made[0].container["ports"]}
    metrics = [ports.pop("metrics")] if "metrics" in ports else []
    assert [each["port"] for each in own["ports"]] == list(ports.values())
    assert [each["port"] for rule in others for each in rule["ports"]] == metrics


@pytest.mark.parametrize("form", FORMS)
def test_python_is_not_process_1_which_signals_do_not_end(form: str) -> None:
    assert all(each.spec["shareProcessNamespace"] for each in kubelet.pods(documents("--as", form, *DEFAULT), SECRETS))


def test_pods_meet_the_restricted_security_standard() -> None:
    for each in kubelet.pods(documents(*DEFAULT), SECRETS):
        assert each.spec["securityContext"]["runAsNonRoot"]
        assert each.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert each.container["securityContext"]["allowPrivilegeEscalation"] is False
        assert each.container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("form", FORMS)
def test_gpus_and_memory_are_limits_of_workers_only(form: str) -> None:
    (worker, *_), (pserver, *_) = (pods(role, "--as", form, *EVERYTHING) for role in ("worker", "pserver"))
    assert worker.container["resources"] == {
        "requests": {"cpu": "500m", "memory": "1.5Gi", "nvidia.com/gpu": "2"},
        "limits": {"memory": "1.5Gi", "nvidia.com/gpu": "2"},
    }
    assert pserver.container["resources"] == {
        "requests": {"cpu": "2", "memory": "512Mi"},
        "limits": {"memory": "512Mi"},
    }


def test_all_that_is_requested_but_cpu_and_disk_is_a_limit() -> None:
    given = {"cpu": "4", "memory": "8Gi", "ephemeral-storage": "1Gi", "amd.com/gpu": "2", "hugepages-2Mi": "64Mi"}
    text = ",".join(f"{name}={quantity}" for name, quantity in given.items())
    (worker, *_) = pods("worker", "--worker-resources", text, *DEFAULT)
    limits = {name: given[name] for name in ("memory", "amd.com/gpu", "hugepages-2Mi")}
    assert worker.container["resources"] == {"requests": given, "limits": limits}


def test_probes_ask_the_metrics_port_or_only_connect() -> None:
    (pserver, *_) = pods("pserver", *DEFAULT)
    (bare, *_) = pods("pserver", "--no-metrics", *DEFAULT)
    for name, path in (("startupProbe", "/healthz"), ("readinessProbe", "/busy"), ("livenessProbe", "/healthz")):
        assert pserver.container[name]["httpGet"] == {"path": path, "port": "metrics"}
        assert bare.container[name]["tcpSocket"] == {"port": "grpc"}
    assert "--metrics-port" not in bare.argv


def test_a_token_is_written_only_on_request_and_each_time_another() -> None:
    assert "Secret" not in [each["kind"] for each in documents(*DEFAULT)]
    assert "kubectl create secret generic train-token --from-file=token=/dev/stdin" in text_of(*DEFAULT)
    tokens = [by_kind(documents("--generate-token", *DEFAULT), "Secret")["stringData"]["token"] for _ in range(2)]
    assert all(re.fullmatch("[0-9a-f]{64}", token) for token in tokens)
    assert tokens[0] != tokens[1]
    assert "do not commit" in text_of("--generate-token", *DEFAULT)


@pytest.mark.parametrize("form", FORMS)
def test_the_names_that_a_certificate_needs_are_those_that_workers_call(form: str) -> None:
    head = text_of("--as", form, *EVERYTHING).partition("---")[0]
    named = re.findall(r"^#   (my-job\S+)$", head, re.M)
    found = [each.domain for each in pods("pserver", "--as", form, *EVERYTHING)]
    assert named == ([f"{domain}.research.svc" for domain in found] if form == "tfjob" else found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--image", "i", "train.py"], "--print is missing: tfps_launch writes manifests"),
        (["--print", "--image", "i"], "what to run is missing: tfps_launch --kubernetes"),
        (["--print", "train.py"], "the following arguments are required: --image"),
        (["--print", "--image", "i", "--name", "My_Job", "x.py"], "--name must be up to 40 lowercase letters"),
        (["--print", "--image", "i", "1.py"], "--name must be up to 40 lowercase letters"),
        (["--print", "--image", "i", "--workers", "0", "x.py"], "--workers must be at least 1, got 0"),
        (["--print", "--min-workers", "0", *DEFAULT], "--min-workers must be from 1 to 2 (--workers), got 0"),
        (["--print", "--min-workers", "3", *DEFAULT], "--min-workers must be from 1 to 2 (--workers), got 3"),
        (["--print", "--max-workers", "4", *DEFAULT], "--max-workers must be at least 2 (--workers) and needs --min-w"),
        (
            ["--print", "--as", "tfjob", "--min-workers", "1", "--max-workers", "4", *DEFAULT],
            "--max-workers must come with --as job, which can be scaled, got --as tfjob",
        ),
        (["--print", "--as", "jobset", "--min-workers", "1", *DEFAULT], "must come with --as job or tfjob, got --as"),
        (["--print", "--as", "runtime", "--min-workers", "1", *DEFAULT], "must come with --as job or tfjob, got --as"),
        (["--print", "--env", "TFPS_MIN_WORKERS=1", *DEFAULT], "got TFPS_MIN_WORKERS; use --min-workers"),
        (["--print", "--image", "i", "--worker-resources", "memory=8GB", "x.py"], "memory must be a quantity such as"),
        (["--print", "--image", "i", "--worker-resources", "8Gi", "x.py"], "must be NAME=VALUE, got '8Gi'"),
        (["--print", "--image", "i", "--volume", "data=data", "x.py"], "--volume must be CLAIM=PATH with an absolute"),
        (
            ["--print", "--image", "i", "--volume", "data=/a", "--volume", "out=/a/", "x.py"],
            "--volume must have another PATH each time, got /a more than once",
        ),
        (["--print", "--image", "i", "--env", "TFPS_RANK=1", "x.py"], "got TFPS_RANK; leave it out"),
        (["--print", "--image", "i", "--env", "TFPS_WORKERS=8", "x.py"], "got TFPS_WORKERS; use --workers"),
        (["--print", "--image", "i", "--env", "TFPS_TLS_CA=ca.pem", "x.py"], "got TFPS_TLS_CA; use --tls-secret"),
        (["--print", "--image", "i", "--env", "A-B=1", "x.py"], "--env must be NAME=VALUE, got the name 'A-B'"),
        (["--print", "--image", "i", "--as", "tfjob", "--service-monitor", "x.py"], "must come with --as job"),
        (["--print", "--no-metrics", "--service-monitor", *DEFAULT], "must come with metrics, got --no-metrics"),
        *(
            (
                ["--print", "--as", form, "--metrics-port", port, *DEFAULT],
                f"and not {own}, which are a pserver's own, got",
            )
            for form, port, own in [
                ("job", "7071", "7070 or 7071"),
                ("jobset", "0", "7070 or 7071"),
                ("tfjob", "2222", "2222 or 2223"),
                ("tfjob", "2223", "2222 or 2223"),
            ]
        ),
    ],
)
def test_a_wrong_command_line_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--kubernetes", *arguments])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert message in said.err.splitlines()[-1]
    assert said.out == ""


def test_kubernetes_must_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--workers", "2", "--kubernetes", "train.py"])
    assert "--kubernetes must be the first option" in capsys.readouterr().err


def test_a_script_keeps_an_option_called_kubernetes() -> None:
    assert parse(["train.py", "--kubernetes"]).args == ("--kubernetes",)


def test_names_are_made_of_those_of_scripts() -> None:
    for command, name in ((["src/My_Train.py"], "my-train"), (["-m", "a.b_c"], "b-c")):
        assert kubernetes.parse(["--print", "--image", "i", *command]).name == name


def test_printing_loads_neither_tensorflow_nor_grpc_nor_yaml() -> None:
    program = (
        "import sys; from tfps.launch.cli import main\n"
        f"main(['--kubernetes', '--print', *{DEFAULT!r}])\n"
        "print([name for name in ('tensorflow', 'grpc', 'numpy', 'yaml') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=launching.environment(), capture_output=True, text=True)
    assert done.stderr == "[]\n"
    assert done.stdout == text_of(*DEFAULT)
