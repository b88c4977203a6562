"""Trains a DLRM, a model that recommends, whose embeddings are rows of a table on the pservers.

The clicks are generated. A known model draws them, so the best AUC that any model can reach is known, too.

python examples/clicks.py                                       # one process, pserver inside it
tfps_launch --workers 2 --pservers 2 examples/clicks.py         # several processes on this machine
TFPS_MODE=async TFPS_UPDATE=server tfps_launch --workers 2 --pservers 2 examples/clicks.py
python examples/clicks.py --steps 60                            # a quick try

DLRM: https://arxiv.org/abs/1906.00091
"""

import argparse
import time

import keras
import numpy as np
import tensorflow as tf

import tfps

FEATURES, IDS, NUMBERS = 6, 20_000, 4  # sparse features, ids of each, dense features
DIM = 16  # floats of a row
TRAIN, TEST = 0, 1


class Clicks:
    """Shows and clicks without end. Batch `number` of a stream is the same on all workers."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.seed = seed
        self.ids = random.integers(-(2**63), 2**63, (FEATURES, IDS))  # as if names had been hashed: any 64 bits
        shares = 1 / np.arange(1, IDS + 1) ** 1.05  # Zipf: a few ids are in most rows, most are rare
        self.below = np.cumsum(shares / shares.sum())
        # What is hidden from the model that is trained: a click depends on each id, on pairs of ids and on the numbers.
        self.effects = random.normal(0, 0.5, (FEATURES, IDS))
        self.tastes = random.normal(0, 0.35, (FEATURES, IDS, 4))
        self.slopes = random.normal(0, 0.4, NUMBERS)

    def batch(self, stream: int, number: int, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Ids, int64 [rows, FEATURES], numbers, float32 [rows, NUMBERS], clicks and their probabilities, [rows, 1]."""
        random = np.random.default_rng((self.seed, stream, number))
        chosen = np.searchsorted(self.below, random.random((rows, FEATURES)))
        of = np.arange(FEATURES)
        numbers = random.normal(size=(rows, NUMBERS))
        tastes = self.tastes[of, chosen]
        pairs = (tastes.sum(1) ** 2 - (tastes**2).sum(1)).sum(1) / 2  # the dot products of all pairs
        logits = -1.5 + self.effects[of, chosen].sum(1) + pairs + np.abs(numbers) @ self.slopes
        probabilities = 1 / (1 + np.exp(-logits[:, None]))
        clicks = random.random((rows, 1)) < probabilities
        return self.ids[of, chosen], *(each.astype("float32") for each in (numbers, clicks, probabilities))


def build_model(rate: float) -> keras.Model:
    ids, numbers = keras.Input((FEATURES,), dtype="int64"), keras.Input((NUMBERS,))
    optimizer = keras.optimizers.Adagrad(rate, initial_accumulator_value=1e-6)
    rows = tfps.layers.Embedding(None, DIM, optimizer=optimizer)(ids)  # [batch, FEATURES, DIM]
    bottom = keras.layers.Dense(32, activation="relu")(numbers)
    bottom = keras.layers.Dense(DIM, activation="relu")(bottom)
    vectors = keras.layers.Concatenate(axis=1)([rows, keras.layers.Reshape((1, DIM))(bottom)])
    dots = keras.layers.Flatten()(keras.layers.Dot(axes=2)([vectors, vectors]))
    count = FEATURES + 1
    pairs = [first * count + second for first in range(count) for second in range(first)]
    top = keras.layers.Concatenate()([bottom, keras.ops.take(dots, pairs, axis=1)])
    top = keras.layers.Dense(64, activation="relu")(top)
    top = keras.layers.Dense(32, activation="relu")(top)
    return keras.Model([ids, numbers], keras.layers.Dense(1)(top))


def dataset(clicks: Clicks, stream: int, batches: int, rows: int) -> tf.data.Dataset:
    """So many batches of a stream: (ids, numbers), clicks."""
    types = (tf.int64, tf.float32, tf.float32, tf.float32)

    def made(number: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], tf.Tensor]:
        ids, numbers, clicked, _ = tf.numpy_function(lambda n: clicks.batch(stream, n, rows), [number], types)
        shaped = [tf.ensure_shape(each, (rows, n)) for each, n in ((ids, FEATURES), (numbers, NUMBERS), (clicked, 1))]
        return (shaped[0], shaped[1]), shaped[2]

    return tf.data.Dataset.range(batches).map(made).prefetch(4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="each with new rows")
    parser.add_argument("--batch-size", type=int, default=1024, help="of the whole job: each of two workers gets half")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    parser.add_argument("--seed", type=int, default=1, help="of clicks and weights")
    options = parser.parse_args()

    keras.utils.set_random_seed(options.seed)
    clicks = Clicks(options.seed)
    strategy = tfps.Strategy()
    with strategy.scope():
        model = build_model(options.rate)
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        auc = keras.metrics.AUC(num_thresholds=2000, from_logits=True, name="auc")
        model.compile(keras.optimizers.Adagrad(options.rate, initial_accumulator_value=1e-6), loss, metrics=[auc])

    is_first = strategy.rank == 0
    start = time.perf_counter()
    model.fit(dataset(clicks, TRAIN, options.steps, options.batch_size), verbose=2 if is_first else 0)
    seconds = time.perf_counter() - start
    _, reached = model.evaluate(dataset(clicks, TEST, 32, 2048), verbose=0)
    if is_first:
        best = keras.metrics.AUC(num_thresholds=2000)
        for number in range(32):
            _, _, clicked, probabilities = clicks.batch(TEST, number, 2048)
            best.update_state(clicked, probabilities)
        print(f"clicks: generated; no model can reach more than best_auc={float(best.result()):.4f}")
        print(
            f"test_auc={reached:.4f} workers={strategy.num_workers} pservers={len(strategy.pservers)} "
            f"steps={options.steps} seconds={seconds:.1f}"
        )
    strategy.close()


if __name__ == "__main__":
    main()
