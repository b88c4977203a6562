"""What is made outside of the scope: works, or an error or a warning says that every worker trains alone."""

from __future__ import annotations

import processes
from preloaded import Process

from tfps.pserver.server import ParameterServer


def test_workers_are_told_what_is_not_in_the_scope_and_what_can_join_it_does() -> None:
    servers = [ParameterServer("127.0.0.1", 0, workers=2) for _ in range(2)]
    running: list[Process] = []
    try:
        for rank in range(2):
            environment = {"TFPS_RANK": str(rank), "TFPS_WORKERS": "2"}
            addresses = [server.address for server in servers]
            running.append(processes.start("scopes.py", *addresses, environment=environment))
        ended = processes.finish(running)
    finally:
        for process in running:
            process.kill()
        for server in servers:
            server.stop()
    for rank, (code, text) in enumerate(ended):
        assert code == 0, text
        assert text.count("'forgotten' is not in `with strategy.scope():`; every worker trains it alone") == 1, text
        assert text.count("ends without a single step") == (rank == 0), text  # of the first of two jobs
        assert "layer 'memory' of model 'sequential" in text and "one gets 3 of 6 rows" in text
        assert "trains variable 'dense" in text or "trains variable 'sequential" in text
