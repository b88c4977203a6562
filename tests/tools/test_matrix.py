"""What tools/matrix.py runs, and what it says of pairs that it cannot run. Nothing is installed here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import interpreters, matrix
from tools.matrix import NEWEST, OLDEST, MatrixError, Pair


def test_the_oldest_and_the_newest_pair_are_the_ends_of_what_is_supported() -> None:
    assert (str(OLDEST), str(NEWEST)) == ("2.18:3.10", "2.21:3.13")
    assert [OLDEST.tensorflow, NEWEST.tensorflow] == [list(matrix.PYTHONS)[index] for index in (0, -1)]
    setup = (matrix.ROOT / "setup.py").read_text()
    assert f">={OLDEST.tensorflow}," in setup
    assert f">={OLDEST.python},<3.14" in setup


def test_the_oldest_pair_gets_the_lower_ends_of_what_setup_allows() -> None:
    constraints = OLDEST.constraints().splitlines()
    setup = (matrix.ROOT / "setup.py").read_text()
    for name in ("keras", "grpcio", "protobuf", "numpy", "psutil", "pytest", "hypothesis", "scikit-learn"):
        (version,) = [line.partition("==")[2] for line in constraints if line.startswith(f"{name}==")]
        least = setup.partition(f'"{name}>=')[2].partition('"')[0]
        assert least
        assert version.startswith(least), name


@pytest.mark.parametrize("text", ["2.17:3.10", "2.18:3.13", "2.21", "2.21:3.14", "newest"])
def test_a_pair_that_is_not_supported_is_refused_with_those_that_are(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert matrix.main([text]) == 2
    error = capsys.readouterr().err
    assert f"got {text!r}" in error
    assert "2.18:3.10 to 3.12" in error


def test_a_missing_python_is_named_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix, "DIRECTORY", tmp_path)
    monkeypatch.setattr(interpreters, "find", lambda version: None)
    with pytest.raises(MatrixError, match=r"no Python 3\.12 .*\(pyenv install 3\.12,"):
        matrix.install(Pair("2.19", "3.12"))

    def run(pair: Pair, options: object) -> str:
        if pair == OLDEST:
            matrix.install(pair)
        return "passed in 1 s"

    monkeypatch.setattr(matrix, "run", run)
    assert matrix.main([]) == 1
    out = capsys.readouterr().out
    assert "matrix: 2.18:3.10 not run: there is no Python 3.10" in out
    assert "matrix: 2.21:3.13 passed" in out


def test_the_core_suite_leaves_out_files_that_exist() -> None:
    for name in matrix.NOT_CORE:
        assert (matrix.ROOT / "tests" / name).exists(), name
