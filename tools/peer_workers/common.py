"""What all peers' workers share: the work, the clock, and the lines that tools/peer_runs.py reads.

For Python 3.8, without any package.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfps.types import Argument, Json, Value

MARK = "tfps-peer: "
WORK_VARIABLE = "TFPS_PEER_WORK"
STAY_S = 120.0


@dataclass(frozen=True)
class Work:
    """What every peer trains, each worker with a batch of its own.

    Without `layers` an MLP: `depth` dense layers of `width` on inputs of `width`, and one of `classes`. With `layers`
    they sleep instead of computing. With `rows`, and tfps alone, a recommender that is one table: each of its rows has
    `classes` floats, and the mean of an example's `width` rows are its logits.
    """

    warmup_steps: int
    steps: int
    workers: int = 2
    servers: int = 2
    batch: int = 4
    width: int = 2048
    depth: int = 3
    classes: int = 10
    layers: tuple[tuple[str, float, float, int], ...] = ()  # name, seconds forward, backward, number of items
    rows: int = 0

    @property
    def items(self) -> int:
        """Float32 parameters of the model."""
        if self.layers:
            return sum(items for _, _, _, items in self.layers)
        if self.rows:
            return self.rows * self.classes
        return self.depth * (self.width + 1) * self.width + (self.width + 1) * self.classes

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> Work:
        content = json.loads(os.environ[WORK_VARIABLE])
        content["layers"] = tuple(tuple(layer) for layer in content["layers"])
        return cls(**content)


class Clock:
    """Times the steps of one worker, and tells tools/peer_runs.py when the timed ones begin and end.

    A step has ended when its loss is on the host. That takes the forward pass, which takes all weights of the step
    before; so whatever a framework does asynchronously is in the time from one end to the next.
    """

    def __init__(self, work: Work, rank: int) -> None:
        self._work, self._rank = work, rank
        self._ends: list[float] = []
        self._periods: list[float] = []
        self._loss = 0.0
        self._since = 0.0
        self._drained_s = 0.0

    def step_ended(self, loss: Value) -> None:
        """Call it when the step's loss is known; reading `loss` waits for it."""
        self._loss = float(loss)
        self._ends.append(time.perf_counter())
        if len(self._ends) == self._work.warmup_steps:
            self.warm()
        elif len(self._ends) > self._work.warmup_steps:
            self._periods.append(self._ends[-1] - self._ends[-2])

    def warm(self) -> None:
        """The timed steps begin."""
        self._since = time.perf_counter()
        self._say({"event": "warm"})

    def epoch_ended(self, loss: Value, seconds: float, steps: int) -> None:
        """For peers that do not say when a single step ends: `steps` took `seconds`."""
        self._loss = float(loss)
        self._periods.append(seconds / steps)

    @property
    def is_over(self) -> bool:
        """All steps have ended; their updates may still be under way."""
        return len(self._ends) == self._work.warmup_steps + self._work.steps

    def drained(self) -> None:
        """Call it when all updates of the last step are done, too."""
        self._drained_s = time.perf_counter() - self._since
        self._say({"event": "done"})

    def report(self, checksum: float, **more: Argument) -> None:
        """Says what was measured, and stays until somebody ends this process.

        Args:
            checksum: of all weights; workers must agree on it.
            more: further figures.
        """
        self._say(
            {
                "event": "result",
                "rank": self._rank,
                "periods_s": self._periods,
                "drained_s": self._drained_s,
                "loss": self._loss,
                "checksum": checksum,
                **more,
            }
        )
        threading.Event().wait(STAY_S)

    def _say(self, content: Mapping[str, Json]) -> None:
        if self._rank == 0 or content["event"] == "result":
            say(content)


class Sleeper:
    """Sleeps for layers, and knows by how much it overslept."""

    def __init__(self) -> None:
        self.overslept_s = 0.0

    def __call__(self, seconds: float) -> None:
        since = time.perf_counter()
        time.sleep(seconds)
        self.overslept_s += time.perf_counter() - since - seconds


def say(content: Json) -> None:
    """One line for tools/peer_runs.py; at once, because others write to the same stream."""
    sys.stdout.write("\n" + MARK + json.dumps(content) + "\n")
    sys.stdout.flush()
