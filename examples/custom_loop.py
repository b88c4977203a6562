"""Trains a small network on the handwritten digits with a custom training loop instead of `fit`.

python examples/custom_loop.py                                  # one process, pserver inside it
tfps_launch --workers 2 --pservers 2 examples/custom_loop.py    # several processes on this machine
"""

import argparse

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tfps

BATCH_SIZE = 64  # of the whole job: each of two workers gets 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()

    keras.utils.set_random_seed(1)
    images, labels = load_digits(return_X_y=True)
    dataset = tf.data.Dataset.from_tensor_slices(((images / 16).astype("float32"), labels))
    train = dataset.take(1472).shuffle(1472, seed=1).batch(BATCH_SIZE)
    test = dataset.skip(1472).batch(BATCH_SIZE, drop_remainder=True)

    strategy = tfps.Strategy()
    with strategy.scope():  # everything that has variables
        model = keras.Sequential(
            [keras.layers.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        )
        optimizer = keras.optimizers.Adam(3e-3)
        optimizer.build(model.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
            # Gradients are summed over workers: divide by the global batch size.
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH_SIZE)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def distributed_train_step(batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(train_step, args=batch), axis=None)

    @tf.function
    def distributed_test_step(batch: tuple[tf.Tensor, tf.Tensor]) -> None:
        strategy.run(lambda x, y: accuracy.update_state(y, model(x, training=False)), args=batch)

    batches = strategy.experimental_distribute_dataset(train)  # each worker takes its part of every batch
    for epoch in range(options.epochs):
        losses = [distributed_train_step(batch) for batch in batches]
        if strategy.rank == 0:
            print(f"epoch {epoch + 1}: loss {float(tf.reduce_mean(losses)):.4f}")

    for batch in strategy.experimental_distribute_dataset(test):
        distributed_test_step(batch)
    result = float(accuracy.result())  # over all workers; every worker has to call it
    if strategy.rank == 0:
        print(f"test_accuracy={result:.4f} workers={strategy.num_workers}")
    strategy.close()


if __name__ == "__main__":
    main()
