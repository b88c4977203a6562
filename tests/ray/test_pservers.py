"""Pservers as actors: where they run and listen, what they say if they cannot start, and that they end."""

from __future__ import annotations

from collections.abc import Iterator

import jobs
import on_ray
import pytest

from tfps.config import Config, Security
from tfps.errors import ConfigError, WaitTimeoutError
from tfps.launch.job import Job, lasting_secret_file
from tfps.protos import tfps_pb2 as pb
from tfps.types import Argument
from tfps.wire.control import Pserver

ray = pytest.importorskip("ray", reason=on_ray.NEEDS_RAY)

from tfps.ray.pservers import Deadline, Pservers  # noqa: E402 (it imports ray)

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
SECRET = "the-token-of-this-job-0123456789"


@pytest.fixture
def nodes(cluster: Argument) -> Iterator[list[str]]:
    """The two nodes that workers may be on; afterwards no pserver is."""
    known = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    assert len(known) == 2
    yield known
    on_ray.nothing_is_left()


def test_pservers_listen_where_ray_finds_their_nodes_and_end_when_told(nodes: list[str]) -> None:
    pservers = Pservers([*nodes, nodes[0]], None, {"CPU": 1})
    try:
        job = pservers.start(Job("train", 3), SECRET, Deadline(jobs.DEADLINE_S))
        assert {each["Address"]["NodeID"] for each in on_ray.actors("TfpsPserver")} == set(nodes)
        assert {address.rpartition(":")[0] for address in job.pservers} == {ray.util.get_node_ip_address()}
        security = Security.of_worker(Config(token_file=lasting_secret_file(SECRET)), {})
        for address in job.pservers:
            known = Pserver(address, security)
            status = known.call("Status", pb.StatusRequest(details=True), jobs.DEADLINE_S)
            assert status.workers == 3
            known.close()
    finally:
        pservers.end()
        pservers.end()


def test_a_pserver_that_cannot_start_says_why_without_the_token(nodes: list[str]) -> None:
    pservers = Pservers(nodes, 2, {})
    try:
        with pytest.raises(ConfigError, match="must have 16 to 256 characters, got 6") as caught:
            pservers.start(Job("train", 1), "secret", Deadline(jobs.DEADLINE_S))
        assert "secret" not in str(caught.value)
    finally:
        pservers.end()


def test_without_room_for_a_pserver_it_says_where_and_what_it_needs(nodes: list[str]) -> None:
    first, second = Pservers(nodes[:1], 1, {"CPU": 1}), Pservers(nodes, 2, {"CPU": 2})
    try:
        first.start(Job("train", 1), SECRET, Deadline(jobs.DEADLINE_S))
        says = rf"^pserver 0 of 2 was not ready within 3 s: on node {nodes[0]} it needs \{{'CPU': 2\}} beside"
        with pytest.raises(WaitTimeoutError, match=says):
            second.start(Job("train", 2), SECRET, Deadline(3.0))
    finally:
        first.end()
        second.end()


def test_what_a_node_never_has_is_refused_at_once(nodes: list[str]) -> None:
    pservers = Pservers(nodes, None, {"CPU": 3})
    try:
        with pytest.raises(ConfigError, match=r"^resources_per_pserver must be what .* has, got \{'CPU': 3\}; or "):
            pservers.start(Job("train", 2), SECRET, Deadline(jobs.DEADLINE_S))
    finally:
        pservers.end()
