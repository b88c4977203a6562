"""Makes the report: this host, then all pservers at the same time, then the bandwidth to one after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from tfps.config import Config, Security
from tfps.doctor import bandwidth, files, gpus, host, versions
from tfps.doctor.pserver import Client, Visit
from tfps.doctor.report import Check, Group, Report
from tfps.errors import ConfigError
from tfps.launch.cluster_spec import Cluster, locate
from tfps.launch.gpus import visible_gpus
from tfps.threads import DaemonPool
from tfps.wire.measuring import SECONDS
from tfps.wire.shared_memory import Arena

_AT_ONCE = 32  # pservers
_WAIT_S = 0.5
_T = TypeVar("_T")
HOW = "none given: tfps_doctor HOST:PORT ..., TFPS_PSERVERS or TF_CONFIG name them"


def examine(
    addresses: Sequence[str] = (),
    *,
    token_file: str = "",
    timeout_s: float = 5.0,
    seconds: float = SECONDS,
    ask_tensorflow: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Report:
    """Checks this host and the pservers.

    Args:
        addresses: of pservers; empty: those that a strategy would find in `environment`.
        token_file: instead of TFPS_TOKEN_FILE.
        timeout_s: for each answer of a pserver.
        seconds: of each measurement of bandwidth.
        ask_tensorflow: for the GPUs that it sees, if it is installed.
        environment: None: this process's.
    """
    environment = os.environ if environment is None else environment
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet())
        found = versions.checks()
        asked: gpus.TensorFlowGpus | None = None
        if ask_tensorflow and any(each.name == "tensorflow" and each.status in ("ok", "warning") for each in found):
            asked = gpus.TensorFlowGpus()
            stack.callback(asked.close)
        config, check = files.settings(environment)
        found.append(check)
        config = dataclasses.replace(config, token_file=token_file or config.token_file)
        security, cluster, wrong = _worker(config, addresses, environment)
        found += [files.token(security), files.tls(security), *wrong]
        peers = len(cluster.pservers) + (cluster.workers or 0)
        found += [host.open_files(peers), host.memory(), host.shared_memory(config)]
        client = Client(config, security, cluster, _arena(config, stack), timeout_s)
        visits = [] if wrong else [Visit(address, client) for address in cluster.pservers]
        for visit in visits:
            stack.callback(visit.close)
        pool = DaemonPool(_AT_ONCE, "tfps-doctor-look")
        stack.callback(pool.shutdown, wait=False)
        _look(pool, visits)
        count = len(visible_gpus(environment))
        found.append(
            gpus.without_tensorflow(count) if asked is None else asked.check(count)
        )  # before it could disturb:
        _measure(pool, visits, seconds)
        if not cluster.pservers and not wrong:
            found.append(Check("pservers", "skipped", HOW))
        groups = [Group(f"this host ({socket.gethostname()})", found)]
        groups += [Group(f"pserver {visit.address}", visit.checks, visit.address) for visit in visits]
        return Report(socket.gethostname(), groups)


def _worker(
    config: Config, addresses: Sequence[str], environment: Mapping[str, str]
) -> tuple[Security, Cluster, list[Check]]:
    """What a worker would take from its environment, and what is wrong with that."""
    wrong = []
    security, cluster = Security(), Cluster()
    try:
        security = Security.of_worker(config, environment)
    except ConfigError as error:
        wrong.append(Check("security", "failed", "settings do not fit together", str(error), "malformed"))
    try:
        cluster = locate(list(addresses) or None, environment)
    except ConfigError as error:
        wrong.append(Check("pservers", "failed", "cannot be told", str(error), "malformed"))
    return security, cluster, wrong


def _look(pool: DaemonPool, visits: Sequence[Visit]) -> None:
    """At all pservers at the same time."""
    for future in [pool.submit(visit.look) for visit in visits]:
        _wait(future)


def _measure(pool: DaemonPool, visits: Sequence[Visit], seconds: float) -> None:
    """The bandwidth to one pserver after the other: they share this host's link."""
    busy = any(visit.busy for visit in visits)  # its workers may use the links to the others, too
    measured = {}
    for visit in visits:
        if (rates := _wait(pool.submit(visit.measure, busy, seconds))) is not None:
            measured[visit.address] = rates
    checks = bandwidth.compared(measured)
    for visit in visits:
        if visit.address in checks:
            visit.checks.append(checks[visit.address])


def _wait(future: Future[_T]) -> _T:
    """The result, in short waits: Ctrl-C may come to another thread, and Python notices it between two of them."""
    while not wait([future], _WAIT_S).done:
        pass
    return future.result()


def _arena(config: Config, stack: contextlib.ExitStack) -> Arena | None:
    """Memory to offer to pservers."""
    if not config.shared_memory:
        return None
    try:
        arena = Arena()
    except OSError:
        return None
    stack.callback(arena.close)
    return arena


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps log lines from standing between the lines of the report, which has what they say."""
    logger = logging.getLogger("tfps")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
