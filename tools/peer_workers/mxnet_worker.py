"""MXNet: Gluon with the kvstore `dist_sync`, with its defaults; role and place come from DMLC_... variables.

The optimizer runs on the servers, as is the default. P3 is DMLC_PS_VAN_TYPE=p3 in all roles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mxnet as mx  # type: ignore[import-not-found]  # schedulers and servers stay in this import until the end
import numpy as np

from tools.peer_workers.common import Clock, Sleeper, Work

if TYPE_CHECKING:
    from tfps.types import Array, Function, Model, Value

LEARNING_RATE = 0.01


def mlp(work: Work) -> tuple[Model, Function, Array, Array]:
    """Model, loss, inputs and targets."""
    net = mx.gluon.nn.HybridSequential()
    for _ in range(work.depth):
        net.add(mx.gluon.nn.Dense(work.width, in_units=work.width, activation="relu"))
    net.add(mx.gluon.nn.Dense(work.classes, in_units=work.width))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    random = np.random.default_rng(0)
    features = mx.nd.array(random.random((work.batch, work.width), np.float32))
    targets = mx.nd.array(random.integers(0, work.classes, work.batch))
    return net, mx.gluon.loss.SoftmaxCrossEntropyLoss(), features, targets


def sleeping(work: Work, sleeper: Sleeper) -> tuple[Model, Function, Array, Array]:
    """The same with layers that pass their input on, and sleep as those of keras_training.py do."""

    class Sleep(mx.operator.CustomOp):  # type: ignore[misc]
        def __init__(self, forward_s: float, backward_s: float) -> None:
            super().__init__()
            self._forward_s, self._backward_s = forward_s, backward_s

        def forward(self, is_train: bool, req: Value, in_data: Value, out_data: Value, aux: Value) -> None:
            sleeper(self._forward_s)  # MXNet's engine calls this when the inputs, the weight among them, are there
            self.assign(out_data[0], req[0], in_data[0])

        def backward(
            self, req: Value, out_grad: Value, in_data: Value, out_data: Value, in_grad: Value, aux: Value
        ) -> None:
            out_grad[0].wait_to_read()
            sleeper(self._backward_s)
            self.assign(in_grad[0], req[0], out_grad[0])
            in_grad[1][:] = out_grad[0].mean().asscalar()

    @mx.operator.register("tfps_sleep")
    class Properties(mx.operator.CustomOpProp):  # type: ignore[misc]
        def __init__(self, forward_s: str, backward_s: str) -> None:
            super().__init__(need_top_grad=True)
            self._times_s = float(forward_s), float(backward_s)

        def list_arguments(self) -> list[str]:
            return ["data", "weight"]

        def infer_shape(self, in_shape: Value) -> object:
            return in_shape, [in_shape[0]], []

        def create_operator(self, context: object, shapes: object, dtypes: object) -> Sleep:
            return Sleep(*self._times_s)

    class Sleeping(mx.gluon.Block):  # type: ignore[misc]
        def __init__(self, forward_s: float, backward_s: float, items: int) -> None:
            super().__init__()
            self._times_s = {"forward_s": forward_s, "backward_s": backward_s}
            with self.name_scope():
                self.weight = self.params.get("weight", shape=(items,), init="zeros")

        def forward(self, inputs: Value) -> Value:
            return mx.nd.Custom(inputs, self.weight.data(), op_type="tfps_sleep", **self._times_s)

    net = mx.gluon.nn.Sequential()
    for _, forward_s, backward_s, items in work.layers:
        net.add(Sleeping(forward_s, backward_s, items))
    net.initialize()
    inputs = mx.nd.full((work.batch, 1), 1e-3)
    return net, mx.gluon.loss.L2Loss(), inputs, mx.nd.zeros((work.batch, 1))


def main() -> None:
    work, sleeper = Work.from_environment(), Sleeper()
    store = mx.kv.create("dist_sync")
    if store.num_workers != work.workers:
        raise ValueError(f"the kvstore must have {work.workers} workers, got {store.num_workers}")
    clock = Clock(work, store.rank)
    net, loss_of, features, targets = sleeping(work, sleeper) if work.layers else mlp(work)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": LEARNING_RATE}, kvstore=store)
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
    checksum = float(sum(np.abs(weight).sum(dtype=np.float64) for weight in weights))
    clock.report(checksum, overslept_s=sleeper.overslept_s)


if __name__ == "__main__":
    main()
