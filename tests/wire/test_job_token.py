"""The job token: where it comes from, what it may be, and that it does not show."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tfps.errors import ConfigError
from tfps.wire.job_token import JobToken

SECRET = "a-secret-of-20-chars"


def write(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_white_space_around_a_token_is_no_part_of_it(tmp_path: Path) -> None:
    token = JobToken.read(write(tmp_path / "token", f"\n {SECRET}\r\n"))
    assert token.reveal() == SECRET.encode()
    assert token.metadata() == (("tfps-token", SECRET),)


def test_no_file_is_no_token() -> None:
    assert not JobToken.read("")
    assert JobToken.read("").metadata() == ()


def test_it_does_not_show() -> None:
    token = JobToken(SECRET)
    assert SECRET not in f"{token} {token!r} {vars(JobToken)}"


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("", "must contain a job token, got an empty file"),
        ("tooshort", "must have 16 to 256 characters, got 8; `openssl rand"),
        ("x" * 257, "must have 16 to 256 characters, got 257"),
        ("x" * 100_000, "must have 16 to 256 characters, got 512"),
        ("with a space in between", "visible ASCII characters only"),
        ("verschlüsselte-Grüße", "visible ASCII characters only"),
    ],
)
def test_a_malformed_token_is_refused_without_showing_it(content: str, rule: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        JobToken.read(write(tmp_path / "token", content))
    assert rule in str(caught.value)
    assert not content or content not in str(caught.value)


def test_a_path_that_is_no_readable_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    for path, why in {
        tmp_path: f"Is a directory; name the file in that folder, such as '{tmp_path}/token'",
        tmp_path / "no" / "token": f"No such file or directory; its folder '{tmp_path}/no' does not exist on this host",
        tmp_path
        / "missing": "No such file or directory; `\\(umask 077; openssl rand -hex 32 > '.*/missing'\\)` makes one",
    }.items():
        with pytest.raises(ConfigError, match=f"token_file '{path}' cannot be read: {why}"):
            JobToken.read(str(path))


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_file_that_others_may_read_is_warned_of(
    mode: int, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        JobToken.read(write(tmp_path / "token", SECRET, mode))
    assert caplog.text.count("may be read by other users") == warned
    assert SECRET not in caplog.text


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize(("mode", "warned"), [(0o440, False), (0o444, True)])
def test_a_file_of_somebody_else_may_be_there_for_our_group(
    mode: int, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "token", SECRET, mode)
    os.chown(path, 12345, 0)
    JobToken.read(path)
    assert caplog.text.count("may be read by other users") == warned


@pytest.mark.parametrize(
    ("own", "received", "says"),
    [
        (SECRET, SECRET, None),
        (SECRET, "", "wants a job token, this client sent none: set TFPS_TOKEN_FILE"),
        (SECRET, SECRET[:-1] + "x", "has another job token than this client"),
        (SECRET, SECRET[:-1], "has another job token"),
        ("", "", None),
        ("", SECRET, "was started without a job token, but this client has one"),
    ],
)
def test_each_end_without_the_other_is_told_what_is_missing(own: str, received: str, says: str | None) -> None:
    refusal = JobToken(own).refusal(received.encode())
    assert refusal == says if says is None else says in str(refusal)
    assert SECRET not in str(refusal)
