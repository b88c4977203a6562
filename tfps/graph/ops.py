"""The graph ops of tfps: gates, sends, pulls, and the conversion between tensors and bytes.

Queue ops are asynchronous kernels: a hundred closed gates hold no thread of a pool (`py_function` or Unstage would).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import linecache
import os
import re
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import tensorflow as tf

from tfps.errors import ClosedError, TfpsError, UnsupportedError, to_text
from tfps.graph import tf_private
from tfps.types import Array, Function, Value, Variable

HOST = "/device:CPU:0"
_RESOURCE = tf.TensorSpec([], tf.resource)
_NUMBER = tf.TensorSpec([], tf.int64)
_BYTES = tf.TensorSpec([None], tf.uint8)
_TIMES = tf.TensorSpec([None], tf.float64)
# What a graph hands to the host: transfer id, graph run, data, indices of a sparse gradient, times (see `send`), and
# the queue in which a pull waits for its reply. Messages without a reply put any queue there.
MESSAGE = [tf.int64, tf.int64, tf.uint8, tf.uint8, tf.float64, tf.resource]
# What the host hands to a pull: error text or "", the graph run of the message, data, indices.
PULLED = [tf.string, tf.int64, tf.uint8, tf.uint8]
PASS, CLOSE, SEND, PULL = "tfps_pass_gate", "tfps_close_gates", "tfps_send", "tfps_pull"  # names of functions below
_PHILOX = 1  # tf.random.Algorithm.PHILOX
_BACKWARD = re.compile(r"(^|/)gradient(s|_tape)(_\d+)?/")
_OTHER_STEP = to_text(
    TfpsError(
        "the reply to another step came back. Either an earlier step was stopped while it waited for a reduction "
        "(restore a checkpoint under a new strategy), or a tf.while_loop reduces in several iterations at once (give "
        "it parallel_iterations=1)"
    )
)
_LIBRARIES = (
    threading.__file__,  # replicas are traced by threads
    *(
        str(Path(module.origin).parent) + os.sep
        for name in ("tensorflow", "keras", "tfps")
        if (module := importlib.util.find_spec(name)) is not None and module.origin
    ),
)  # whose frames say nothing about a program
CLOSED = to_text(
    ClosedError(
        "the strategy is closed, and its models can no longer train: call close() at the end, or make a new strategy, "
        "and the model in its scope"
    )
)


def traced_once(*signature: tf.TensorSpec) -> Callable[[Function], Callable[[], tf_private.ConcreteFunction]]:
    """Turns a function of tensors of `signature` into one that returns its concrete function, traced when needed.

    Once with `clock`, and once without if the program has turned that off meanwhile.
    """

    def wrap(function: Function) -> Callable[[], tf_private.ConcreteFunction]:
        @functools.cache
        def traced(_: bool) -> tf_private.ConcreteFunction:
            return tf.function(function, autograph=False, input_signature=signature).get_concrete_function()

        return lambda: traced(has_clock())

    return wrap


def has_clock() -> bool:
    """Whether graphs may ask for the time: `tf.config.experimental.enable_op_determinism` refuses tf.timestamp."""
    return not tf_private.is_op_determinism_enabled()


def clock() -> tf.Tensor:
    """Returns, in a graph, the wall-clock time in seconds, a float64 scalar; 0, which is "not known", without clock."""
    return tf.timestamp() if has_clock() else tf.constant(0.0, tf.float64)


def wire_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype in which values of `dtype` are exchanged: half types as float32, so that a sum rounds once."""
    if dtype in (tf.float16, tf.bfloat16):
        return tf.float32
    if dtype in (tf.float32, tf.float64, tf.int32, tf.int64, tf.uint8, tf.int8, tf.int16):
        return dtype
    raise UnsupportedError(
        f"tensors of dtype {dtype.name} cannot be reduced over workers; cast them to float32 or int64"
    )


def to_bytes(tensor: tf.Tensor) -> tf.Tensor:
    """Returns `tensor` in its wire dtype as flat uint8 of shape [bytes]; no copy if the dtype is kept."""
    return to_raw(tf.cast(tensor, wire_dtype(tensor.dtype)))


def from_bytes(data: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns `data`, flat uint8, as a flat tensor of the wire dtype of `dtype`; no copy."""
    return from_raw(data, wire_dtype(dtype))


def to_raw(tensor: tf.Tensor) -> tf.Tensor:
    """Returns `tensor`, of any fixed-size dtype, as flat uint8 of shape [bytes], bit for bit."""
    flat = tf.reshape(tensor, [-1])
    if flat.dtype in (tf.bool, tf.uint8):
        return tf.cast(flat, tf.uint8)
    return tf.reshape(tf.bitcast(flat, tf.uint8), [-1])


def from_raw(data: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the flat tensor whose bytes are `data`, flat uint8: the inverse of `to_raw`."""
    if dtype in (tf.bool, tf.uint8):
        return tf.cast(data, dtype)
    return tf.bitcast(data if dtype.size == 1 else tf.reshape(data, [-1, dtype.size]), dtype)


def for_devices(data: tf.Tensor, devices: Iterable[str]) -> tf.Tensor:
    """`data` of the host, which goes to `devices`: copied to where a GPU reads at full speed, if one is a GPU.

    What an op on the host makes for a GPU TensorFlow allocates in pinned memory. What comes from numpy is elsewhere.
    """
    if not any("GPU" in device for device in devices):
        return data
    with tf.device(HOST):
        return tf.raw_ops.DeepCopy(x=data)


def tensor_of(array: Array) -> tf.Tensor:
    """Returns an eager tensor that shares the memory of `array` where dlpack can, else a copy."""
    # On unaligned data dlpack aborts the process.
    if array.flags.writeable and array.flags.c_contiguous and array.ctypes.data % 64 == 0 and array.nbytes:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.constant(array)


class Gate:
    """Makes readers of one variable, or of several that are updated together, wait (on one device)."""

    def __init__(self, name: str) -> None:
        self.names: tuple[str, ...] = (name,)  # of the variables
        with tf.init_scope(), tf.device(HOST):
            # Holds one token while the values are current: "" or, after a failure, an error that all readers raise.
            # There is room for more: an error may be added although a token thought lost comes back.
            self._queue = tf.queue.FIFOQueue(8, [tf.string], [[]], name="tfps_gate")
            self.open()
        self.handle = self._queue.queue_ref  # for graph ops
        # Graphs that pass it outside of replica functions: a program may save them.
        self.passed_outside: weakref.WeakSet[tf.Graph] = weakref.WeakSet()

    @property
    def closed(self) -> bool:
        """Whether the token is out: a send took it, or a reader holds it for a moment."""
        with tf.init_scope(), tf.device(HOST):
            return int(self._queue.size()) == 0

    @functools.cached_property
    def saved(self) -> SavedGate:
        return SavedGate(self.handle)

    def open(self, error: str = "") -> None:
        """Puts the token back, or an error in its place; called eagerly by the runtime's threads."""
        with tf.init_scope(), tf.device(HOST):
            self._queue.enqueue(error)

    def wait(self) -> str:
        """Waits eagerly until the value is current and returns the token."""
        with tf.init_scope(), tf.device(HOST):
            token = self._queue.dequeue()
            self._queue.enqueue(token)
        return str(token.numpy().decode())


class SavedGate(tf.saved_model.experimental.TrackableResource):
    """A gate in a SavedModel, whose concrete functions pass it: a queue that is always open: loading needs no tfps."""

    def __init__(self, handle: tf.Tensor) -> None:
        super().__init__()
        self._own, self._name = handle, f"tfps_gate_{uuid.uuid4().hex}"
        with tf.init_scope():
            _ = self.resource_handle  # now: the one that functions have captured

    def _create_resource(self) -> tf.Tensor:
        if tf.executing_eagerly():
            return self._own
        return tf.raw_ops.FIFOQueueV2(component_types=[tf.string], shapes=[[]], capacity=-1, shared_name=self._name)

    def _initialize(self) -> None:
        tf.raw_ops.QueueEnqueueV2(handle=self.resource_handle, components=[tf.constant("")])


def _call(
    function: tf_private.ConcreteFunction,
    arguments: Sequence[Value],
    after: Sequence[tf.Tensor] = (),
    read_only: Sequence[int] = (),
) -> tf.Tensor:
    """Calls `function` on the host, once all of `after` is ready; the arguments `read_only` order nothing."""
    with tf.device(HOST), tf.control_dependencies(after):
        called = function(*arguments)
        if not tf.executing_eagerly():
            tf_private.set_read_only_inputs(called, read_only)
    return called


def _true_after(*operations: tf.Operation) -> tf.Tensor:
    with tf.control_dependencies(operations):
        return tf.constant(True)


@functools.cache
def _pass_function(variables: int) -> tf_private.ConcreteFunction:
    @traced_once(*[_RESOURCE] * (1 + variables))
    def tfps_pass_gate(gate: tf.Tensor, *resources: tf.Tensor) -> tf.Tensor:
        token = tf.raw_ops.QueueDequeueV2(handle=gate, component_types=[tf.string])
        back = tf.raw_ops.QueueEnqueueV2(handle=gate, components=token)
        return _true_after(back, tf.debugging.Assert(tf.equal(token[0], ""), token))

    return tfps_pass_gate()


def pass_gate(gate: Gate, variables: Sequence[tf.Tensor], after: Sequence[tf.Tensor]) -> tf.Operation:
    """Makes later uses of `variables` (resources) in the current graph wait for `gate`; returns the op that passes it.

    `after`: the step's input; a step that ends before it has that, at the end of the data, must not hold a token.
    """
    return _call(_pass_function(len(variables)), [gate.handle, *variables], after).op


def write_after(variable: Variable, after: Sequence[tf.Tensor]) -> None:
    """Makes later writes of `variable` (a component) wait for `after`: a step whose input ends must not count."""
    with tf.device(None), tf.control_dependencies(after):
        # Automatic control dependencies order writes, not other reads, after a read, and prune it if no write follows.
        # VarIsInitializedOp would count as a write: sends that keep the learning rate would queue up.
        tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


@functools.cache
def _close_function(gates: int, variables: int) -> tf_private.ConcreteFunction:
    @traced_once(*[_RESOURCE] * (gates + variables))
    def tfps_close_gates(*resources: tf.Tensor) -> tf.Tensor:
        dequeue = functools.partial(tf.raw_ops.QueueDequeueV2, component_types=[tf.string])
        return _true_after(*(dequeue(handle=gate)[0].op for gate in resources[:gates]))

    return tfps_close_gates()


def close_gates(gates: Sequence[Gate], variables: Sequence[tf.Tensor], after: Sequence[tf.Tensor]) -> tf.Tensor:
    """Closes `gates` between earlier and later uses of `variables`; after the gradients: what follows hardly fails."""
    handles = [gate.handle for gate in gates]
    return _call(_close_function(len(gates), len(variables)), [*handles, *variables], after)


@traced_once(_RESOURCE)
def tfps_check_open(queue: tf.Tensor) -> tf.Tensor:
    closed = tf.raw_ops.QueueIsClosedV2(handle=queue)
    return _true_after(tf.debugging.Assert(tf.logical_not(closed), [CLOSED]))


def check_open(queue: tf.Tensor, after: Sequence[tf.Tensor]) -> tf.Tensor:
    """Raises in the graph once the runtime behind `queue` is closed: a gate closed after that would never open."""
    return _call(tfps_check_open(), [queue], after, [0])


def open_gate(gate: Gate) -> tf.Operation:
    with tf.device(HOST):
        return tf.raw_ops.QueueEnqueueV2(handle=gate.handle, components=[tf.constant("")])


@traced_once()
def tfps_graph_run() -> tf.Tensor:
    return tf.bitcast(tf.timestamp(), tf.int64)


@traced_once(_RESOURCE)
def tfps_counted_run(counter: tf.Tensor) -> tf.Tensor:
    # Of all ops that count, this alone reads and adds in one: graphs may run at the same time.
    return tf.raw_ops.RngReadAndSkip(resource=counter, alg=_PHILOX, delta=tf.constant(1, tf.uint64))[0]


@functools.cache
def _counter() -> Variable:
    with tf.init_scope(), tf.device(HOST):
        return tf_private.ResourceVariable([1, 0, 0], dtype=tf.int64, trainable=False, name="tfps_graph_runs")


def graph_run() -> tf.Tensor:
    """Returns a number (int64, not 0) that differs at every execution of any graph; if there is a clock, the time."""
    with tf.device(HOST):  # stateless: a stateful call would be ordered with every `py_function`
        if has_clock():
            return call_stateless(tfps_graph_run(), [])[0]
        number = call_stateless(tfps_counted_run(), [_counter().handle])[0]
        tf_private.set_read_only_inputs(number, [0])
        return number


def call_stateless(function: tf_private.ConcreteFunction, arguments: list[tf.Tensor]) -> list[tf.Tensor]:
    """Calls the concrete `function` through an op that TensorFlow considers stateless, whatever is in it."""
    graph = tf_private.ops.get_default_graph()
    function.add_to_graph(graph)
    captured = [graph.capture(argument) for argument in arguments]
    dtypes = [output.dtype for output in function.outputs]
    results: list[tf.Tensor] = tf.raw_ops.PartitionedCall(args=captured, Tout=dtypes, f=function)
    return results


@traced_once(_RESOURCE, _NUMBER, _NUMBER, _BYTES, _BYTES, _TIMES)
def tfps_send(
    queue: tf.Tensor, transfer: tf.Tensor, graph_run: tf.Tensor, data: tf.Tensor, indices: tf.Tensor, times: tf.Tensor
) -> tf.Tensor:
    with tf.control_dependencies([data, indices]):
        times = tf.concat([tf.reshape(clock(), [1]), times], 0)
    message = [transfer, graph_run, data, indices, times, queue]
    return _true_after(tf.raw_ops.QueueEnqueueV2(handle=queue, components=message))


def send(
    queue: tf.Tensor,
    transfer: int,
    graph_run: tf.Tensor,
    data: tf.Tensor,
    indices: tf.Tensor | None = None,
    times: Sequence[Value] = (),
) -> tf.Operation:
    """Hands `data` (flat uint8, from any device) to the host with the time when it was ready, and `times` (seconds)."""
    with tf.device(HOST):
        if indices is None:
            indices = tf.constant([], tf.uint8)
        noted = tf.stack([tf.cast(each, tf.float64) for each in times]) if times else tf.constant([], tf.float64)
        message = [tf.constant(transfer, tf.int64), graph_run, data, indices, noted]
        return _call(tfps_send(), [queue, *message], read_only=[0]).op


def _drawn() -> tf.Tensor:
    """A number, not 0, that differs at each run of one kernel."""
    least, most, shape = tf.constant(1, tf.int64), tf.constant(2**62, tf.int64), tf.constant([], tf.int32)
    return tf.raw_ops.RandomUniformInt(shape=shape, minval=least, maxval=most, seed=1, seed2=1)


@traced_once(_RESOURCE, _NUMBER, _BYTES, _BYTES)
def tfps_pull(
    queue: tf.Tensor, transfer: tf.Tensor, data: tf.Tensor, indices: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    # The kernel owns this queue: a pruned pull has none, and one that runs keeps it across steps.
    results = tf.raw_ops.FIFOQueueV2(component_types=PULLED, capacity=16)
    # A step that TensorFlow stops here leaves its reply behind, which the next step must not take.
    with tf.control_dependencies([data, indices]):
        now = clock()
        graph_run = tf.bitcast(now, tf.int64) if has_clock() else _drawn()
    times = tf.reshape(now, [1])
    sent = tf.raw_ops.QueueEnqueueV2(handle=queue, components=[transfer, graph_run, data, indices, times, results])
    with tf.control_dependencies([sent]):
        error, echoed, *pulled = tf.raw_ops.QueueDequeueV2(handle=results, component_types=PULLED)
    with tf.control_dependencies([tf.debugging.Assert(tf.equal(error, ""), [error])]):
        own = tf.debugging.Assert(tf.equal(graph_run, echoed), [tf.constant(_OTHER_STEP)])
    with tf.control_dependencies([own]):
        return tf.identity(pulled[0]), tf.identity(pulled[1])


def pull(queue: tf.Tensor, transfer: int, data: tf.Tensor, indices: tf.Tensor) -> list[tf.Tensor]:
    """Sends `data` and waits for the reduced bytes: [data, indices], both flat uint8."""
    with tf.device(HOST):  # stateless: it is pruned when nothing uses its result (see `needed`)
        pulled = call_stateless(tfps_pull(), [queue, tf.constant(transfer, tf.int64), data, indices])
        tf_private.set_read_only_inputs(pulled[0], [0])
        for tensor in pulled:
            tensor.set_shape([None])
    return pulled


def answer(results: tf.Tensor, reply: Sequence[Value]) -> None:
    """Hands `reply`, as in PULLED, to the pull that waits in the queue `results`; called by the runtime's threads."""
    # If the waiting function has been deleted, its queue is gone, too: nothing waits any more.
    with contextlib.suppress(tf.errors.NotFoundError):
        tf.raw_ops.QueueEnqueueV2(handle=results, components=reply)


def needed(graph: tf.Graph) -> set[str]:
    """Returns the names of the ops that runs of the fully traced function `graph` need; others may be pruned."""
    found: set[str] = set()
    waiting = [*(output.op for output in graph.outputs), *graph.control_outputs]
    waiting += [op for op in graph.get_operations() if op.op_def.is_stateful]
    while waiting:
        op = waiting.pop()
        if op.name not in found:
            found.add(op.name)
            waiting += before(op)
    return found


def computed_from(
    values: Iterable[tf.Tensor], goes_on: Callable[[tf.Tensor], bool] = lambda _: True
) -> Iterator[tf.Tensor]:
    """Yields `values`, tensors in graphs, and what they are computed from as long as it `goes_on`, each once."""
    seen: set[int] = set()
    left = list(values)
    while left:
        tensor = left.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        yield tensor
        if tf.is_symbolic_tensor(tensor) and goes_on(tensor):
            captured = captured_from(tensor)  # leads to the graph around
            left += tensor.op.inputs if captured is None else [captured]


def is_argument(tensor: Value) -> bool:
    """Whether `tensor` is an argument of a function in a graph, and not captured from around it."""
    return tf.is_symbolic_tensor(tensor) and tensor.op.type == "Placeholder" and captured_from(tensor) is None


def outside(tensor: Value) -> Value:
    """Returns what `tensor` stands for outside of the graphs that capture it."""
    while tf.is_symbolic_tensor(tensor) and (captured := captured_from(tensor)) is not None:
        tensor = captured
    return tensor


def captured_from(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns the tensor around its graph that the placeholder `tensor` stands for, if it does."""
    captures = getattr(tensor.graph, "captures", ()) if tensor.op.type == "Placeholder" else ()
    return next((each for each, inside in captures if inside is tensor), None)


def before(op: tf.Operation) -> list[tf.Operation]:
    """Returns the direct predecessors of `op`, by data and control edges."""
    return [*(each.op for each in op.inputs), *op.control_inputs]


def in_order(graph: tf.Graph) -> list[tf.Operation]:
    """Returns the ops of `graph`, each after its predecessors: what is rewired may come after what was made later."""
    order: dict[str, tf.Operation] = {}
    entered: set[str] = set()
    waiting = list(reversed(graph.get_operations()))
    while waiting:
        op = waiting[-1]
        missing = [] if op.name in entered else [each for each in before(op) if each.name not in order]
        entered.add(op.name)
        waiting += missing
        if not missing:
            order.setdefault(waiting.pop().name, op)
    return list(order.values())


def is_backward(op: tf.Operation) -> bool:
    """Whether `op` belongs to a backward pass: of tf.GradientTape or tf.gradients."""
    return _BACKWARD.search(op.name) is not None


def place_of(op: tf.Operation) -> str:
    """Returns where a program creates `op`: "train.py:12 (the line)"; its name if no frame is a program's."""
    for frame in reversed(op.traceback):
        if not frame.filename.startswith(_LIBRARIES):
            line = linecache.getline(frame.filename, frame.lineno).strip()
            return f"{Path(frame.filename).name}:{frame.lineno}" + (f" ({line})" if line else "")
    return f"op {op.name}"


def called(op: tf.Operation) -> str:
    """Returns the Python name of the function that `op` calls; empty for other ops."""
    if op.type not in ("PartitionedCall", "StatefulPartitionedCall"):
        return ""
    name: str = op.get_attr("f").name
    return name.removeprefix("__inference_").rpartition("_")[0]


def exchange_functions() -> list[str]:
    """Returns the names of the functions through which a graph exchanges data."""
    return [function().name for function in (tfps_send, tfps_pull)]


@traced_once(_RESOURCE, _RESOURCE, _NUMBER, _NUMBER)
def tfps_request(queue: tf.Tensor, order: tf.Tensor, transfer: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    nothing, times = tf.constant([], tf.uint8), tf.constant([], tf.float64)
    message = [transfer, number, nothing, nothing, times, queue]
    return _true_after(tf.raw_ops.QueueEnqueueV2(handle=queue, components=message))


def request(queue: tf.Tensor, order: tf.Tensor, transfer: int, number: tf.Tensor) -> tf.Tensor:
    """Asks the host for a batch. The resource `order` keeps the requests of one graph in order."""
    with tf.device(HOST):
        identity = tf.constant(transfer, tf.int64)
    return _call(tfps_request(), [queue, order, identity, number], read_only=[0])
