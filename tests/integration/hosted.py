"""Worker: trains with a backup, and ends with its weights and which epochs it has trained.

hosted.py FOLDER [RANK]    rank RANK kills itself in the middle of the fourth epoch
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import ssl
import sys
from pathlib import Path

import keras
import training

import tfps
from tfps.types import Logs

EPOCHS = 6


class Die(keras.callbacks.Callback):
    """SIGKILL after the second batch of the fourth epoch."""

    epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if (self.epoch, batch) == (3, 1):
            os.kill(os.getpid(), signal.SIGKILL)


def certified(host: str, port: str) -> str:
    """The hosts that a pserver's certificate names, after a handshake with ours."""
    context = ssl.create_default_context(cafile=os.environ["TFPS_TLS_CA"])
    context.load_cert_chain(os.environ["TFPS_TLS_CERT"], os.environ["TFPS_TLS_KEY"])
    context.set_alpn_protocols(["h2"])  # gRPC's
    with (
        socket.create_connection((host, int(port)), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname=host) as secured,
    ):
        return str((secured.getpeercert() or {}).get("subjectAltName"))


def main(folder: str, dies: str = "") -> None:
    strategy = tfps.Strategy(config=tfps.Config(deterministic=True))
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model, x, y = training.mlp()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    callbacks: list[keras.callbacks.Callback] = [keras.callbacks.BackupAndRestore(Path(folder) / "backup")]
    if dies == str(strategy.rank):
        callbacks.append(Die())
    history = model.fit(x, y, batch_size=48, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
    digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
    if strategy.rank == 0:
        for address in os.environ["TFPS_PSERVERS"].split(","):
            print("secured", certified(*address.split(":")), flush=True)
    print("trained", strategy.rank, socket.gethostname(), [epoch + 1 for epoch in history.epoch], digest, flush=True)
    strategy.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
