"""Takes the timestamps of inner steps: of steps that exchange nothing, or only sometimes."""

from __future__ import annotations

import tensorflow as tf

from tfps.errors import TfpsError
from tfps.exchange.interface import BucketSpec
from tfps.runtime.step_spans import Awaited, StepSpans
from tfps.runtime.transfers import UNDECLARED, Transfer

_NOTHING = BucketSpec(("inner steps",), "gather", 0, "uint8", 0)


class InnerStep(Transfer):
    """Messages of one graph, one per step: the step's number, its timestamps, and two per bucket of `awaited`."""

    exchanges = False

    def __init__(self, spans: StepSpans) -> None:
        super().__init__(UNDECLARED, _NOTHING)
        self.awaited: list[Awaited] = []
        self._spans = spans

    def collect(self, graph_run: tf.Tensor, data: tf.Tensor, indices: tf.Tensor, times: tf.Tensor) -> None:
        if self._spans.recorder.enabled:
            self._spans.inner_step(int(graph_run), times.numpy().tolist(), self.awaited)
        self._spans.count()

    def fail(self, error: TfpsError) -> None:
        """Nobody waits for it."""
