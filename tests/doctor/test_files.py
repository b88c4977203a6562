"""Files and settings of a worker: what cannot be used fails, what others may read is a warning."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from guarded import SECRET

from tfps.config import Config, Security
from tfps.doctor.files import settings, tls, token
from tools.certificates import Authority


def test_good_settings_are_taken() -> None:
    config, check = settings({"TFPS_TRANSPORT": "grpc"})
    assert (config.transport, check.status) == ("grpc", "ok")


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


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize(("mode", "status"), [(0o440, "ok"), (0o444, "warning")])
def test_a_token_of_somebody_else_may_be_there_for_our_group(mode: int, status: str, files: dict[str, str]) -> None:
    Path(files[SECRET]).chmod(mode)
    os.chown(files[SECRET], 12345, 0)
    assert token(Security(token_file=files[SECRET])).status == status


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
