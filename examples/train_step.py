"""Trains on the handwritten digits with a custom `train_step`, as in Keras' guide to customizing `fit`.

python examples/train_step.py                                  # one process, pserver inside it
tfps_launch --workers 2 --pservers 2 examples/train_step.py    # several processes on this machine
"""

import argparse
from typing import Any

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tfps


class Classifier(keras.Model):
    """Adds a penalty on large outputs to the loss, and tracks it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.penalty_tracker = keras.metrics.Mean(name="penalty")

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=outputs)  # the mean over this worker's rows
            penalty = 1e-3 * tf.reduce_mean(outputs**2)
            total = loss + penalty  # as in one process: tfps weighs gradients by rows
        gradients = tape.gradient(total, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        # Track means as they are, not times the number of replicas: each counts by the worker's rows.
        self.penalty_tracker.update_state(penalty)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            elif metric is not self.penalty_tracker:
                metric.update_state(y, outputs)
        return {metric.name: metric.result() for metric in self.metrics}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()

    keras.utils.set_random_seed(1)
    images, labels = load_digits(return_X_y=True)
    x = (images / 16).astype("float32")

    strategy = tfps.Strategy()
    with strategy.scope():  # everything that has variables
        inputs = keras.Input((64,))
        hidden = keras.layers.Dense(64, activation="relu")(inputs)
        model = Classifier(inputs=inputs, outputs=keras.layers.Dense(10)(hidden))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])

    # The last batch of an epoch has 32 rows, 16 for each of two workers; any other number would do as well.
    fit = model.fit(x[:1440], labels[:1440], batch_size=64, epochs=options.epochs, verbose=2 * (strategy.rank == 0))
    result = model.evaluate(x[1440:], labels[1440:], batch_size=64, verbose=0, return_dict=True)
    if strategy.rank == 0:
        print(f"penalty={fit.history['penalty'][-1]:.4f} loss={fit.history['loss'][-1]:.4f}")
        print(f"test_accuracy={result['accuracy']:.4f} workers={strategy.num_workers}")
    strategy.close()


if __name__ == "__main__":
    main()
