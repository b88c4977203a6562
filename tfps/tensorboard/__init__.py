"""Serves captures, their summaries and the page that shows them, from TensorBoard's own server.

The page gets a capture's first line as stored (docs/trace_format.md) and derives everything else from it.

Tested in tests/tensorboard/test_traceview.py and tests/tensorboard/test_answers.py.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache, partial
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

    def get_plugin_apps(self) -> dict[str, Function]:
        """Path -> its handler."""
        handlers: dict[str, Function] = {
            **{f"/{file.name}": partial(_static, file) for file in _STATIC.iterdir() if file.suffix in _TYPES},
            "/runs": self._serve_runs,
            "/capture": partial(self._serve, read_columns),
            "/summary": partial(self._serve, _summary),
        }
        return {path: wrappers.Request.application(handler) for path, handler in handlers.items()}

    def is_active(self) -> bool:
        """Whether there is a capture."""
        return bool(self._runs())

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """The tab's name and module."""
        return base_plugin.FrontendMetadata(
            es_module_path="/index.js", tab_name="Parameter servers", disable_reload=True
        )

    def _runs(self) -> dict[str, Path]:
        return _find(self._log_dir, time.monotonic() // _LOOK_S)

    def _serve_runs(self, request: wrappers.Request) -> wrappers.Response:
        return http_util.Respond(request, list(self._runs()), "application/json")

    def _serve(self, make: Callable[[Path], bytes], request: wrappers.Request) -> wrappers.Response:
        """Answers `?run=NAME` with the gzipped result of `make` for its file."""
        run = request.args.get("run", "")
        file = self._runs().get(run)
        if file is None:
            return http_util.Respond(request, f"there is no capture named {run!r}", "text/plain", code=404)
        try:
            content = _answer(make, file, file.stat().st_mtime_ns)
        except (TfpsError, OSError) as error:
            return http_util.Respond(request, str(error), "text/plain", code=400)
        return http_util.Respond(request, content, "application/json", content_encoding="gzip")


@lru_cache(_KEPT)
def _answer(make: Callable[[Path], bytes], file: Path, _written_ns: int) -> bytes:
    return gzip.compress(make(file), compresslevel=1)


def _summary(file: Path) -> bytes:
    return json.dumps(asdict(summarize(read(file))), allow_nan=False).encode()


def _static(file: Path, request: wrappers.Request) -> wrappers.Response:
    return http_util.Respond(request, file.read_bytes(), _TYPES[file.suffix])


@lru_cache(maxsize=1)
def _find(log_dir: Path, _moment: float) -> dict[str, Path]:
    """Name -> file, newest first. A name is the run's, after its folder below the log directory, if any.

    Cached until the moment is another.
    """
    return {
        (file.parent.parent.parent.relative_to(log_dir) / file.name.removesuffix(SUFFIX)).as_posix(): file
        for file in captures_below(log_dir)
    }
