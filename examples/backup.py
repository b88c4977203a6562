"""Trains with a backup: after an interruption, a restart resumes at the interrupted epoch.

python examples/backup.py --stop-after 3                        # ends in the fourth epoch, as if it had been killed
python examples/backup.py                                       # resumes with the fourth epoch
tfps_launch --workers 2 --pservers 2 examples/backup.py         # several processes on this machine

Only rank 0 writes and restores the backup, and all ranks receive its values: the directory need not be shared. For
longer jobs set save_freq to a number of batches.
"""

import argparse
from pathlib import Path

import keras
from sklearn.datasets import load_digits

import tfps

BATCH_SIZE = 64  # of the whole job: each of two workers gets 32


class Stop(keras.callbacks.Callback):
    """Ends the program abruptly after some epochs, like a crash."""

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.epochs = epochs

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        if epoch == self.epochs:
            raise SystemExit(f"stopped before epoch {epoch + 1}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("backup"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--stop-after", type=int, default=-1, metavar="EPOCHS")
    options = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    strategy = tfps.Strategy()
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])

    callbacks = [keras.callbacks.BackupAndRestore(options.directory), Stop(options.stop_after)]
    is_first = strategy.rank == 0
    history = model.fit(
        images[:1792].astype("float32") / 16,
        labels[:1792],
        batch_size=BATCH_SIZE,
        epochs=options.epochs,
        callbacks=callbacks,
        verbose=2 if is_first else 0,
    )
    if is_first:
        epochs = ", ".join(str(epoch + 1) for epoch in history.epoch)
        print(f"trained epochs {epochs}: accuracy={history.history['accuracy'][-1]:.4f} workers={strategy.num_workers}")
    strategy.close()


if __name__ == "__main__":
    main()
