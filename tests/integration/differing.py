"""Worker: trains a model with as many hidden units as the command line says."""

from __future__ import annotations

import sys

import training

import tfps


def main(units: str) -> None:
    strategy = tfps.Strategy()
    with strategy.scope():
        model, x, y = training.mlp(int(units))
        model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=32, verbose=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
