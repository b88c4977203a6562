"""Trains a DLRM to foresee clicks. Its embeddings are rows of a table on the pservers, one for each id that comes.

The clicks are generated, by a model that is known: so the AUC that no model can exceed is known, too, and printed.

python examples/clicks.py                                       # one process, pserver inside it
tfps_launch --workers 2 --pservers 2 examples/clicks.py         # several processes on this machine
TFPS_MODE=async TFPS_UPDATE=server tfps_launch --workers 2 --pservers 2 examples/clicks.py
python examples/clicks.py --steps 150                           # a quick try

DLRM: https://arxiv.org/abs/1906.00091
"""

import argparse
import time

import keras
import numpy as np
import tensorflow as tf

import tfps

FEATURES, IDS, NUMBERS = 6, 20_000, 4  # sparse features, ids of each, dense features
DIM = 8  # floats of a row
TRAIN, TEST = 0, 1  # streams of clicks
TEST_BATCHES, TEST_ROWS = 32, 2048


class Clicks:
    """Streams of clicks without end: batch `number` of a stream is the same on all workers."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.seed = seed
        self.ids = random.integers(-(2**63), 2**63, (FEATURES, IDS))  # any 64 bits, as hashes of names are
        shares = np.arange(1, IDS + 1) ** -1.2  # Zipf: a few ids come all the time, most are rare
        self.below = np.cumsum(shares / shares.sum())
        # A click depends on each id, on each pair of ids and on the numbers.
        self.effects = random.normal(0, 0.7, (FEATURES, IDS))
        self.tastes = random.normal(0, 0.2, (FEATURES, IDS, 4))
        self.slopes = random.normal(0, 0.4, NUMBERS)

    def batch(self, stream: int, number: int, rows: int) -> tuple[np.ndarray, ...]:
        """Ids, int64 [rows, FEATURES]; numbers, float32 [rows, NUMBERS]; clicks and their probabilities, [rows, 1]."""
        random = np.random.default_rng((self.seed, stream, number))
        each, chosen = np.arange(FEATURES), np.searchsorted(self.below, random.random((rows, FEATURES)))
        numbers, tastes = random.normal(size=(rows, NUMBERS)), self.tastes[each, chosen]
        of_pairs = (tastes.sum(1) ** 2 - (tastes**2).sum(1)).sum(1) / 2  # all dot products of two tastes
        logits = self.effects[each, chosen].sum(1) + of_pairs + np.abs(numbers) @ self.slopes - 1.5
        probabilities = 1 / (1 + np.exp(-logits[:, None]))
        clicks = random.random((rows, 1)) < probabilities
        return self.ids[each, chosen], *(found.astype("float32") for found in (numbers, clicks, probabilities))

    def dataset(self, stream: int, batches: int, rows: int) -> tf.data.Dataset:
        """Batches of (ids, numbers) and clicks."""
        types = (tf.int64, tf.float32, tf.float32, tf.float32)

        def made(number: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], tf.Tensor]:
            found = tf.numpy_function(lambda number: self.batch(stream, number, rows), [number], types)
            widths = (FEATURES, NUMBERS, 1)
            ids, numbers, clicks = (tf.ensure_shape(f, (rows, w)) for f, w in zip(found, widths, strict=False))
            return (ids, numbers), clicks

        return tf.data.Dataset.range(batches).map(made).prefetch(4)


def build_model() -> keras.Model:
    ids, numbers = keras.Input((FEATURES,), dtype="int64"), keras.Input((NUMBERS,))
    optimizer = keras.optimizers.Adagrad(0.05, initial_accumulator_value=1e-6)  # of the table; 0.1 would be slow
    rows = tfps.layers.Embedding(None, DIM, optimizer=optimizer)(ids)  # [batch, FEATURES, DIM]
    bottom = keras.layers.Dense(32, activation="relu")(numbers)
    bottom = keras.layers.Dense(DIM, activation="relu")(bottom)
    vectors = keras.layers.Concatenate(axis=1)([keras.layers.Reshape((1, DIM))(bottom), rows])
    dots = keras.layers.Flatten()(keras.layers.Dot(axes=2)([vectors, vectors]))  # each pair of vectors twice
    pairs = np.flatnonzero(np.tri(FEATURES + 1, k=-1))
    top = keras.layers.Concatenate()([bottom, keras.ops.take(dots, pairs, axis=1)])
    top = keras.layers.Dense(64, activation="relu")(top)
    top = keras.layers.Dense(32, activation="relu")(top)
    model = keras.Model([ids, numbers], keras.layers.Dense(1)(top))
    auc = keras.metrics.AUC(num_thresholds=2000, from_logits=True, name="auc")
    model.compile(keras.optimizers.Adam(3e-3), keras.losses.BinaryCrossentropy(from_logits=True), metrics=[auc])
    return model


def best_auc(clicks: Clicks) -> float:
    """What a model would reach that knows the probabilities of the test data."""
    auc = keras.metrics.AUC(num_thresholds=2000)
    for number in range(TEST_BATCHES):
        _, _, clicked, probabilities = clicks.batch(TEST, number, TEST_ROWS)
        auc.update_state(clicked, probabilities)
    return float(auc.result())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=1024, help="of the whole job: each of two workers gets half")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    keras.utils.set_random_seed(options.seed)
    clicks = Clicks(options.seed)
    strategy = tfps.Strategy()
    with strategy.scope():
        model = build_model()

    is_first = strategy.rank == 0
    start = time.perf_counter()
    train = clicks.dataset(TRAIN, options.steps, options.batch_size)  # in one epoch: each batch is new
    model.fit(train, shuffle=False, verbose=2 if is_first else 0)
    seconds = time.perf_counter() - start
    _, auc = model.evaluate(clicks.dataset(TEST, TEST_BATCHES, TEST_ROWS), verbose=0)
    if is_first:
        print(
            f"test_auc={auc:.4f} best_auc={best_auc(clicks):.4f} (of generated clicks) workers={strategy.num_workers} "
            f"pservers={len(strategy.pservers)} mode={strategy.config.mode} seconds={seconds:.1f}"
        )
    strategy.close()


if __name__ == "__main__":
    main()
