"""Serves captures, their summaries and the page that shows them, from TensorBoard's own server.

The page gets a capture's first line as stored (docs/trace_format.md) and derives everything else from it.

Tested in tests/tensorboard/test_traceview.py.
"""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from tfps.errors import TfpsError
from tfps.trace.capture_file import SUFFIX, captures_below, read, read_columns
from tfps.trace.summary import summarize
from tfps.types import Function

_STATIC = Path(__file__).resolve().parent / "static"
_TYPES = {".js": "application/javascript", ".css": "text/css"}
_KEPT = 8  # cached answers, of the captures viewed last
_LOOK_S = 2.0  # how long a list of runs is cached


class ParameterServersPlugin(base_plugin.TBPlugin):
    """Shows `<log_dir>/**/plugins/tfps/<run>.trace.json.gz`. Requests come on several threads."""

    plugin_name = "tfps"

    def __init__(self, context: base_plugin.TBContext) -> None:
        super().__init__(context)
        self._log_dir = Path(context.logdir or ".")
        self._lock = threading.Lock()  # guards all below
        self._answers: OrderedDict[tuple[str, str, int], bytes] = OrderedDict()
        self._runs: dict[str, Path] = {}
        self._looked_s = float("-inf")

    def get_plugin_apps(self) -> dict[str, Function]:
        """Path -> its handler."""
        static = {f"/{file.name}": _static(file) for file in _STATIC.iterdir() if file.suffix in _TYPES}
        return {
            **static,
            "/runs": wrappers.Request.application(self._serve_runs),
            "/capture": self._serving(_columns),
            "/summary": self._serving(_summary),
        }

    def is_active(self) -> bool:
        """Whether there is a capture."""
        return bool(self.runs())

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """The tab's name and module."""
        return base_plugin.FrontendMetadata(
            es_module_path="/index.js", tab_name="Parameter servers", disable_reload=True
        )

    def runs(self) -> dict[str, Path]:
        """Name -> file, newest first. A name is the run's, after its folder below the log directory, if any."""
        with self._lock:
            if time.monotonic() - self._looked_s > _LOOK_S:
                self._runs = _find(self._log_dir)
                self._looked_s = time.monotonic()
            return self._runs

    def _serve_runs(self, request: wrappers.Request) -> wrappers.Response:
        return http_util.Respond(request, list(self.runs()), "application/json")

    def _serving(self, make: Callable[[Path], bytes]) -> Function:
        """Answers `?run=NAME` with the gzipped result of `make` for its file."""

        def serve(request: wrappers.Request) -> wrappers.Response:
            run = request.args.get("run", "")
            file = self.runs().get(run)
            if file is None:
                return http_util.Respond(request, f"there is no capture named {run!r}", "text/plain", code=404)
            try:
                content = self._answer(make, file)
            except (TfpsError, OSError) as error:
                return http_util.Respond(request, str(error), "text/plain", code=400)
            return http_util.Respond(request, content, "application/json", content_encoding="gzip")

        return wrappers.Request.application(serve)

    def _answer(self, make: Callable[[Path], bytes], file: Path) -> bytes:
        key = make.__name__, str(file), file.stat().st_mtime_ns
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
                return self._answers[key]
        content = make(file)
        with self._lock:
            self._answers[key] = content
            while len(self._answers) > _KEPT:
                self._answers.popitem(last=False)
        return content


def _columns(file: Path) -> bytes:
    return gzip.compress(read_columns(file), compresslevel=1)


def _summary(file: Path) -> bytes:
    return gzip.compress(json.dumps(summarize(read(file)).to_json(), allow_nan=False).encode())


def _static(file: Path) -> Function:
    def serve(request: wrappers.Request) -> wrappers.Response:
        return http_util.Respond(request, file.read_bytes(), _TYPES[file.suffix])

    return wrappers.Request.application(serve)


def _find(log_dir: Path) -> dict[str, Path]:
    return {
        (file.parent.parent.parent.relative_to(log_dir) / file.name.removesuffix(SUFFIX)).as_posix(): file
        for file in captures_below(log_dir)
    }
