"""Trains with a pserver in the same process and with an embedded one, and fails without closing or stopping any."""

from __future__ import annotations

import tensorflow as tf

import tfps
from tfps.pserver.server import ParameterServer


def main() -> None:
    server = ParameterServer("127.0.0.1", 0, workers=1)
    strategies = [tfps.Strategy([server.address]), tfps.Strategy()]
    iterators = []
    for strategy in strategies:
        with strategy.scope():
            variable = tf.Variable(1.0, trainable=True)
        total = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", variable))  # noqa: B023
        assert float(total) == 1.0
        iterators.append(iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(100))))
        next(iterators[-1])
    raise RuntimeError("the script failed")


if __name__ == "__main__":
    main()
