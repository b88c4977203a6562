"""Worker: trains with a quorum, of which rank 2 is late, and saves its own weights after each step.

late.py FILE CASE SKIPS STEPS     settings of local_training.Settings as JSON, steps of rank 2

After its fifth step rank 2 waits until it has let others go on so often. If that is twice, these go on with their third
round after that only when it has pushed its part.
"""

from __future__ import annotations

import json
import pickle
import sys
import threading
from pathlib import Path

import keras
import local_training
from jobs import poll
from local_training import OPTIMIZERS, SLICE_BYTES, Settings

import tfps
from tfps.policies.quorum import Latecomer
from tfps.types import Array, Logs, Options

STEPS, LATE = 24, 2

if __name__ == "__main__":
    file, case, skips, late_steps = sys.argv[1:]
    settings = Settings(**json.loads(case))
    options: Options = {"quorum": 0.6, "grace_s": 0.0, **settings.config()}
    config = tfps.Config(deterministic=True, slice_bytes=SLICE_BYTES, **options)
    strategy = tfps.Strategy(config=config)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = local_training.model()
        model.compile(OPTIMIZERS[settings.optimizer](), local_training.loss())

    def never_late() -> None:
        """However slow this machine is."""
        Latecomer._skip = lambda *_: None  # type: ignore[method-assign]

    if strategy.rank != LATE:
        never_late()
    initial: list[list[Array]] = []
    trained: list[list[Array]] = []
    pushed = Path(file).parent / "pushed"

    def tell() -> None:
        policy, state = strategy.extended.policy, strategy.extended.exchange.state
        poll(lambda: any(state.steps(bucket) == 4 for bucket in policy.exchanged))
        pushed.touch()

    def keep(batch: int, logs: Logs) -> None:
        trained.append(model.get_weights())
        (outer,) = strategy.extended.policy._exchanged()
        if strategy.rank == LATE and len(trained) == 5:
            poll(lambda: min(outer._latecomer.skipped) == int(skips))
            never_late()
            threading.Thread(target=tell, daemon=True).start()
        if strategy.rank != LATE and len(trained) == 13 and skips == "2":
            poll(pushed.exists)

    callbacks = [
        keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: initial.append(model.get_weights()), on_train_batch_end=keep
        )
    ]
    steps = int(late_steps) if strategy.rank == LATE else STEPS
    data = local_training.dataset(strategy.rank, steps, strategy.num_workers)
    model.fit(data, callbacks=callbacks, verbose=0)
    (outer,) = strategy.extended.policy._exchanged()
    found = {"initial": initial[0], "own": trained, "end": model.get_weights(), "skipped": outer._latecomer.skipped}
    strategy.close()
    assert len(trained) == steps
    Path(file).write_bytes(pickle.dumps(found))
