"""tfps: Keras 3 `fit` under `tfps.Strategy`, with its defaults; the place in the job comes from TFPS_... variables."""

from __future__ import annotations

import keras

import tfps
from tfps.worker.worker import Worker
from tools.peer_workers import keras_training
from tools.peer_workers.common import Clock, Sleeper, Work


class CountingClock(Clock):
    """Counts the frames with data that this worker sends and receives in the timed steps; not with `min_workers`."""

    def __init__(self, work: Work, strategy: tfps.Strategy) -> None:
        super().__init__(work, strategy.rank)
        exchange = strategy._runtime.exchange
        self._queues = exchange._queues if isinstance(exchange, Worker) else []
        self.counts = bool(self._queues)
        self.messages = 0

    def warm(self) -> None:
        super().warm()
        self.messages = -self._total()

    def drained(self) -> None:
        super().drained()
        self.messages += self._total()

    def _total(self) -> int:
        loads = [queue.load for queue in self._queues]
        return sum(load.sent_slices + load.received_slices for load in loads)


def main() -> None:
    work, sleeper = Work.from_environment(), Sleeper()
    strategy = tfps.Strategy()
    clock = CountingClock(work, strategy)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(keras_training.LEARNING_RATE)
        model = keras_training.build(keras, work, optimizer, sleeper, tfps.layers.Embedding)
    checksum = keras_training.fit(keras, model, work, work.batch * work.workers, clock)
    counted = {"messages": clock.messages / work.steps} if clock.counts else {}
    clock.report(checksum, overslept_s=sleeper.overslept_s, **counted)
    strategy.close()


if __name__ == "__main__":
    main()
