"""A worker or pserver that goes away ends the others within the deadline, with an error that names it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import jobs
import processes
import pytest

from tfps.pserver.server import ParameterServer

SOCKETS = {"TFPS_SHARED_MEMORY": "0"}
PATHS = {"shared memory": {}, "tcp": SOCKETS, "grpc": {**SOCKETS, "TFPS_TRANSPORT": "grpc"}}


@pytest.fixture(params=["shared memory", *(pytest.param(path, marks=pytest.mark.long) for path in ("tcp", "grpc"))])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ParameterServer]:
    """A pserver; slices pass through each of the data paths."""
    for name, value in PATHS[request.param].items():
        monkeypatch.setenv(name, value)
    running = ParameterServer("127.0.0.1", 0, workers=2)
    yield running
    running.stop()


def read_until(process: object, word: str) -> None:
    """Reads the process' output up to the line `word`."""
    for line in process.stdout:  # type: ignore[attr-defined]
        if line.strip() == word:
            return
    raise AssertionError(f"the process ended before it printed {word!r}")


def test_a_killed_worker_ends_the_others_with_an_error_that_names_its_rank(server: ParameterServer) -> None:
    with processes.started("endless.py", [server.address], 2, [[], ["stays"]]) as running:
        for process in running:
            read_until(process, "training")
        # Rank 0 is in a step: it has pushed gradients, not just whether it has a next batch (one slice).
        jobs.poll(lambda: server.status().members[1].awaited_slices > 1)
        running[1].send_signal(signal.SIGKILL)
        ((code, output),) = processes.finish(running[:1])
    assert code == 1
    assert re.search(r"fit raised WorkerLostError rank 1 \(\S+\) died at step \d+: ", output)
    # Half of a step may have arrived: nobody may read, save or train on it.
    assert "get_weights raised WorkerLostError" in output


def test_why_a_callback_of_one_rank_failed_is_what_the_others_raise(server: ParameterServer) -> None:
    with processes.started("endless.py", [server.address], 2, [[], ["fills"]]) as running:
        (code, output), (full, own) = processes.finish(running)
    assert (code, full) == (1, 1)
    reason = r"OSError: \[Errno 28\] No space left on device"
    assert re.search(rf"^{reason}$", own, re.MULTILINE), own
    *_, last = output.splitlines()
    assert re.fullmatch(
        rf"tfps.errors.WorkerLostError: rank 1 \(.*\) left before step .*: it ended with {reason}", last
    )


def test_a_worker_that_ends_earlier_is_named_to_the_others(server: ParameterServer) -> None:
    with processes.started("endless.py", [server.address], 2, [[], ["8"]]) as running:
        (code, output), (early, _) = processes.finish(running)
    assert early == 0
    assert code == 1
    assert re.search(r"rank 1 \(.*\) left before step (8|9|10) of", output), output


def test_workers_that_end_right_after_the_same_step_do_not_fail_each_other(server: ParameterServer) -> None:
    with processes.started("endless.py", [server.address], 2, [["8"], ["8"]]) as running:
        processes.outputs(running)


def test_a_stopped_pserver_is_named_to_all_workers(server: ParameterServer) -> None:
    with processes.started("endless.py", [server.address], 2, [[], []]) as running:
        for process in running:
            read_until(process, "training")
        server.stop()
        for code, output in processes.finish(running):
            assert code == 1
            assert f"pserver {server.address} was stopped" in output


def test_models_that_differ_are_told_apart_by_the_first_variable(server: ParameterServer) -> None:
    with processes.started("differing.py", [server.address], 2, [["32"], ["48"]]) as running:
        for code, output in processes.finish(running):
            assert code == 1
            assert "MismatchError" in output
            assert "kernel" in output
            assert "(64, 32)" in output
            assert "(64, 48)" in output
            frames = re.findall(r'^  File "(.*)", line', output.partition("Traceback")[2], re.MULTILINE)
            assert any(frame.endswith("differing.py") for frame in frames)
            inner = [frame for frame in frames if re.search(r"tfps/\w+/\w+\.py$", frame) and "tests" not in frame]
            assert len(inner) < 2, output  # the one that raises, but not how tfps got there
            said = "tfps.errors.MismatchError: the workers do not train the same"
            assert any(line.startswith(said) for line in output.splitlines()[-3:])


def test_a_script_that_fails_ends_although_it_has_neither_closed_its_strategy_nor_stopped_its_pserver() -> None:
    ((code, output),) = processes.finish([processes.start("unstopped.py", environment={})])
    assert code == 1
    assert "RuntimeError: the script failed" in output
