"""What tfps is compared with: how it is installed, run and measured. Nothing is installed here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tfps.types import Argument, Json
from tools import children, peer_runs, peers
from tools.benchmarks import peers as benchmark
from tools.peer_runs import Peer, Place, Role, Session, figures, measure
from tools.peer_workers.common import MARK, Work
from tools.peers import PeerError

TINY = Work(warmup_steps=1, steps=3, width=16, depth=1)


@pytest.fixture(autouse=True)
def no_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As on a machine where no peer is installed."""
    monkeypatch.setenv("TFPS_PEERS_HOME", str(tmp_path / "peers"))
    return tmp_path


def test_an_unknown_peer_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main(["install", "byteps"]) == 2
    assert "peer must be one of horovod, mxnet, tensorflow or all, got 'byteps'" in capsys.readouterr().err


def test_a_missing_python_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert peers.main(["install", "mxnet"]) == 1
    error = capsys.readouterr().err
    assert "peer 'mxnet' needs Python 3.8" in error
    assert "pyenv install 3.8" in error
    assert "--python PATH" in error


def test_a_python_that_does_not_run_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    stand_in = tmp_path / f"python{version}"
    stand_in.write_text("#!/bin/sh\nexit 127\n")
    stand_in.chmod(0o755)
    real = tmp_path / "versions" / f"{version}.9" / "bin" / "python"
    real.parent.mkdir(parents=True)
    real.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    real.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert peers.find_python(version, "some") == real


def test_a_python_of_another_version_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main(["install", "mxnet", "--python", sys.executable]) == 1
    assert "--python of peer 'mxnet' must be a Python 3.8, got" in capsys.readouterr().err


def test_an_environment_of_another_recipe_is_not_installed() -> None:
    one = peers.environment("mxnet")
    one.interpreter.parent.mkdir(parents=True)
    one.interpreter.touch()
    assert not one.is_installed
    (one.directory / peers.STAMP).write_text(one.recipe)
    assert one.is_installed
    (one.directory / peers.STAMP).write_text(one.recipe.replace("1.9.1", "1.9.0"))
    assert not one.is_installed


def test_a_peer_that_is_not_installed_is_left_out_by_name() -> None:
    case = benchmark.Case("lo", "tiny, loopback", TINY, peers=("horovod", "mxnet-p3"))
    found = list(benchmark.measure_case(case))
    assert found == [
        {"peer": "horovod", "left_out": "not installed: tools/peers.py install horovod"},
        {"peer": "mxnet-p3", "left_out": "not installed: tools/peers.py install mxnet"},
    ]
    assert benchmark.describe(found[0]).split() == [
        *("horovod", "left", "out:", "not", "installed:", "tools/peers.py", "install", "horovod")
    ]
    with pytest.raises(PeerError, match="peer 'horovod' is not installed"):
        measure("horovod", Place(), TINY)


def test_a_peer_that_cannot_sleep_is_left_out_by_name() -> None:
    case = benchmark.Case("vgg19", "sleeping", benchmark.vgg19(1, 1))
    reason = benchmark.reason_to_leave_out("tf-ps", case)
    assert reason is not None
    assert "without Python" in reason


@pytest.mark.long
def test_tfps_is_measured_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[float] = []

    def cpu_s(pid: int) -> float:
        read.append(children.cpu_s(pid))
        return read[-1]

    monkeypatch.setattr(peer_runs, "cpu_s", cpu_s)
    found = measure("tfps", Place(), TINY, memory_period_s=0.05)
    assert found["peak_bytes"] > 200e6  # TensorFlow, twice
    assert [len(of_rank) for of_rank in found["periods_s"]] == [TINY.steps] * TINY.workers
    assert found["switches"] > 0
    assert found["messages"] > 0
    assert 0 < found["step_s"] < 10
    assert 0 < found["mean_s"] < 10
    roles = TINY.workers + TINY.servers
    assert len(read) == 2 * roles
    assert all(each > 0 for each in read)
    # Nothing, where the first look came so late that all steps were over.
    assert found["cpu_s"] == pytest.approx((sum(read[roles:]) - sum(read[:roles])) / TINY.steps)


def test_a_role_that_fails_is_named_with_its_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(session: Session) -> list[Role]:
        return [session.start("worker 0", 0, "peer_workers.no_such_module")]

    monkeypatch.setitem(peer_runs.PEERS, "tfps", Peer("tfps", "", start))
    case = benchmark.Case("lo", "tiny, loopback", TINY, peers=("tfps",))
    (found,) = benchmark.measure_case(case)
    assert "worker 0 ended with exit code 1 while waiting for the end of 1 warm-up steps" in found["failed"]
    assert "No module named peer_workers.no_such_module" in found["failed"]
    assert benchmark.headline([{"case": "lo", **found}]) == {}


def test_a_role_that_does_not_answer_is_ended_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Role] = []

    def start(session: Session) -> list[Role]:
        started.append(session.start("worker 0", 0, "timeit", "-n1", "-r1", "-s", "import time", "time.sleep(100)"))
        return started

    monkeypatch.setitem(peer_runs.PEERS, "tfps", Peer("tfps", "", start))
    monkeypatch.setattr(peer_runs, "START_S", 0.5)
    monkeypatch.setattr(peer_runs, "STEP_S", 0.0)
    with pytest.raises(PeerError, match="the end of 1 warm-up steps must come within 0 s, but did not; worker 0 said"):
        measure("tfps", Place(), TINY)
    assert started[0].process is not None
    assert started[0].process.ended


def test_events_are_told_from_other_output() -> None:
    role = Role("worker 0")
    for line in ("Epoch 1", f'{MARK}{{"event": "warm"}}', '{"event": "done"}'):
        role.take(line)
    assert role.events == {"warm": {"event": "warm"}}
    assert role.lines[0] == "Epoch 1"


def result(rank: int, checksum: float, **more: Argument) -> dict[str, Json]:
    return {"rank": rank, "periods_s": [0.1, 0.3, 0.2], "drained_s": 0.9, "loss": 1.5, "checksum": checksum, **more}


def test_figures_are_those_of_rank_0() -> None:
    found = figures([result(0, 100.0), result(1, 100.0) | {"periods_s": [9.0]}], cpu_s=1.5, switched=60, work=TINY)
    assert found["step_s"] == 0.2
    assert found["mean_s"] == pytest.approx(0.3)
    assert found["cpu_s"] == 0.5
    assert found["switches"] == 20
    assert found["periods_s"] == [[0.1, 0.3, 0.2], [9.0]]  # but these, of all ranks


def test_messages_are_those_of_a_worker_on_average() -> None:
    found = figures([result(0, 1.0, messages=10.0), result(1, 1.0, messages=12.0)], 1.5, 60, TINY)
    assert found["messages"] == 11.0
    assert "messages" not in figures([result(0, 1.0)], 1.5, 60, TINY)


def test_workers_that_have_not_trained_together_are_refused() -> None:
    with pytest.raises(PeerError, match="all workers must have the same weights at the end"):
        figures([result(0, 100.0), result(1, 100.1)], cpu_s=1.5, switched=60, work=TINY)


def test_headline_has_medians_over_rounds() -> None:
    runs = [{"case": "1g", "peer": "mxnet-p3", "step_s": step_s, "cpu_s": 0.3} for step_s in (0.5, 0.7, 0.6)]
    runs.append({"case": "1g", "peer": "mwms", "failed": "no"})
    assert benchmark.headline(runs) == {"mxnet_p3_1g_s": 0.6, "mxnet_p3_1g_cpu_s": 0.3}
