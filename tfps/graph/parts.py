"""Moves the ops of a traced step into calls of functions that XLA compiles, between its gates and its sends.

Autodiff is done then, so any ops may be moved; `cut.py` says which ones together. What XLA cannot compile stays where
it is (`kernels.py`). Constants and arithmetic on sizes are made again in each part: XLA must know them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from tfps.graph.cut import NONE, Class, Node, cut
from tfps.graph.kernels import Compilable, is_sized_by_values
from tfps.graph.ops import call_stateless
from tfps.graph.tf_private import is_stateful, must_compile, renamed, replace_input, resources_of, set_control_inputs
from tfps.graph.timestamps import Note
from tfps.types import Structure

NAME = "tfps_part"  # of the functions, with a digest
_LEAST_OPS = 4  # of a part: a call costs more than it saves
_SIZES = ("Shape", "ShapeN", "Size", "Rank")
_MANY = 6  # layers named


@dataclass(frozen=True)
class Traced:
    """A step, or another replica function, that has just been traced."""

    graph: tf.Graph
    begin: int  # number of ops of `graph` before it
    results: Structure  # what it returns
    groups: int = 1
    # Tensors of `graph` with the group of the variable that they are the gradient of; if there are none, parts compute
    # whatever the function returns or assigns.
    gradients: Sequence[tuple[tf.Tensor, int]] = ()
    handles: Mapping[int, int] = field(default_factory=dict)  # group of a variable by the id of its resource in `graph`
    notes: Sequence[Note] = ()  # of the clock
    arguments: Structure = ()  # ragged and sparse ones have other sizes in each batch


@dataclass(frozen=True)
class Part:
    """A part of a step that XLA compiles."""

    name: str  # of the function
    ops: int
    waits: int  # the last group of variables at whose gates it waits; -1: none
    sends: int  # the last group of which a gradient needs it
    layers: Sequence[str]  # scopes of its ops
    call: tf.Operation


class Parts:
    """The parts of `traced`; making them rewires its graph."""

    def __init__(self, traced: Traced, device: str) -> None:
        self._graph, compilable = traced.graph, Compilable(device)
        self._ops = traced.graph.get_operations()[traced.begin :]
        self._place = {op: place for place, op in enumerate(self._ops)}
        self._nodes = [op.node_def for op in self._ops]
        compiled = [compilable(op, node) for op, node in zip(self._ops, self._nodes, strict=True)]
        composites = [each for each in tf.nest.flatten(traced.arguments) if not isinstance(each, tf.Tensor)]
        self._varying = {id(each) for each in tf.nest.flatten(composites, expand_composites=True)}
        self.sized = self._sized(traced.arguments)  # what the step takes: XLA compiles its parts for their sizes
        self._fixed, unsized = self._sort(compiled)
        self.unsized = [op for op, is_one, can in zip(self._ops, unsized, compiled, strict=True) if is_one and can]
        self._can = [can and not is_one for can, is_one in zip(compiled, unsized, strict=True)]
        flat = tf.nest.flatten(traced.results, expand_composites=True)
        # What waits within a part to look at the clock would make the part return more.
        self._probes = {probe for note in traced.notes for probe in note.probes if probe.type == "StridedSlice"}
        self._results = {id(each) for each in flat if tf.is_symbolic_tensor(each)}
        self._moved: dict[int, tf.Tensor] = {}  # by id of the tensor in whose place it is
        self._calls: dict[tf.Operation, tf.Operation] = {}  # by op that has been moved
        self.parts = list(self._make(self._classes(traced)))
        self._move_notes(traced.notes)

    def moved(self, structure: Structure) -> Structure:
        """Returns `structure` with what parts return in place of what their ops returned."""

        def now(tensor: tf.Tensor) -> tf.Tensor:
            if (found := self._moved.get(id(tensor))) is None:
                return tensor
            for name, value in vars(tensor).items():  # what tfps knows of it
                if name.startswith("_tfps"):
                    setattr(found, name, value)
            return found

        return tf.nest.map_structure(now, structure, expand_composites=True)

    def _sized(self, arguments: Structure) -> list[tf.Tensor]:
        flat = [each for each in tf.nest.flatten(arguments, expand_composites=True) if tf.is_symbolic_tensor(each)]
        given = {id(each) for each in flat}
        flat += [each for op in self._ops for each in op.inputs if each.op not in self._place]
        flat += [op.outputs[0] for op in self._ops if op.type == "Placeholder"]  # captured from around the graph
        found = {id(each): each for each in flat if each.graph is self._graph}
        return [
            each
            for key, each in found.items()
            if each.dtype not in (tf.resource, tf.variant) and each.shape.rank is not None and key not in self._varying
            if key in given or not each.shape.is_fully_defined()
        ]

    # What stays, and what is made again in each part.

    def _sort(self, compiled: Sequence[bool]) -> tuple[list[bool], list[bool]]:
        """Returns which ops depend on constants and sizes only, and which take or make tensors sized by data.

        Of the first, each part makes its own. With the second XLA would compile a part anew in each step.
        """
        fixed, stays = list[bool](), list[bool]()
        varying = set(self._varying)  # ids of tensors whose sizes depend on data
        for place, (op, node) in enumerate(zip(self._ops, self._nodes, strict=True)):
            made = [known if 0 <= (known := self._place.get(each.op, -1)) < place else -1 for each in op.inputs]
            takes = any(id(each) in varying for each in op.inputs)
            of_fixed = bool(made) and all(each >= 0 and fixed[each] for each in made)
            known = op.type == "Const" or (op.type in _SIZES and not takes) or of_fixed
            fixed.append(compiled[place] and known)
            makes = not fixed[place] and not is_stateful(op.type) and is_sized_by_values(op, node)
            stays.append(takes or makes)
            if makes:
                varying |= set(map(id, op.outputs))
            elif takes:  # a number of values counts, too: what it sizes is sized by data
                varying |= {id(each) for each in op.outputs if not each.shape.is_fully_defined() or _counts(each)}
        return fixed, stays

    def _classes(self, traced: Traced) -> dict[Class, list[int]]:
        """Returns the places of each part's ops, in an order in which the parts can run."""
        waits, sends = [NONE] * len(self._ops), [NONE] * len(self._ops)
        for place, op in enumerate(self._ops):
            groups = [traced.handles.get(id(each), NONE) for each in op.inputs if each.dtype == tf.resource]
            waits[place] = max(groups, default=NONE)
            if not traced.gradients and is_stateful(op.type):
                sends[place] = 0
        flat = tf.nest.flatten(traced.results, expand_composites=True)
        gradients = traced.gradients or [(each, 0) for each in flat if tf.is_symbolic_tensor(each)]
        for tensor, group in gradients:
            if (place := self._place.get(tensor.op, -1)) >= 0:
                sends[place] = max(sends[place], group)
        earlier = self._orders()
        for place, op in enumerate(self._ops):
            known = (self._place.get(each, -1) for each in (*(one.op for one in op.inputs), *op.control_inputs))
            earlier[place].update(each for each in known if each >= 0)
        numbers = zip(earlier, self._can, waits, sends, strict=True)
        nodes = [Node(sorted(each), movable, wait, send) for each, movable, wait, send in numbers]
        members: dict[Class, list[int]] = {}
        for place, own in enumerate(cut(nodes)):
            if own is not None and not self._fixed[place]:
                members.setdefault(own, []).append(place)
        return dict(sorted(members.items(), key=lambda item: item[0].order))

    def _orders(self) -> list[set[int]]:
        """Returns what each op will come after when TensorFlow orders the uses of resources, at the function's end."""
        orders: list[set[int]] = [set() for _ in self._ops]
        written, read = dict[int, int](), dict[int, list[int]]()
        without = -1  # the last stateful op without a resource
        for place, op in enumerate(self._ops):
            reads, writes = resources_of(op)
            for resource in (*reads, *writes):
                if resource in written:
                    orders[place].add(written[resource])
            for resource in reads:
                read.setdefault(resource, []).append(place)
            for resource in writes:
                orders[place].update(each for each in read.pop(resource, ()) if each != place)
                written[resource] = place
            if is_stateful(op.type) and not (reads or writes):
                orders[place].update({without} - {-1})
                without = place
        return orders

    # Making calls.

    def _make(self, classes: Mapping[Class, Sequence[int]]) -> Iterator[Part]:
        calls = self._calls
        for own, places in classes.items():
            if len(places) >= _LEAST_OPS and (part := self._call(own, places)) is not None:
                calls.update((self._ops[place], part.call) for place in places)
                yield part
        for op in self._ops:
            if op not in calls and any(each in calls for each in op.control_inputs):
                after = [calls.get(each, each) for each in op.control_inputs]
                set_control_inputs(op, list(dict.fromkeys(after)))

    def _move_notes(self, notes: Sequence[Note]) -> None:
        """Has notes of the clock wait for parts: a variable is wanted when a part that reads it has all else."""
        for note in notes:
            users = () if note.handle is None else note.handle.consumers()
            reads = {op for op in users if op.type == "ReadVariableOp"}
            part = next((each.call for each in self.parts if any(i.op in reads for i in each.call.inputs)), None)
            if part is not None:
                after = {each.op for each in part.inputs if each.op.type != "ReadVariableOp"}
            else:
                after = {self._end_of(probe) for probe in note.probes}
            set_control_inputs(note.op, list(after))

    def _end_of(self, probe: tf.Operation) -> tf.Operation:
        """The part that computes what `probe` waits for; if none does, the probe itself."""
        calls = [self._calls[each.op] for each in probe.inputs if each.op in self._calls]
        return calls[0] if calls else self._calls.get(probe, probe)

    def _call(self, own: Class, places: Sequence[int]) -> Part | None:
        """Puts a call in the place of the ops at `places`; None if nothing uses what they compute."""
        inside, within = set(places), set(places)  # with what is made again
        inputs: dict[int, tf.Tensor] = {}
        waiting = [each for place in places for each in self._ops[place].inputs]
        while waiting:
            tensor = waiting.pop()
            place = self._place.get(tensor.op, -1)
            if place in inside:
                continue
            if place >= 0 and self._fixed[place]:
                inside.add(place)
                waiting += tensor.op.inputs
            else:
                inputs[id(tensor)] = tensor
        outputs = [each for place in places for each in self._ops[place].outputs if self._leaves(each, within)]
        if not outputs:
            return None
        function, name = self._function(list(inputs.values()), sorted(inside), outputs)
        controls = {each for place in places for each in self._ops[place].control_inputs}
        after = [each for each in controls if self._place.get(each, -1) not in within]
        device = self._ops[places[0]].device or None
        given = [self._moved.get(key, each) for key, each in inputs.items()]
        inside_graph = self._graph.as_default(), tf.control_dependencies(None), tf.device(device), tf.name_scope("")
        with contextlib.ExitStack() as stack:
            for each in (*inside_graph, tf.control_dependencies(after)):
                stack.enter_context(each)
            returned = call_stateless(function, given)
        call = returned[0].op
        must_compile(call)
        for tensor, each in zip(outputs, returned, strict=True):
            each.set_shape(tensor.shape)
            self._moved[id(tensor)] = each
            for user in tensor.consumers():
                if user is not call and user not in self._probes and self._place.get(user, -1) not in within:
                    replace_input(user, tensor, each)
        layers = _scopes(self._ops[place] for place in places)
        return Part(name, len(places), own.waits, own.sends, layers, call)

    def _leaves(self, tensor: tf.Tensor, within: set[int]) -> bool:
        """Whether anything but the ops `within` a part takes `tensor`."""
        return id(tensor) in self._results or any(
            each not in self._probes and self._place.get(each, -1) not in within for each in tensor.consumers()
        )

    def _function(
        self, inputs: Sequence[tf.Tensor], places: Sequence[int], outputs: Sequence[tf.Tensor]
    ) -> tuple[Structure, str]:
        """The function of a part, and its name, which tells its contents: TensorFlow's cache on disk goes by it."""
        definition = tf.compat.v1.GraphDef(versions=self._graph.graph_def_versions)
        for place in places:
            node = definition.node.add()
            node.CopyFrom(self._nodes[place])
            node.device = ""
            del node.input[:]
            node.input.extend(each.name for each in self._ops[place].inputs)
            for attribute in [each for each in node.attr if each.startswith("_")]:
                del node.attr[attribute]
        names, results = [each.name for each in inputs], [each.name for each in outputs]
        contents = definition.SerializeToString(deterministic=True), *map(repr, (names, results, inputs))
        name = f"{NAME}_{hashlib.sha256(repr(contents).encode()).hexdigest()[:16]}"

        def part(*given: tf.Tensor) -> Sequence[tf.Tensor]:
            known = dict(zip(names, given, strict=True))
            found = tf.graph_util.import_graph_def(definition, input_map=known, return_elements=results, name="")
            return tuple(found)

        part.__name__ = name
        signature = [tf.TensorSpec(each.shape, each.dtype) for each in inputs]
        with tf.init_scope():
            compiled = tf.function(part, autograph=False, jit_compile=True, input_signature=signature)
            return renamed(compiled.get_concrete_function(), name), name


def _counts(tensor: tf.Tensor) -> bool:
    """Whether `tensor` may have sizes."""
    return bool(tensor.dtype.is_integer and tensor.shape.rank in (0, 1))


def _scopes(ops: Iterable[tf.Operation]) -> list[str]:
    """The scopes of `ops` as a program knows them: layers, without those of the backward pass."""
    names = dict[str, None]()
    for op in ops:
        scope = op.name.rpartition("/")[0].removeprefix("gradient_tape/").removeprefix("gradients/")
        if scope:
            names.setdefault(scope)
    return [each for each in names if not any(other.startswith(f"{each}/") for other in names)][:_MANY]
