"""Trains a small text model: an embedding, whose gradient is sparse, tells two kinds of sentences apart.

The sentences are generated: only the topic words tell the kinds apart, not the words around them.

python examples/text.py                                         # one process, pserver inside it
tfps_launch --workers 2 --pservers 2 examples/text.py           # several processes on this machine
"""

import argparse
import random

import keras
import numpy as np
import tensorflow as tf

import tfps

BATCH_SIZE = 32  # of the whole job: each of two workers gets 16
ABOUT = {
    0: ["bread", "soup", "cheese", "apple", "kitchen", "dinner", "oven", "honey"],
    1: ["engine", "wheel", "road", "bridge", "train", "station", "driver", "tunnel"],
}
AROUND = ["the", "a", "my", "your", "some", "this", "old", "new", "small", "big", "is", "was", "near", "with", "and"]


def sentences(count: int) -> tuple[list[str], np.ndarray]:
    """Returns texts of 12 words, three of them topic words, and the label of each."""
    choose = random.Random(1)
    labels = [choose.randrange(2) for _ in range(count)]
    texts = []
    for label in labels:
        words = choose.choices(AROUND, k=9) + choose.choices(ABOUT[label], k=3)
        choose.shuffle(words)
        texts.append(" ".join(words))
    return texts, np.array(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--sentences", type=int, default=1280)
    options = parser.parse_args()

    keras.utils.set_random_seed(1)  # the same on all workers, so that they shuffle alike
    texts, labels = sentences(options.sentences)
    vectorize = keras.layers.TextVectorization(max_tokens=100, output_sequence_length=12)
    vectorize.adapt(texts)
    words = vectorize(tf.constant(texts)).numpy()  # [sentences, 12] numbers of words
    train = len(words) * 3 // 4 // BATCH_SIZE * BATCH_SIZE

    strategy = tfps.Strategy()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((12,), dtype="int32"),
                keras.layers.Embedding(vectorize.vocabulary_size(), 16),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dense(1, activation="sigmoid"),
            ]
        )
        model.compile("adam", "binary_crossentropy", metrics=["accuracy"])

    is_first = strategy.rank == 0
    fit = {"batch_size": BATCH_SIZE, "epochs": options.epochs, "verbose": 2 if is_first else 0}
    model.fit(words[:train], labels[:train], **fit)
    _, accuracy = model.evaluate(words[train:], labels[train:], batch_size=BATCH_SIZE, verbose=0)
    if is_first:
        print(f"test_accuracy={accuracy:.4f} workers={strategy.num_workers}")
    strategy.close()


if __name__ == "__main__":
    main()
