"""One worker on unusual machines: pools of one thread, several local devices."""

from __future__ import annotations

from collections.abc import Iterator

import processes
import pytest

from tfps.pserver.server import ParameterServer


@pytest.fixture(params=[pytest.param("embedded", marks=pytest.mark.long), "grpc"])
def pservers(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    running = [ParameterServer("127.0.0.1", 0, workers=1) for _ in range(2)] if request.param == "grpc" else []
    yield [server.address for server in running]
    for server in running:
        server.stop()


@pytest.mark.long
def test_a_hundred_variables_do_not_deadlock_pools_of_one_thread(pservers: list[str]) -> None:
    (output,) = processes.outputs([processes.start("one_thread.py", *pservers, environment={})])
    assert "ended" in output


@pytest.mark.long  # test_rows.py has two devices, too
def test_two_local_devices_end_as_one_with_the_same_global_batch(pservers: list[str]) -> None:
    (output,) = processes.outputs([processes.start("devices.py", *pservers, environment={})])
    assert output.count("devices agree") == (3 if pservers else 11)
