"""A worker of Elastic Horovod: horovod_worker.py FOLDER UNITS ROW_MS, for the Python of tools/peers.py.

As Horovod's own elastic example: a state of model, optimizer and step, committed every 10 steps. Each worker takes its
part of the same global batch, whatever their number, as under tfps.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time
from typing import TYPE_CHECKING

import horovod.tensorflow as hvd  # type: ignore[import-not-found]
import tensorflow as tf

from tools.recovery import training
from tools.recovery.job import TIME

if TYPE_CHECKING:
    from tfps.types import Argument, Value

COMMIT_STEPS = 10


def main() -> None:
    """The program."""
    folder, host = pathlib.Path(sys.argv[1]), os.environ["HOROVOD_HOSTNAME"]
    units, row_s = int(sys.argv[2]), float(sys.argv[3]) / 1e3
    (folder / f"{host}.pid").write_text(str(os.getpid()))
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    model = training.build(tf.keras, units, row_s)
    optimizer = tf.keras.optimizers.legacy.SGD(training.LEARNING_RATE)  # Horovod 0.28 calls its variables()
    rows = training.rows(units)

    def gradients(part: Value, together: bool) -> Value:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(part, training=True) - part))
        tape = hvd.DistributedGradientTape(tape) if together else tape
        return tape.gradient(loss, model.trainable_variables)

    @tf.function(input_signature=[tf.TensorSpec([None, units], tf.float32)])
    def step(part: Value) -> None:
        optimizer.apply_gradients(zip(gradients(part, True), model.trainable_variables, strict=True))

    optimizer.apply_gradients(zip(gradients(rows[:1], False), model.trainable_variables, strict=True))  # makes slots

    @hvd.elastic.run
    def train(state: Argument) -> None:
        part = rows[hvd.rank() :: hvd.size()]
        with (folder / f"{host}.times").open("ab", buffering=0) as times:
            while True:
                step(part)
                state.step += 1
                times.write(TIME.pack(0, state.step, time.monotonic()))
                if state.step % COMMIT_STEPS == 0:
                    state.commit()

    train(hvd.elastic.TensorFlowKerasState(model, optimizer, step=0))


if __name__ == "__main__":
    main()
