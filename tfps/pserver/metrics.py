"""Prometheus metrics of a pserver over HTTP: a scrape reads what it keeps anyway. docs/metrics.md lists the names."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from tfps.errors import ConfigError
from tfps.membership.members import State
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.guard import Newest, listen, why_not_listening
from tfps.pserver.server import ParameterServer
from tfps.types import Argument, Function

try:
    from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ConfigError(
        "metrics need the package prometheus-client, which is not installed: pip install 'tfps[metrics]'"
    ) from error

_REQUEST_TIMEOUT_S = 10.0  # a silent client holds a thread no longer
_MAX_REQUESTS = 16  # at a time; another one ends the oldest
_IDLE_S = 600.0  # then no job is expected: workers that start again, or wait for pservers, take less
_BACKLOG = 16  # connections that wait in the kernel

_PER_JOB = {  # fields of a status
    "workers": "Workers that a job has, or may have",
    "buckets": "Buckets that the current job has declared",
    "slices": "Slices of them on this pserver",
    "shard_bytes": "Size of these slices, without those of gathers",
    "open_slices": "Slices that some ranks have pushed and others not",
}
# Per member: field of its status, whether a total, help text.
_PER_RANK = (
    ("step", False, "Highest step that the rank has pushed"),
    ("received_bytes", True, "Payload of the rank's pushes"),
    ("received_slices", True, "Slices that the rank has pushed"),
    ("sent_bytes", True, "Payload of the replies sent to the rank"),
    ("sent_slices", True, "Replies sent to the rank"),
    ("queued_slices", False, "Replies to the rank that wait to be sent"),
    ("in_flight_bytes", False, "Payload sent to the rank and not acknowledged"),
    ("window_bytes", False, "What may be in flight to the rank"),
    ("awaited_slices", False, "Slices for which other ranks wait for this one"),
    ("wait_s", True, "Sum over slices, but those of the first step, of its push's delay after the first rank's"),
)
# Per table: field of its status, whether a total, help text.
_PER_TABLE = (
    ("rows", False, "Rows of the table on this pserver"),
    ("memory_bytes", False, "Memory of these rows, with slots, index and all else"),
    ("updates", True, "Updates of the table: steps, in mode async those of each rank"),
    ("asked_rows", True, "Rows that ranks have asked for"),
    ("early_rows", True, "Rows of these that were answered before the step before had been applied"),
    ("gradient_rows", True, "Rows with gradients of all ranks"),
    ("updated_rows", True, "Rows with gradients in an update, each once"),
    ("made_rows", True, "Rows that were made"),
    ("evicted_rows", True, "Rows that went because there were too many"),
    ("expired_rows", True, "Rows that went because they had no update for too long"),
    ("refused_rows", True, "Gradients of ids that had no row yet and did not get one"),
)
_MOST_TABLES = 1000  # that have labels of their own: each is a dozen series
_MOST_CHARACTERS = 200  # of a label


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, listening: socket.socket) -> None:
        self._open = Newest(_MAX_REQUESTS)  # connections that are served
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        # HTTPServer's server_bind also asks DNS for a name, which may take seconds.
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Argument, client_address: Argument) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Argument) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Argument, client_address: Argument) -> None:
        """Says nothing: a client that breaks off is no error of the pserver."""


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_TIMEOUT_S

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Logs nothing."""


class MetricsServer(Collector):
    """Answers `/metrics`, `/healthz` and `/busy` on a thread "tfps-metrics" until `stop`. Port 0 picks a free one.

    Args:
        idle_s: seconds without a job until the pserver is no longer busy, as far as those who ask can tell.
    """

    def __init__(self, server: ParameterServer, host: str, port: int, *, idle_s: float = _IDLE_S) -> None:
        self._server = server
        self._idle_s, self._used_s = idle_s, time.monotonic()
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        self._metrics = make_wsgi_app(registry)
        try:
            self._http = _Server(listen(host, port, backlog=_BACKLOG))
        except OSError as error:
            why = why_not_listening(error, port)
            raise ConfigError(f"cannot listen on {host}:{port} for metrics: {why}") from error
        self._http.set_app(self._answer)
        self.port = int(self._http.server_port)
        self._thread = threading.Thread(target=self._http.serve_forever, name="tfps-metrics", daemon=True)
        self._thread.start()

    def collect(self) -> Iterator[Metric]:
        status = self._server.status()
        yield InfoMetricFamily("tfps", "Version of tfps", {"version": status.version})
        members = GaugeMetricFamily("tfps_members", "Members of the current job by state", labels=["state"])
        for state in State:
            members.add_metric([state.value], sum(member.state == state.value for member in status.members))
        yield members
        for field, text in _PER_JOB.items():
            yield GaugeMetricFamily(f"tfps_{field}", text, getattr(status, field))
        for field, total, text in _PER_RANK:
            name = f"tfps_{field}" if field != "wait_s" else "tfps_aggregate_wait_seconds"
            family = (CounterMetricFamily if total else GaugeMetricFamily)(name, text, labels=["rank"])
            for member in status.members:
                family.add_metric([str(member.rank)], getattr(member, field))
            yield family
        tables = _labelled(status.tables)
        for field, total, text in _PER_TABLE:
            family = (CounterMetricFamily if total else GaugeMetricFamily)(
                f"tfps_table_{field}", text, labels=["table"]
            )
            for label, some in tables.items():
                family.add_metric([label], sum(getattr(table, field) for table in some))
            yield family
        yield GaugeMetricFamily("tfps_view_generation", "Number of the current job's view", status.generation)
        yield GaugeMetricFamily("tfps_view_workers", "Workers that take part in the current job", len(status.present))
        yield CounterMetricFamily("tfps_lost_workers", "Workers the current job went on without", status.lost_workers)
        yield CounterMetricFamily("tfps_joined_workers", "Workers that joined it under way", status.joined_workers)
        yield CounterMetricFamily("tfps_jobs", "Jobs that have begun", status.jobs)
        failures = CounterMetricFamily("tfps_job_failures", "Jobs that have failed", labels=["error"])
        refused = CounterMetricFamily("tfps_rpc_errors", "Calls that were refused", labels=["rpc", "error"])
        for each in status.errors:
            if each.where == "job":
                failures.add_metric([each.error], each.count)
            else:
                refused.add_metric([each.where, each.error], each.count)
        yield failures
        yield refused

    def stop(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def _busy(self) -> bool:
        now_s, has_job = time.monotonic(), self._server.status().state not in ("idle", "failed")
        if has_job:
            self._used_s = now_s
        return has_job or now_s < self._used_s + self._idle_s

    def _answer(self, environment: dict[str, object], start_response: Function) -> Iterable[bytes]:
        path = environment.get("PATH_INFO", "")
        if path == "/metrics":
            found: Iterable[bytes] = self._metrics(environment, start_response)
            return found
        status, text = "404 Not Found", b"/metrics, /healthz or /busy\n"
        if path in ("/healthz", "/busy"):
            status, text = "200 OK", b"ok\n"
            if self._server.stopped:
                status, text = "503 Service Unavailable", b"stopping\n"
            elif path == "/busy" and not self._busy():
                status, text = "503 Service Unavailable", b"idle\n"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text)))])
        return [text]


def _labelled(tables: Sequence[pb.TableStatus]) -> dict[str, list[pb.TableStatus]]:
    """Tables by their label: the name, with the bucket's number if another one has the same; the last ones together."""
    found: dict[str, list[pb.TableStatus]] = {}
    for table in tables[:_MOST_TABLES]:
        name = table.name[:_MOST_CHARACTERS]
        found[f"{name} (bucket {table.bucket})" if name in found else name] = [table]
    if more := tables[_MOST_TABLES:]:
        found["other tables"] = list(more)
    return found
