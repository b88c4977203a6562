"""`tfps_doctor`: examines this host, then all pservers at the same time, then the bandwidth to one after the other."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from tfps import __version__
from tfps.config import Security
from tfps.doctor import host
from tfps.doctor.pserver import Client, Visit, compare_bandwidths
from tfps.doctor.report import Check, Group, Report, show
from tfps.errors import ConfigError
from tfps.launch.cluster_spec import Cluster, locate
from tfps.launch.remote import visible_gpus
from tfps.threads import DaemonPool
from tfps.wire.measuring import SECONDS
from tfps.wire.shared_memory import Arena

_AT_ONCE = 32  # pservers
_T = TypeVar("_T")
HOW = "none given: tfps_doctor HOST:PORT ..., TFPS_PSERVERS or TF_CONFIG name them"
_MAX_TIMEOUT_S = 600.0


def examine(
    addresses: Sequence[str] = (),
    *,
    token_file: str = "",
    timeout_s: float = 5.0,
    seconds: float = SECONDS,
    ask_tensorflow: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Report:
    """Checks this host and the pservers, by default those that a strategy would find in `environment`.

    Each answer of a pserver may take `timeout_s`, each measurement of bandwidth takes `seconds`.
    """
    environment = os.environ if environment is None else environment
    with contextlib.ExitStack() as stack:
        logger = logging.getLogger("tfps")
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)  # the report has what log lines would say
        found = host.versions()
        asked = None
        if ask_tensorflow and any(each.name == "tensorflow" and each.status in ("ok", "warning") for each in found):
            asked = stack.enter_context(host.ask_tensorflow())
            stack.callback(asked.kill)
        config, check = host.settings(environment)
        found.append(check)
        config = dataclasses.replace(config, token_file=token_file or config.token_file)
        security, cluster, wrong = Security(), Cluster(), []
        try:  # what a worker would take from its environment
            security = Security.of_worker(config, environment)
        except ConfigError as error:
            wrong.append(Check("security", "failed", "settings do not fit together", str(error), "malformed"))
        try:
            cluster = locate(list(addresses) or None, environment)
        except ConfigError as error:
            wrong.append(Check("pservers", "failed", "cannot be told", str(error), "malformed"))
        found += [host.token(security), host.tls(security), *wrong]
        peers = len(cluster.pservers) + (cluster.workers or 0)
        found += [host.open_files(peers), host.memory(), host.shared_memory(config), host.sockets()]
        arena: Arena | None = None
        if config.shared_memory:
            with contextlib.suppress(OSError):
                arena = stack.enter_context(contextlib.closing(Arena()))
        client = Client(config, security, cluster, arena, timeout_s)
        visits = [] if wrong else [Visit(address, client) for address in cluster.pservers]
        for visit in visits:
            stack.callback(visit.close)
        pool = DaemonPool(_AT_ONCE, "tfps-doctor-look")
        stack.callback(pool.shutdown, wait=False)
        for looking in [pool.submit(visit.look) for visit in visits]:
            _wait(looking)
        # TensorFlow ends before it could disturb the measurements.
        found.append(host.gpus(len(visible_gpus(environment)), asked))
        busy = any(visit.busy for visit in visits)  # its workers may use the links to the others, too
        measured = [_wait(pool.submit(visit.measure, busy, seconds)) for visit in visits]  # they share this host's link
        rates = {visit.address: rate for visit, rate in zip(visits, measured, strict=True) if rate is not None}
        compared = compare_bandwidths(rates)
        if not cluster.pservers and not wrong:
            found.append(Check("pservers", "skipped", HOW))
        groups = [Group(f"this host ({socket.gethostname()})", found)]
        for visit in visits:
            if visit.address in compared:
                visit.checks.append(compared[visit.address])
            groups.append(Group(f"pserver {visit.address}", visit.checks, visit.address))
        return Report(socket.gethostname(), groups)


def _wait(future: Future[_T]) -> _T:
    """The result, in short waits: Ctrl-C may come to another thread, and Python notices it between two of them."""
    while not wait([future], 0.5).done:
        pass
    return future.result()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0 if a job would run, 1 if not, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="tfps_doctor",
        description="Checks whether a tfps job would run here: this host, and the pservers as seen from it. Does not "
        "disturb a job that runs. Exit code: 0 if a job would run, 1 if not; warnings count as 0.",
    )
    add = parser.add_argument
    add("--version", action="version", version=f"%(prog)s {__version__}")
    text = "pservers (default: those of TFPS_PSERVERS or TF_CONFIG; without any, only this host is checked)"
    add("addresses", nargs="*", metavar="HOST:PORT", help=text)
    add("--json", action="store_true", help="print one JSON object (docs/doctor.md has its keys)")
    add("--token-file", default="", metavar="FILE", help="file with the job token (default: TFPS_TOKEN_FILE)")
    text = "seconds to wait for each answer (default: %(default)s)"
    add("--timeout", dest="timeout_s", type=float, default=5.0, metavar="S", help=text)
    text = "do not import TensorFlow to count its GPUs, which takes seconds"
    add("--no-tensorflow", dest="ask_tensorflow", action="store_false", help=text)
    given = vars(parser.parse_args(arguments))
    as_json, timeout_s = given.pop("json"), given["timeout_s"]
    if not 0 < timeout_s <= _MAX_TIMEOUT_S:
        parser.error(f"--timeout must be a number of seconds up to {_MAX_TIMEOUT_S:.0f}, got {timeout_s}")
    try:
        report = examine(**given)
        if as_json:
            sys.stdout.write(json.dumps(report.as_json(), indent=1) + "\n")
        else:
            show(report)
    except KeyboardInterrupt:
        return 130
    return 0 if report.healthy else 1
