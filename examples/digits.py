"""Trains a small CNN on the handwritten digits that come with scikit-learn.

python examples/digits.py                                       # one process, pserver inside it
tfps_launch --workers 2 --pservers 2 examples/digits.py         # several processes on this machine
"""

import time

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfps

EPOCHS = 15
BATCH_SIZE = 64  # of the whole job: each of two workers gets 32


def build_model() -> keras.Model:
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main() -> None:
    keras.utils.set_random_seed(1)
    digits = load_digits()
    images = digits.images[..., None].astype("float32") / 16  # (1797, 8, 8, 1), 0 to 1
    x_train, x_test, y_train, y_test = train_test_split(
        images, digits.target, test_size=0.2, stratify=digits.target, random_state=1
    )

    strategy = tfps.Strategy()  # the only line that differs from training in one process ...
    with strategy.scope():  # ... and this one
        model = build_model()

    is_first = strategy.rank == 0  # one progress bar is enough
    start = time.perf_counter()
    model.fit(x_train, y_train, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=1 if is_first else 0)
    seconds = (time.perf_counter() - start) / EPOCHS
    _, accuracy = model.evaluate(x_test, y_test, batch_size=BATCH_SIZE, verbose=0)
    if is_first:
        print(
            f"test_accuracy={accuracy:.4f} workers={strategy.num_workers} pservers={len(strategy.pservers)} "
            f"epochs={EPOCHS} seconds_per_epoch={seconds:.2f}"
        )
    strategy.close()


if __name__ == "__main__":
    main()
