"""What is said of this host: versions, settings, token and certificates, GPUs, open files, memory."""

from __future__ import annotations

import platform
import resource
import shutil
import sys
from pathlib import Path

import jobs
import pytest
from guarded import SECRET
from packaging.specifiers import SpecifierSet

from tfps.config import Config, Security
from tfps.doctor.host import (
    ask_tensorflow,
    available_bytes,
    container_available_bytes,
    gpus,
    memory,
    open_files,
    settings,
    shared_memory,
    side_of,
    supported,
    tls,
    token,
    versions,
)
from tfps.doctor.report import Check
from tfps.wire.shared_memory import machine_bytes
from tools.certificates import Authority

LIMITS = {
    "python": ">=3.10,<3.14",
    "grpcio": ">=1.68",
    "protobuf": ">=3.20.3",
    "numpy": ">=1.26",
    "tensorflow": "<2.22,>=2.18",
    "keras": ">=3.8",
}
GOOD = {"grpcio": "1.68.0", "protobuf": "7.1", "numpy": "2.0", "tensorflow": "2.18.0", "keras": "3.8"}
ANSWER = """print("hello"); print('{"gpus": %d, "version": "2.20", "visible": %s}')"""
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="of Linux")


@pytest.mark.parametrize(
    ("version", "side"),
    [
        ("2.17.1", -1),
        ("2.18", 0),
        ("2.18.0", 0),
        ("2.21.3", 0),
        ("2.22.0", 1),
        ("2.22", 1),
        ("3.0", 1),
        ("2.9", -1),
        ("2.18.0rc1", 0),
        ("2.22.0rc1", 1),
        ("custom", 1),
    ],
)
def test_a_version_is_older_within_or_newer(version: str, side: int) -> None:
    assert side_of(version, SpecifierSet(">=2.18,<2.22")) == side


def test_limits_are_read_from_requirements() -> None:
    found = supported(["grpcio>=1.68", 'tensorflow<2.22,>=2.18; extra == "x"', "numpy (>=1.26)", "Keras"])
    assert found == {"grpcio": ">=1.68", "tensorflow": "<2.22,>=2.18", "numpy": ">=1.26", "keras": ""}


def test_what_is_installed_here_is_supported() -> None:
    found = {check.name: check for check in versions()}
    assert found["python"].values["version"] == platform.python_version()
    assert all(found[name].values["supported"] for name in ("python", "grpcio", "protobuf", "numpy", "tensorflow"))
    assert all(check.status == "ok" for check in found.values())


def test_what_is_too_old_fails_what_is_newer_is_a_warning() -> None:
    found = {each.name: each for each in versions({**GOOD, "tensorflow": "2.17.0", "keras": "3.7"}, LIMITS, "3.14.1")}
    assert (found["tensorflow"].status, found["tensorflow"].problem) == ("failed", "old")
    assert found["tensorflow"].advice == 'tensorflow 2.17.0 is too old: pip install "tensorflow<2.22,>=2.18"'
    assert found["keras"].status == "failed"
    assert (found["python"].status, found["python"].problem) == ("warning", "new")
    assert "install Python >=3.10,<3.14" in found["python"].advice


def test_what_is_needed_and_missing_fails() -> None:
    found = {each.name: each for each in versions({"tensorflow-cpu": "2.20"}, {**LIMITS, "tensorflow-cpu": ">=2.18"})}
    assert [found[name].problem for name in ("grpcio", "protobuf", "numpy", "keras")] == ["missing"] * 4
    assert found["tensorflow"].status == "ok"
    assert found["grpcio"].advice == 'pip install "grpcio>=1.68"'


def test_a_host_of_pservers_needs_no_tensorflow() -> None:
    bare = {name: version for name, version in GOOD.items() if name not in ("tensorflow", "keras")}
    found = versions(bare, LIMITS, "3.11.0")
    assert [each.status for each in found] == ["ok"] * 5 + ["skipped"]
    assert "workers need tfps[tensorflow]" in found[-1].text


def test_malformed_settings_fail_with_the_variable() -> None:
    config, check = settings({"TFPS_STAGING_DEPTH": "much"})
    assert config == Config()
    assert check.status == "failed"
    assert check.advice == "environment variable TFPS_STAGING_DEPTH must be a whole number, got 'much'"


def test_a_misspelled_variable_is_a_warning() -> None:
    _, check = settings({"TFPS_TRANSPROT": "grpc"})
    assert check.status == "warning"
    assert "did you mean TFPS_TRANSPORT?" in check.advice


def test_a_token_is_used_and_does_not_show(files: dict[str, str]) -> None:
    check = token(Security(token_file=files[SECRET]))
    assert (check.status, check.values) == ("ok", {"path": files[SECRET]})
    assert SECRET not in str(check)
    assert token(Security()).status == "ok"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o602])
def test_a_token_that_others_may_read_or_write_is_a_warning(mode: int, files: dict[str, str]) -> None:
    Path(files[SECRET]).chmod(mode)
    check = token(Security(token_file=files[SECRET]))
    assert (check.status, check.problem) == ("warning", "readable")
    assert check.text == f"{files[SECRET]} has mode {mode:04o}: others may use it"
    assert check.advice == f"chmod 600 '{files[SECRET]}', the job token"


@pytest.mark.parametrize(("content", "says"), [(None, "cannot be read: No such file"), ("", "empty"), ("x", "got 1")])
def test_a_token_that_cannot_be_used_fails(content: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.touch(0o600)
        path.write_text(content)
    check = token(Security(token_file=str(path)))
    assert check.status == "failed"
    assert says in check.advice


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl")
def test_certificates_are_read(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.sign("worker")
    assert tls(Security()).text == "off"
    assert tls(Security(tls_ca=authority.file)).text.startswith("on, without a certificate of this host")
    good = Security(tls_ca=authority.file, tls_cert=own.cert, tls_key=own.key)
    assert tls(good).text.startswith("on, with a certificate of this host")
    other = authority.sign("other")
    for wrong in (
        Security(tls_ca=str(tmp_path / "missing")),
        Security(tls_ca=authority.file, tls_cert=own.cert, tls_key=other.key),
    ):
        assert (tls(wrong).status, tls(wrong).problem) == ("failed", "unusable")


def asked(program: str, count: int, timeout_s: float = jobs.DEADLINE_S) -> Check:
    with ask_tensorflow(program) as process:
        try:
            return gpus(count, process, timeout_s)
        finally:
            process.kill()


def test_without_tensorflow_the_driver_is_believed() -> None:
    assert gpus(4).values == {"visible": 4, "seen_by_tensorflow": None}
    assert (gpus(4).text, gpus(0).text) == ("4", "none")


@pytest.mark.parametrize(("seen", "count", "text"), [(2, 2, "2 seen by TensorFlow"), (0, 0, "none")])
def test_what_tensorflow_sees_counts(seen: int, count: int, text: str) -> None:
    check = asked(ANSWER % (seen, "null"), count)
    assert (check.status, check.text) == ("ok", text)
    assert check.values == {"visible": count, "seen_by_tensorflow": seen}


@pytest.mark.parametrize(
    ("visible", "says"), [("null", "look at its CUDA libraries"), ('""', "look at CUDA_VISIBLE_DEVICES=''")]
)
def test_gpus_that_tensorflow_does_not_see_are_a_warning(visible: str, says: str) -> None:
    check = asked(ANSWER % (0, visible), 4)
    assert (check.status, check.problem) == ("warning", "unseen")
    assert check.advice.startswith(f"TensorFlow sees none of the 4 GPUs of this host: {says}")


def test_a_tensorflow_that_cannot_be_imported_fails() -> None:
    check = asked("raise ImportError('libfoo.so is missing')", 0)
    assert (check.status, check.problem) == ("failed", "import")
    assert check.advice == "TensorFlow cannot be imported: ImportError: libfoo.so is missing"


def test_a_tensorflow_that_takes_too_long_is_a_warning() -> None:
    check = asked("import threading; threading.Event().wait()", 0, 0.2)
    assert (check.status, check.problem) == ("warning", "slow")


@pytest.mark.long
def test_the_real_tensorflow_answers() -> None:
    with ask_tensorflow() as process:
        check = gpus(0, process, 2 * jobs.DEADLINE_S)
        process.kill()
    assert check.values["seen_by_tensorflow"] is not None


@pytest.mark.parametrize(
    ("limit", "peers", "status"),
    [(1024, 4, "ok"), (1023, 4, "warning"), (143, 4, "failed"), (144, 4, "warning"), (1024, 300, "failed")],
)
def test_open_files_suffice_for_so_many_peers(limit: int, peers: int, status: str) -> None:
    check = open_files(peers, limit)
    assert check.status == status
    assert check.values == {"limit": limit, "least": 128 + 4 * peers}
    assert status == "ok" or "ulimit -n" in check.advice


def test_a_limit_below_what_many_peers_need_says_how_many() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        check = open_files(1000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert check.advice == "a process may open 512 files and needs 4128 for 1000 peers: ulimit -n 8192"


@on_linux
def test_memory_is_what_is_left_of_what_there_is() -> None:
    left = available_bytes()
    assert left is not None
    assert 0 < left <= machine_bytes()
    assert memory().values["total_bytes"] == machine_bytes()


@pytest.mark.parametrize(
    ("limit", "used", "statistics"),
    [
        ("memory.max", "memory.current", "anon 300\ninactive_file 500\nactive_file 100\n"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "inactive_file 7\ntotal_inactive_file 500\n",
        ),
    ],
)
def test_cached_files_of_a_container_count_as_free(limit: str, used: str, statistics: str, tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text("1000\n")
    (tmp_path / used).write_text("900\n")
    assert container_available_bytes(tmp_path) == 100
    (tmp_path / used).with_name("memory.stat").write_text(statistics)
    assert container_available_bytes(tmp_path) == 600
    (tmp_path / used).write_text("400\n")  # read a moment earlier than the statistics
    assert container_available_bytes(tmp_path) == 1000


def test_a_container_without_a_limit_has_what_its_host_has(tmp_path: Path) -> None:
    assert container_available_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("900\n")
    assert container_available_bytes(tmp_path) is None


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfps.doctor.host.available_bytes", lambda: 2**29)
    check = memory()
    assert (check.status, check.problem) == ("warning", "low")
    assert check.advice.startswith("only 0.5 GiB of memory is free")


@on_linux
def test_this_host_has_memory_to_share_unless_it_is_turned_off() -> None:
    assert shared_memory(Config()).status == "ok"
    assert shared_memory(Config(shared_memory=False)).status == "skipped"


def test_a_system_without_memfd_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.memfd_create", raising=False)
    check = shared_memory(Config())
    assert check.status == "warning"
    assert "memfd_create is for Linux" in check.advice
