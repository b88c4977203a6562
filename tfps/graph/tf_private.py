"""Every private TensorFlow name that tfps uses, imported here only, each with its reason, and checked.

Tested in tests/test_versions.py, tests/test_private_names.py and tests/graph/test_effects.py.
"""

# ruff: noqa: F401
from __future__ import annotations

import dis
import functools
import importlib.metadata
import inspect
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import cast

from packaging.version import Version

from tfps.errors import TfpsError, UnsupportedError, in_graph_error, in_part_error, outlined
from tfps.types import Structure

SUPPORTED = "TensorFlow 2.18 to 2.21 with Keras 3 (3.8 or newer)"
_OLDEST, _NEWEST, _OLDEST_KERAS = (2, 18), (2, 21), (3, 8)
needed: dict[type | ModuleType, set[str]] = {}  # owner (module or class) -> names that have been checked


def needs(owner: type | ModuleType, *names: str) -> None:
    """Checks that `owner` has `names`, or that its methods assign them, and remembers them; else raises ImportError."""
    for name in names:
        if not (hasattr(owner, name) or (inspect.isclass(owner) and _assigns(owner, name))):
            raise ImportError(f"{owner} has no {name}")
    needed.setdefault(owner, set()).update(names)


def _assigns(owner: type, name: str) -> bool:
    methods = (member for each in owner.__mro__ for member in vars(each).values() if inspect.isfunction(member))
    return any(
        instruction.opname == "STORE_ATTR" and instruction.argval == name
        for method in map(inspect.unwrap, methods)
        if inspect.isfunction(method) and name in method.__code__.co_names  # the rest takes longer
        for instruction in dis.get_instructions(method)
    )


def _minor(version: str) -> tuple[int, ...]:
    return Version(version).release[:2]


def check_versions(tensorflow: str, keras: str | None, environment: Mapping[str, str]) -> None:
    """Raises ImportError for versions that tfps cannot work with, or Keras 2; warns of untested ones."""
    if _minor(tensorflow) < _OLDEST:
        raise ImportError(f"tfps supports {SUPPORTED}, got TensorFlow {tensorflow}; pip install -U 'tfps[tensorflow]'")
    if keras is not None and _minor(keras) < _OLDEST_KERAS:  # 3.7 does not divide the loss by the number of replicas
        raise ImportError(f"tfps supports {SUPPORTED}, got Keras {keras}; pip install -U keras")
    legacy = environment.get("TF_USE_LEGACY_KERAS")
    if legacy in ("true", "True", "1"):  # as TensorFlow reads it
        raise ImportError(
            f"tfps supports {SUPPORTED}, but TF_USE_LEGACY_KERAS={legacy} makes tf.keras Keras 2 (tf_keras); unset it "
            "(Ray's TensorflowTrainer sets it, unless it is given tensorflow_config=tfps.ray.TensorflowConfig())"
        )
    if _minor(tensorflow) > _NEWEST:
        warnings.warn(
            f"tfps has been tested with {SUPPORTED}; TensorFlow {tensorflow} is newer: first compare a short training "
            "with and without tfps",
            stacklevel=2,
        )


try:
    import tensorflow as tf
except ImportError as error:
    raise ImportError(f"tfps.Strategy needs {SUPPORTED}: pip install 'tfps[tensorflow]' (or 'tfps[cpu]')") from error

try:
    _keras: str | None = importlib.metadata.version("keras")
except importlib.metadata.PackageNotFoundError:
    _keras = None  # custom training loops need none
check_versions(tf.__version__, _keras, os.environ)

# Before 3.10, Keras does not mark metric variables as combined on read. Mirrored ones would be summed over replicas at
# each `total.assign(total + value)`, including what had been summed before.
METRICS_ARE_MIRRORED = _minor(_keras or "3.10") < (3, 10)

try:
    from tensorflow.core.framework import attr_value_pb2  # marks read-only resource inputs of a call
    from tensorflow.python.autograph.core import config as autograph_config  # which modules AutoGraph leaves alone
    from tensorflow.python.autograph.core import config_lib as autograph_rules
    from tensorflow.python.data.ops import (
        dataset_ops,  # a dataset of another one's variant, whose functions it keeps
        flat_map_op,  # what Dataset.from_generator ends with
    )
    from tensorflow.python.data.util import random_seed as data_seeds  # seeds of datasets without one
    from tensorflow.python.distribute import (
        distribute_lib,  # ReplicaContext with an id: the public constructor is for the current replica
        distribute_utils,  # regroup; create_mirrored_variable, the only way to use a custom variable class
        input_lib,  # distributed datasets, base of the staged ones; empty batches
        mirrored_run,  # replica threads
        mirrored_strategy,  # MirroredExtended: local devices, replica threads, PerReplica values
        values,  # MirroredVariable, DistributedValues
        values_util,  # current replica id as a number
    )
    from tensorflow.python.eager import (
        context,  # whether there is a global seed, or ops have run; eager mode whatever graph is built
        record,  # whether a gradient tape is recording, and telling it of an op
    )
    from tensorflow.python.eager.polymorphic_function import atomic_function  # see renamed
    from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction  # see flat_call
    from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function  # see _translate_errors
    from tensorflow.python.framework import (
        auto_control_deps_utils,  # the attribute for read-only inputs; which resources an op writes
        kernels,  # which ops XLA can compile
        op_def_registry,  # which ops are stateful
        ops,  # the graph under construction, init_scope that leaves it
    )
    from tensorflow.python.framework.composite_tensor import CompositeTensor  # base of iterator arguments
    from tensorflow.python.framework.config import is_op_determinism_enabled as is_op_determinism_enabled  # no clock
    from tensorflow.python.framework.func_graph import FuncGraph  # whose outer graphs can be followed
    from tensorflow.python.ops import (
        control_flow_util,  # whether XLA compiles a graph: queues do not exist there
        control_flow_v2_func_graphs,  # which graphs are branches of a tf.cond
    )
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable  # a variable outside of any strategy
    from tensorflow.python.util import nest  # paths_of

    from tfps.graph.patches import Patch  # here, as it needs TensorFlow

    # What Extended overrides: if one of these is gone, TensorFlow never calls the override. The first one decides
    # whether a strategy uses merge_call.
    _extended = mirrored_strategy.MirroredExtended
    needs(dataset_ops, "UnaryUnchangedStructureDataset")
    needs(tf.data.Dataset, "interleave", "_variant_tensor", "_flat_structure")
    needs(_extended, "_use_merge_call", "_num_replicas_in_sync", "_get_replica_id_in_sync_group")
    needs(_extended, "_get_local_replica_id", "_create_variable", "_call_for_each_replica", "_replica_ctx_all_reduce")
    needs(_extended, "_replica_ctx_update", "_update", "_reduce_to", "_batch_reduce_to", "_gather_to_implementation")
    needs(_extended, "_local_results", "_experimental_distribute_dataset", "_distribute_datasets_from_function")
    needs(_extended, "_experimental_distribute_values_from_function", "experimental_between_graph")
    needs(_extended, "should_checkpoint", "should_save_summary")
    # What it uses of its base class.
    needs(_extended, "_container_strategy", "_devices", "_broadcast_to")
    needs(_extended, "_get_variable_creator_initial_value")  # replicas start with the first's
    needs(_extended, "_input_workers_with_options", "_input_workers_devices")
    needs(mirrored_strategy.MirroredStrategy, "_collective_key_base")  # which MirroredExtended reads from its strategy

    # Replicas.
    needs(distribute_lib.ReplicaContext, "_replica_id", "_update", "all_reduce", "all_gather")
    needs(distribute_lib, "get_replica_context", "in_cross_replica_context", "get_update_replica_id")
    needs(distribute_lib, "enter_or_assert_strategy")
    needs(values_util, "get_current_replica_id_as_int", "in_replica_update_context", "is_saving_non_distributed")
    needs(values_util, "mark_as_unsaveable")  # functions that assign to replicas
    needs(mirrored_run, "_MirroredReplicaThread")
    needs(mirrored_run._MirroredReplicaThread, "coord")  # see stopped; else Ctrl-C would not reach replica functions

    # Variables: what is overridden, then what is used.
    _mirrored, _distributed = values.MirroredVariable, values.DistributedVariable
    needs(distribute_utils, "create_mirrored_variable", "VARIABLE_CLASS_MAPPING", "VARIABLE_POLICY_MAPPING", "regroup")
    needs(distribute_utils, "is_mirrored", "select_replica")
    needs(_mirrored, "_get", "_get_cross_replica", "_get_replica", "_update_replica", "_update_cross_replica")
    needs(_mirrored, "handle", "value", "read_value", "values", "_dense_var_to_tensor", "_trackable_children")
    needs(_mirrored, "_export_to_saved_model_graph", "_gather_saveables_for_checkpoint")
    # What a SavedModel has of a gate.
    needs(tf.saved_model.experimental.TrackableResource, "_create_resource", "_initialize", "resource_handle")
    needs(values, "_MirroredSaveable", "_SyncOnReadSaveable", "DistributedValues", "Mirrored", "PerReplicaSpec")
    needs(values._MirroredSaveable, "restore", "_mirrored_variable")
    needs(values.SyncOnReadVariable, "_get_cross_replica", "_update_replica", "_gather_saveables_for_checkpoint")
    needs(values._SyncOnReadSaveable, "restore", "_sync_on_read_variable")
    needs(_distributed, "_values", "_primary", "_get_on_device_or_primary", "_devices", "_aggregation")
    needs(_distributed, "_distribute_strategy", "_common_name", "_unique_id")
    needs(_distributed, "_distributed_container")  # which it gives to its components

    # Datasets and iterators: what is overridden, then what is used.
    for _dataset in (input_lib.DistributedDataset, input_lib.DistributedDatasetsFromFunction):
        needs(_dataset, "__iter__", "element_spec", "_enable_get_next_as_optional", "_strategy")
    needs(input_lib.DistributedDataset, "_cloned_datasets")
    needs(input_lib.DistributedDatasetsFromFunction, "_datasets")
    needs(input_lib, "_dummy_tensor_fn")
    needs(tf.TypeSpec, "_serialize", "_component_specs", "_to_components", "_from_components")
    needs(CompositeTensor, "_type_spec")
    for _spec in (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec):
        needs(_spec, "_batch", "_unbatch")
    needs(tf.data.Dataset, "_functions", "_inputs")  # see functions_of, inputs_of
    needs(op_def_registry, "get")
    needs(flat_map_op, "_FlatMapDataset")
    needs(flat_map_op._FlatMapDataset, "_map_func")

    needs(tf.RaggedTensorSpec, "_from_compatible_tensor_list", "_ragged_rank")  # see _keep_inner_axes
    needs(nest, "flatten_with_tuple_paths")
    needs(data_seeds, "get_seed")
    needs(context, "global_seed", "eager_mode", "context")
    needs(context.Context, "_initialized")
    needs(atomic_function, "from_func_graph")

    # Functions and graphs.
    needs(autograph_config, "CONVERSION_RULES")
    needs(autograph_rules, "DoNotConvert")
    needs(Function, "__call__", "_clone")
    needs(ConcreteFunction, "__call__", "_call_flat")
    needs(control_flow_v2_func_graphs, "CondBranchFuncGraph", "ControlFlowFuncGraph")
    needs(control_flow_util, "GraphOrParentsInXlaContext")
    needs(attr_value_pb2, "AttrValue")
    needs(auto_control_deps_utils, "READ_ONLY_RESOURCE_INPUTS_ATTR")  # what it does, check_effects sees
    needs(auto_control_deps_utils, "get_read_write_resource_inputs")
    needs(kernels, "get_registered_kernels_for_op")
    needs(tf.Operation, "_set_attr", "_control_flow_context")
    needs(tf.Operation, "_update_input", "_add_control_inputs", "_remove_all_control_inputs")  # see parts.py
    needs(tf.Graph, "_is_function", "_get_function")
    needs(ops, "get_default_graph", "init_scope")
    needs(record, "could_possibly_record", "record_operation")
except (ImportError, AttributeError) as error:  # a module, or a class in one
    raise ImportError(f"tfps supports {SUPPORTED}; TensorFlow {tf.__version__} does not fit: {error}") from error


DistributedDataset = input_lib.DistributedDataset
DistributedDatasetsFromFunction = input_lib.DistributedDatasetsFromFunction


def dummy_batch(element_spec: Structure) -> Structure:
    """Returns an empty batch, as TensorFlow gives it to replicas for which there is no data left."""
    return input_lib._dummy_tensor_fn(element_spec)


def paths_of(structure: Structure) -> list[tuple[str | int, ...]]:
    """Returns the keys and indices that lead to each value of `structure`, in the order of `tf.nest.flatten`."""
    return [path for path, _ in nest.flatten_with_tuple_paths(structure)]


def of_any_size(element_spec: Structure) -> Structure:
    """Returns `element_spec` with any batch size."""

    def rebatched(spec: Structure) -> Structure:
        try:
            return spec._unbatch()._batch(None)
        except (AttributeError, ValueError):  # no batch: None, scalars
            return spec

    return tf.nest.map_structure(rebatched, element_spec)


def flat_call(function: ConcreteFunction) -> Callable[..., Structure]:
    """Returns a fast caller of `function`, which does not match arguments with its signature: 0.07 ms, not 0.16 ms."""
    # Eager calls of the op StatefulPartitionedCall (0.02 ms) share one rendezvous: an error in one may end another.
    captured = function.captured_inputs
    return lambda *arguments: function._call_flat(list(arguments), captured)


def _translate_errors(original: Callable[..., Structure]) -> Callable[..., Structure]:
    """Raises an error of tfps that a graph's error carries (as text: no class is free), without frames of tfps."""

    def call(self: Function, *arguments: object, **named: object) -> Structure:
        try:
            return original(self, *arguments, **named)
        except Exception as error:
            better = in_part_error(error.message) if isinstance(error, tf.errors.OpError) else None
            if isinstance(error, tf.errors.InvalidArgumentError) and better is None:
                better = in_graph_error(error.message)
            if better is None:
                raise outlined(error)  # noqa: B904  # the same error
        raise better

    return call


def _keep_inner_axes(original: Callable[..., Structure]) -> Callable[..., Structure]:
    """A ragged part without rows, as TensorFlow makes it of a variant that has none, keeps its dense inner axes."""

    def read(spec: tf.RaggedTensorSpec, tensors: Sequence[tf.Tensor]) -> Structure:
        inner = spec.shape[1 + spec._ragged_rank :] if spec._ragged_rank > 0 and spec.shape.rank is not None else None
        if not inner:
            return original(spec, tensors)
        if tf.executing_eagerly():
            return dummy_batch(spec) if tensors[0].shape.num_elements() == 0 else original(spec, tensors)
        found = original(spec, tensors)
        if not inner.is_fully_defined() or 0 in inner.as_list():
            return found
        return found.with_flat_values(tf.reshape(found.flat_values, [-1, *inner]))

    return read


_ERRORS = "a call of a function, those of Keras' steps included, raises errors of tfps as they are"
_unordered: weakref.WeakSet[tf.data.Dataset] = weakref.WeakSet()


def _interleave(original: Callable[..., tf.data.Dataset]) -> Callable[..., tf.data.Dataset]:
    """Notes who asks for any order: the dataset that comes does not tell."""

    @functools.wraps(original)
    def interleave(*args: object, **options: object) -> tf.data.Dataset:
        made = original(*args, **options)
        if False in (options.get("deterministic"), *args[5:6]):
            _unordered.add(made)
        return made

    return interleave


PATCHES = (
    Patch(
        tf.data.Dataset,
        "interleave",
        _interleave,
        "notes who asks for any order, which the ranks of a job then must not have",
        "tests/input/test_order.py",
    ),
    Patch(Function, "__call__", _translate_errors, _ERRORS, "tests/test_errors.py"),
    Patch(ConcreteFunction, "__call__", _translate_errors, _ERRORS, "tests/test_errors.py"),
    Patch(
        tf.RaggedTensorSpec,
        "_from_compatible_tensor_list",
        _keep_inner_axes,
        "a part of a batch without rows keeps the dense inner axes of its ragged tensors",
        "tests/input/test_global_batches.py",
    ),
)


def stopped() -> bool:
    """Whether this thread runs a replica function whose caller, which waits for it, has been interrupted (Ctrl-C)."""
    coordinator = getattr(threading.current_thread(), "coord", None)
    return coordinator is not None and bool(coordinator.should_stop())


def has_function(graph: tf.Graph, name: str) -> bool:
    """Whether `graph` calls the function `name`, directly or through a function that it calls."""
    return bool(graph._is_function(name))


def function_of(call: tf.Operation, attribute: str = "f") -> FuncGraph | None:
    """Returns the graph of a function that `call`, an op of a kind of PartitionedCall or If, calls, if it has one."""
    function = call.graph._get_function(call.get_attr(attribute).name)
    return getattr(function, "graph", None)


# AutoGraph must not rewrite functions of tfps, which run during tracing: it takes time, and not every version knows
# every expression. Functions that the program passes to them are still rewritten.
autograph_config.CONVERSION_RULES = (autograph_rules.DoNotConvert("tfps"), *autograph_config.CONVERSION_RULES)


def set_read_only_inputs(call: tf.Tensor, indices: Sequence[int]) -> None:
    """Marks resource inputs as read-only: TensorFlow must order uses of a gate's variables, but not of a queue."""
    value = attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue(i=indices))
    call.op._set_attr(auto_control_deps_utils.READ_ONLY_RESOURCE_INPUTS_ATTR, value)


def registered_kernels(op_type: str) -> Sequence[Structure]:
    """Returns TensorFlow's descriptions of all kernels of an op that have been registered by now."""
    return tuple(kernels.get_registered_kernels_for_op(op_type).kernel)


def resources_of(op: tf.Operation) -> tuple[list[int], list[int]]:
    """Returns the ids of the resource tensors that `op` only reads, and of those that it may write."""
    reads, writes = auto_control_deps_utils.get_read_write_resource_inputs(op)
    return [id(each) for each in reads], [id(each) for each in writes]


def must_compile(call: tf.Operation) -> None:
    """Makes XLA compile the function that `call` calls."""
    call._set_attr("_XlaMustCompile", attr_value_pb2.AttrValue(b=True))


def renamed(function: ConcreteFunction, name: str) -> ConcreteFunction:
    """`function` under a name without the number that TensorFlow adds, which differs from one run to the next."""
    made = atomic_function.from_func_graph(
        name, function.graph, dict(function.function_def.attr), function.function_type
    )
    return ConcreteFunction(made)


def replace_input(op: tf.Operation, before: tf.Tensor, after: tf.Tensor) -> None:
    """Makes `op` take `after` wherever it takes `before`."""
    for place, each in enumerate(op.inputs):
        if each is before:
            op._update_input(place, after)


def set_control_inputs(op: tf.Operation, after: Sequence[tf.Operation]) -> None:
    """Makes `op` wait for `after` and, beside its inputs, for nothing else."""
    op._remove_all_control_inputs()
    op._add_control_inputs(list(after))


def identities(kind: str, tensors: Sequence[tf.Tensor], gradient: Callable[..., Structure]) -> list[tf.Tensor]:
    """Tensors as they are, in a graph, of which `gradient`, registered as `kind`, is the gradient.

    It is called with the op's inputs and the gradients of its outputs. Beside it nothing is kept: `tf.custom_gradient`
    keeps the graph for ever.
    """
    with ops.get_default_graph().gradient_override_map({"IdentityN": kind}):
        found: list[tf.Tensor] = tf.identity_n(tensors)
    record.record_operation(kind, found, tensors, lambda *outputs: gradient(tensors, *outputs))
    return found


def in_xla(graph: tf.Graph) -> bool:
    """Whether `graph` or one around it is compiled by XLA."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def eagerly() -> AbstractContextManager[None]:
    """In the block ops run at once, as finalizers need it: `tf.init_scope` stays in a `tf.Graph` under construction."""
    return cast(AbstractContextManager[None], context.eager_mode())


def has_begun() -> bool:
    """Whether TensorFlow has set up what runs ops, for which it reads flags in the environment."""
    return bool(context.context()._initialized)


def is_seeded() -> bool:
    """Whether the program has set a global seed, which random ops created now depend on."""
    graph = ops.get_default_graph()
    return (context.global_seed() if tf.executing_eagerly() else graph.seed) is not None


def made_by_generator(dataset: tf.data.Dataset) -> bool:
    """Whether `dataset` yields batches of a generator as they are, as Keras' PyDataset; False if it is unknown."""
    while True:
        function = getattr(getattr(dataset, "_map_func", None), "function", None)
        if any(op.type == "GeneratorDataset" for op in (function.graph.get_operations() if function else ())):
            return True
        inputs = inputs_of(dataset)
        if len(inputs) != 1 or "Batch" in type(dataset).__name__:
            return False
        dataset = inputs[0]


def inputs_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the datasets that `dataset` reads."""
    inputs: list[tf.data.Dataset] = dataset._inputs()
    return inputs


def functions_of(dataset: tf.data.Dataset) -> list[Function]:
    """Returns the functions that `dataset` itself calls; `function.graph` of each is its graph."""
    functions: list[Function] = dataset._functions()
    return functions


def keeps_elements(dataset: tf.data.Dataset) -> bool:
    """Whether the elements of `dataset` are those of the one that it reads: some, in some order."""
    return isinstance(dataset, dataset_ops.UnaryUnchangedStructureDataset)


def is_stateful(op_type: str) -> bool:
    """Whether an op may give something else each time, or have an effect."""
    found = op_def_registry.get(op_type)
    return found is None or found.is_stateful


def _nodes(dataset: tf.data.Dataset) -> Iterator[tf.compat.v1.NodeDef]:
    """Yields the ops of the functions that `dataset` calls itself and of those that these call."""
    for function in functions_of(dataset):
        graph = function.function.graph.as_graph_def()
        yield from graph.node
        for each in graph.library.function:
            yield from each.node_def


def reads_files(dataset: tf.data.Dataset) -> bool:
    """Whether TensorFlow may find files in `dataset` that it can divide between workers, or a service divides it."""

    def of_files(name: str) -> bool:
        return any(part in name for part in ("Record", "TextLine", "SSTable", "DataService"))

    if of_files(type(dataset).__name__):
        return True
    return any(of_files(node.op) for node in _nodes(dataset)) or any(map(reads_files, inputs_of(dataset)))


def is_unordered(dataset: tf.data.Dataset) -> bool:
    """Whether a parallel op of `dataset` may yield its elements in an order by chance, as a program has asked for."""
    said = dataset.options().deterministic is False, str(getattr(dataset, "_deterministic", "")).lower() == "false"
    if any(said) or dataset in _unordered:
        return True
    if any(node.attr["deterministic"].s == b"false" for node in _nodes(dataset) if "deterministic" in node.attr):
        return True
    return any(map(is_unordered, inputs_of(dataset)))


class _InOrder(dataset_ops.UnaryUnchangedStructureDataset):
    def __init__(self, dataset: tf.data.Dataset) -> None:
        # Beside the option, which does not win over what an op itself says.
        variant = tf.raw_ops.OptimizeDatasetV2(
            input_dataset=dataset._variant_tensor,
            optimizations_enabled=["make_deterministic"],
            optimizations_disabled=[],
            optimizations_default=[],
            **dataset._flat_structure,
        )
        super().__init__(dataset, variant)


def in_order(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns `dataset`, whose parallel ops yield elements in the order in which they would without others."""
    options = tf.data.Options()
    options.deterministic = True
    return as_long_as(dataset, _InOrder(dataset).with_options(options))


def as_long_as(dataset: tf.data.Dataset, made: tf.data.Dataset) -> tf.data.Dataset:
    """Returns `made`, which has as many elements as `dataset`, of which it is made, but does not show it."""
    known = int(dataset.cardinality())
    if known == tf.data.experimental.UNKNOWN_CARDINALITY:
        return made
    return made.apply(tf.data.experimental.assert_cardinality(known))


def outer_graphs(graph: tf.Graph) -> list[tf.Graph]:
    """`graph` and the function graphs around it, innermost first."""
    chain = []
    while isinstance(graph, FuncGraph):
        chain.append(graph)
        graph = graph.outer_graph
    return chain


def control_flow_free(graph: tf.Graph, *, loops: bool = True) -> tf.Graph:
    """Returns `graph`, or the graph around the tf.cond (with `loops` also the tf.while_loop) that it is a part of."""
    parts = control_flow_v2_func_graphs
    while isinstance(graph, parts.ControlFlowFuncGraph if loops else parts.CondBranchFuncGraph):
        graph = graph.outer_graph
    return graph


def is_differentiated() -> bool:
    """Whether a gradient tape of this thread may record what is computed now, as in training."""
    return bool(record.could_possibly_record())


# What these names do.


def orders_what_is_not_only_read() -> bool:
    """Whether a later use of a variable waits for a call that takes it and declares no read-only inputs."""
    return _second_waits(lambda resource: None, only_read=[])


def leaves_unordered_what_is_only_read() -> bool:
    """Whether calls that enqueue to one queue run in any order if they declare it read-only."""
    return not _second_waits(lambda queue: tf.raw_ops.QueueEnqueueV2(handle=queue, components=[0]), only_read=[0])


def finds_generators() -> bool:
    """Whether batches made by a Python generator are told apart from batches that TensorFlow makes of its rows."""
    made = tf.data.Dataset.from_generator(lambda: iter([[0]]), output_signature=tf.TensorSpec([None], tf.int64))
    return made_by_generator(made.prefetch(1)) and not made_by_generator(made.batch(1))


@functools.cache
def check_effects() -> None:
    """Runs these checks when a process creates its first strategy; takes 0.1 s."""
    with tf.init_scope():
        for effect, without in {
            orders_what_is_not_only_read: "variables could be read before their update",
            leaves_unordered_what_is_only_read: "gradients would wait for each other",
            finds_generators: "workers would get whole batches of a generator in turn, not their rows of each",
        }.items():
            if not effect():
                raise UnsupportedError(
                    f"tfps supports {SUPPORTED}; TensorFlow {tf.__version__} does not fit: {without} "
                    f"({effect.__name__} is False)"
                )


def _second_waits(uses: Callable[[tf.Tensor], object], only_read: list[int]) -> bool:
    """Whether TensorFlow makes the second of two calls of `uses`, with read-only inputs `only_read`, wait."""
    resource = tf.TensorSpec([], tf.resource)

    @tf.function(autograph=False, input_signature=[resource])
    def tfps_use(resource: tf.Tensor) -> tf.Tensor:
        uses(resource)
        return tf.constant(True)

    calls: list[tf.Operation] = []

    @tf.function(autograph=False, input_signature=[resource])
    def tfps_two_uses(resource: tf.Tensor) -> None:
        for _ in range(2):
            call = tfps_use.get_concrete_function()(resource)
            set_read_only_inputs(call, only_read)
            calls.append(call.op)

    tfps_two_uses.get_concrete_function()
    first, second = calls
    return first in second.control_inputs
