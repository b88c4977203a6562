"""Worker: trains one small model per combination of settings, one after the other, and says what each ended with.

combinations.py FOLDER JSON      JSON: a list of settings (of tfps.Config; and "sparse": whether there is an embedding,
                                 "optimizer": its name)
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


def model_of(sparse: bool, optimizer: str) -> Model:
    """With a bucket above the 16 KiB from which compression applies."""
    layers = keras.layers
    first = [layers.Embedding(40, 120), layers.Flatten()] if sparse else [layers.Rescaling(1 / 40)]
    model = keras.Sequential([layers.Input((3,)), *first, layers.Dense(48, activation="tanh"), layers.Dense(120)])
    model.add(layers.Dense(4))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rule = keras.optimizers.Adam(0.01) if optimizer == "adam" else keras.optimizers.SGD(0.1, momentum=0.5)
    model.compile(rule, loss, metrics=["accuracy"])
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    """The same for all."""
    keras.utils.set_random_seed(3)
    random = np.random.default_rng(5)
    x = random.integers(0, 40, [ROWS, 3])
    return x, (x.sum(1) > 60).astype(np.int64) + 2 * (x[:, 0] > 20)


def train(settings: Json, file: Path) -> dict[str, Json]:
    """Losses of the epochs, and a file with the weights that a saved model has.

    Where it ends near plain Keras, also how far from it: the norm of the difference of all weights, relative to that of
    the way that they have made.
    """
    x, y = data()
    kind = settings.pop("sparse"), settings.pop("optimizer")
    config = tfps.Config(**settings)
    strategy = tfps.Strategy(config=config)
    with strategy.scope():
        model = model_of(*kind)
    initial = model.get_weights()
    fit = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    result = model.evaluate(x, y, batch_size=BATCH, verbose=0)
    model.save_weights(file)
    strategy.close()
    plain, near = model_of(*kind), dict[str, Json]()
    plain.load_weights(file)
    weights = plain.get_weights()
    # One worker in mode "async" is "sync", and in "local" it exchanges with nobody.
    if strategy.rank == 0 and (config.mode == "sync" or (strategy.num_workers == 1 and config.mode != "diloco")):
        x, y = data()
        again = model_of(*kind)
        again.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
        expected = again.get_weights()
        near["strayed"] = _norm(weights, expected) / _norm(initial, expected)
    digest = zlib.crc32(b"".join(np.asarray(each).tobytes() for each in weights))
    return {"losses": fit.history["loss"], "evaluated": result, "weights": digest, **near}


def _norm(ones: list[np.ndarray], others: list[np.ndarray]) -> float:
    """Of the difference."""
    return float(np.sqrt(sum(np.square(one - other).sum() for one, other in zip(ones, others, strict=True))))


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for number, settings in enumerate(json.loads(sys.argv[2])):
        print(json.dumps(train(settings, folder / f"{number}.weights.h5")), flush=True)


if __name__ == "__main__":
    main()
