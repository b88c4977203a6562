"""Versions: what is compared how, and that the supported ones are those of the package."""

from __future__ import annotations

import platform

import pytest

from tfps.doctor.versions import checks, compare, number, supported

LIMITS = {
    "python": ">=3.10,<3.14",
    "grpcio": ">=1.68",
    "protobuf": ">=3.20.3",
    "numpy": ">=1.26",
    "tensorflow": "<2.22,>=2.18",
    "keras": ">=3.8",
}
GOOD = {"grpcio": "1.68.0", "protobuf": "7.1", "numpy": "2.0", "tensorflow": "2.18.0", "keras": "3.8"}


@pytest.mark.parametrize(
    ("version", "release"), [("2.21.0rc1", (2, 21)), ("2.20", (2, 20)), ("3.20.3", (3, 20, 3)), ("1.0.dev0", (1,))]
)
def test_a_release_is_its_numbers(version: str, release: tuple[int, ...]) -> None:
    assert number(version) == release


@pytest.mark.parametrize(
    ("version", "side"),
    [("2.17.1", -1), ("2.18", 0), ("2.18.0", 0), ("2.21.3", 0), ("2.22.0", 1), ("2.22", 1), ("3.0", 1), ("2.9", -1)],
)
def test_a_version_is_older_within_or_newer(version: str, side: int) -> None:
    assert compare(version, ">=2.18,<2.22") == side


def test_without_limits_everything_is_supported() -> None:
    assert compare("0.1", "") == 0


def test_limits_are_read_from_requirements() -> None:
    found = supported(["grpcio>=1.68", 'tensorflow<2.22,>=2.18; extra == "x"', "numpy (>=1.26)", "Keras"])
    assert found == {"grpcio": ">=1.68", "tensorflow": "<2.22,>=2.18", "numpy": ">=1.26", "keras": ""}


def test_what_is_installed_here_is_supported() -> None:
    found = {check.name: check for check in checks()}
    assert found["python"].values["version"] == platform.python_version()
    assert all(found[name].values["supported"] for name in ("python", "grpcio", "protobuf", "numpy", "tensorflow"))
    assert all(check.status == "ok" for check in found.values())


def test_what_is_too_old_fails_what_is_newer_is_a_warning() -> None:
    found = {each.name: each for each in checks({**GOOD, "tensorflow": "2.17.0", "keras": "3.7"}, LIMITS, "3.14.1")}
    assert (found["tensorflow"].status, found["tensorflow"].problem) == ("failed", "old")
    assert found["tensorflow"].advice == 'tensorflow 2.17.0 is too old: pip install "tensorflow<2.22,>=2.18"'
    assert found["keras"].status == "failed"
    assert (found["python"].status, found["python"].problem) == ("warning", "new")
    assert "install Python >=3.10,<3.14" in found["python"].advice


def test_what_is_needed_and_missing_fails() -> None:
    found = {each.name: each for each in checks({"tensorflow-cpu": "2.20"}, {**LIMITS, "tensorflow-cpu": ">=2.18"})}
    assert [found[name].problem for name in ("grpcio", "protobuf", "numpy", "keras")] == ["missing"] * 4
    assert found["tensorflow"].status == "ok"
    assert found["grpcio"].advice == 'pip install "grpcio>=1.68"'


def test_a_host_of_pservers_needs_no_tensorflow() -> None:
    bare = {name: version for name, version in GOOD.items() if name not in ("tensorflow", "keras")}
    found = checks(bare, LIMITS, "3.11.0")
    assert [each.status for each in found] == ["ok"] * 5 + ["skipped"]
    assert "workers need tfps[tensorflow]" in found[-1].text
