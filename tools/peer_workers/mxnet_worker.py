"""MXNet: Gluon with the kvstore `dist_sync`, with its defaults; role and place come from DMLC_... variables.

The optimizer runs on the servers, as is the default. P3 is DMLC_PS_VAN_TYPE=p3 in all roles.
"""

from __future__ import annotations

import mxnet as mx  # type: ignore[import-not-found]  # schedulers and servers stay in this import until the end
import numpy as np

from peer_workers.common import Clock, Work


def main() -> None:
    work = Work.from_environment()
    store = mx.kv.create("dist_sync")
    if store.num_workers != work.workers:
        raise ValueError(f"the kvstore must have {work.workers} workers, got {store.num_workers}")
    clock = Clock(work, store.rank)
    net = mx.gluon.nn.HybridSequential()
    for _ in range(work.depth):
        net.add(mx.gluon.nn.Dense(work.width, in_units=work.width, activation="relu"))
    net.add(mx.gluon.nn.Dense(work.classes, in_units=work.width))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=store)
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    random = np.random.default_rng(0)
    features = mx.nd.array(random.random((work.batch, work.width), np.float32))
    targets = mx.nd.array(random.integers(0, work.classes, work.batch))
    for _ in range(work.warmup_steps + work.steps):
        with mx.autograd.record():
            loss = loss_of(net(features), targets)
        loss.backward()
        trainer.step(work.batch * work.workers)
        # Waits for forward alone: pushes and pulls go on into the next step, as is MXNet's way.
        clock.step_ended(loss.mean().asscalar())

    weights = [parameter.data().asnumpy() for parameter in net.collect_params().values()]
    clock.drained()
    items = sum(weight.size for weight in weights)
    if items != work.items:
        raise ValueError(f"the model must have {work.items} parameters, got {items}")
    clock.report(float(sum(np.abs(weight).sum(dtype=np.float64) for weight in weights)))


if __name__ == "__main__":
    main()
