"""Worker: trains one small model per combination of settings, one after the other, and says what each ended with.

combinations.py FOLDER JSON      JSON: a list of settings (of tfps.Config; and "sparse": whether there is an embedding)
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path

import keras
import numpy as np

import tfps
from tfps.types import Json, Model

BATCH, ROWS = 24, 76  # neither divides by the other, nor evenly among ranks
EPOCHS = 4


def model_of(sparse: bool) -> Model:
    """With a bucket above the 16 KiB from which compression applies."""
    layers = keras.layers
    first = [layers.Embedding(40, 120), layers.Flatten()] if sparse else [layers.Rescaling(1 / 40)]
    model = keras.Sequential([layers.Input((3,)), *first, layers.Dense(48, activation="tanh"), layers.Dense(120)])
    model.add(layers.Dense(4))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), loss, metrics=["accuracy"])
    return model


def train(settings: Json, file: Path) -> dict[str, Json]:
    """Losses of the epochs, and a file with the weights that a saved model has."""
    keras.utils.set_random_seed(3)
    random = np.random.default_rng(5)
    x = random.integers(0, 40, [ROWS, 3])
    y = (x.sum(1) > 60).astype(np.int64) + 2 * (x[:, 0] > 20)
    sparse = settings.pop("sparse")
    strategy = tfps.Strategy(config=tfps.Config(**settings))
    with strategy.scope():
        model = model_of(sparse)
    fit = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    result = model.evaluate(x, y, batch_size=BATCH, verbose=0)
    model.save_weights(file)
    plain = model_of(sparse)
    plain.load_weights(file)
    strategy.close()
    digest = zlib.crc32(b"".join(np.asarray(each).tobytes() for each in plain.get_weights()))
    return {"losses": fit.history["loss"], "evaluated": result, "weights": digest}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for number, settings in enumerate(json.loads(sys.argv[2])):
        print(json.dumps(train(settings, folder / f"{number}.weights.h5")), flush=True)


if __name__ == "__main__":
    main()
