"""Counts what a rank computes, moves, sends and holds, operator by operator and graph by graph."""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import select_decomp_table  # here: forked processes need not import it again
from torch._ops import OpOverload
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operator → (kind, which argument is the whole tensor, whose bytes count; -1: the result).
COLLECTIVES = {
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "alltoall_base_": ("all_to_all", 1),
    "all_gather_into_tensor": ("all_gather", -1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "all_reduce": ("all_reduce", 0),
    "all_to_all_single": ("all_to_all", 0),
}
MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "_scaled_mm": 0}  # operator → the argument whose last dim is summed over
# Operator → (matmuls of queries by keys, where the queries are, where `is_causal` is).
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": (2, 0, 4),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (5, 1, 7),
}
COMMUNICATION = ("c10d", "_c10d_functional")  # namespaces of operators
REDUCTIONS = frozenset({torch.ops.aten.amax, torch.ops.aten.max, torch.ops.aten.sum, torch.ops.aten.mean})
RANDOM = {run_and_save_rng_state: 0, run_with_rng_state: 1}  # operator → the argument that is the operator it runs


class Matmul(NamedTuple):
    """A matmul of [rows, inner] by [inner, columns], and the type of its operands."""

    kind: str
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        """Operations."""
        return 2 * self.rows * self.inner * self.columns


class Message(NamedTuple):
    """A kind of collective on an axis of the mesh; "world" if its group has all ranks."""

    axis: str
    kind: str


# What → how much of it: a Matmul → how many; a Message → bytes of the whole tensors; "attention" → operations; "moved",
# "update" → bytes that everything else reads and writes, fused where compiled, before the update and in it.
Counts = Counter[Any]


class Tally(TorchDispatchMode):
    """Counts collectives, matmuls, bytes moved, and the bytes of all storages made since it began.

    Outside a compiled graph each operator reads its inputs and writes its results.
    """

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # torch.compile refuses to run under others

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}  # storage → bytes
        self.live = 0
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what came before the step, except for what is held."""
        self.counts: Counts = Counter()
        self.peak = self.live
        self.part = "moved"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor, say: its inner tensors come next
        result = func(*args, **(kwargs or {}))
        results = _tensors(result)
        for x in results:
            self.count(x)
        if _is_call(func):
            self.counts += _count_call(func, args, result)
        else:
            inputs = _tensors((args, kwargs))
            written = _written(func, args, inputs, results)
            if not written and not func._schema.is_mutable:
                return result  # nothing is moved: a view
            self.counts[self.part] += sum(map(_size, [*inputs, *written]))
        self.peak = max(self.peak, self.live)
        return result

    def count(self, x: Tensor) -> None:
        """Count the memory of a tensor until it is freed."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self.held:
            weakref.finalize(storage, self._free, key)
        self._resize(key, _held_bytes(x))

    def _resize(self, key: int, size: int) -> None:
        self.live += size - self.held.get(key, 0)
        self.held[key] = size

    def _free(self, key: int) -> None:
        self.live -= self.held.pop(key)

    def backend(self, *args: Any, **kwargs: Any) -> Any:
        """A backend for torch.compile: inductor's graphs of forward and backward, counted once, and empty results."""

        def compile(graph: fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
            kernels = Kernels(graph.graph)

            def run(arguments: list[Any]) -> Any:
                before = self.live
                given = {_storage(x): place for place, x in enumerate(arguments) if isinstance(x, Tensor)}
                sizes = {key: self.held.get(key, 0) for key in given}
                results = kernels.results(arguments)
                arguments.clear()
                freed = {place: sizes[key] for key, place in given.items() if key not in self.held}
                self.counts += kernels.counts
                self.counts[self.part] += kernels.moved
                self.peak = max(self.peak, before + kernels.peak(freed))
                return results

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        compiler = aot_autograd(
            fw_compiler=compile,
            bw_compiler=compile,
            decompositions=select_decomp_table,
            partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
            keep_inference_input_mutations=True,
        )
        return compiler(*args, **kwargs)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside, also resizes of storages, by which FSDP2 frees and regains gathered weights: no operators."""
        resize = torch.UntypedStorage.resize_

        def counted_resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self.held:
                self._resize(storage._cdata, size)
                self.peak = max(self.peak, self.live)
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", counted_resize), self:
            yield


class Kernels:
    """What the kernels of a compiled graph compute, move and hold.

    Operators between the same matmuls, collectives and reductions over columns (on one *level*) are one kernel. It
    writes what something else needs, and computes again whatever else it needs itself, as inductor does. Tensors go by
    their storages, operators by their places.
    """

    def __init__(self, graph: fx.Graph):
        for node in graph.nodes:
            if node.target in RANDOM:
                first = RANDOM[node.target]
                node.target = node.args[first]
                node.args = node.args[first + 1 :]
        operators = [node for node in graph.nodes if isinstance(node.target, OpOverload)]
        self.inputs = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
        self.outputs = _values(graph.output_node().args[0])
        # The place where a tensor is made, its bytes. Inputs were counted before.
        self.made = dict.fromkeys(map(_storage, _tensors(self.inputs)), (0, 0))
        self.needed = {*self.made, *map(_storage, _tensors(self.outputs))}  # what is in memory
        for node in operators:
            if _is_call(node.target):
                self.needed.update(map(_storage, _tensors(_values(node.args))))
        self.counts: Counts = Counter()
        self.sizes: dict[int, int] = {}
        self.sources: dict[int, set[int]] = {}  # of a tensor inside a kernel: what it is computed from
        self.last: dict[int, int] = {}  # the place of its last use
        self.looks: list[int] = []  # places where memory is looked at
        self.levels: dict[int, int] = {}  # of the first kernel that may use it
        self.reads: set[tuple[int, int]] = set()  # level, tensor
        self.writes: set[tuple[int, int]] = set()
        for place, node in enumerate(operators):
            self._add(place, node)
        self.looks.append(len(operators))
        self._use(len(operators), _tensors(self.outputs))
        self.moved = sum(self.sizes[key] for _, key in [*self.writes, *(self.reads - self.writes)])

    def _use(self, place: int, tensors: Sequence[Tensor]) -> set[int]:
        """What is read from memory for these tensors."""
        read = set()
        for x in tensors:
            key = _storage(x)
            self.sizes.setdefault(key, _size(x))
            read |= self.sources.get(key, {key})
        self.last |= dict.fromkeys(read, place)
        return read

    def _add(self, place: int, node: fx.Node) -> None:
        func: Any = node.target
        args = _values(node.args)
        inputs = _tensors(_values(node.all_input_nodes))
        result = node.meta.get("val")  # none: of an operator that only writes in place
        results = _tensors(result)
        read = self._use(place, inputs)
        level = max((self.levels.get(_storage(x), 0) for x in inputs), default=0)
        if _is_call(func):
            self.counts += _count_call(func, args, result)
            self.made |= {_storage(x): (place, _held_bytes(x)) for x in results}
            self.levels |= {_storage(x): level + 1 for x in results}
            self.looks.append(place)
            return
        largest = max((x.numel() for x in inputs), default=0)
        for x in _written(func, args, inputs, results):
            key = _storage(x)
            is_small = x.numel() < largest
            self.levels[key] = level + (is_small and _reduces_columns(func, args))
            if key not in self.needed and not is_small:
                self.sources[key] = read
                continue
            self.sizes[key] = _size(x)
            self.made.setdefault(key, (place, _held_bytes(x)))
            self.reads |= {(level, source) for source in read}
            self.writes.add((level, key))

    def results(self, arguments: Sequence[Any]) -> list[Any]:
        """Results without values: in new memory, or in that of an argument."""
        owners = {_storage(x): own for x, own in zip(self.inputs, arguments, strict=True) if isinstance(x, Tensor)}
        found = []
        for x in self.outputs:
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in owners:
                    numbers = int(storage.nbytes()) // x.element_size()
                    owners[storage._cdata] = torch.empty(numbers, dtype=x.dtype, device=x.device)
                x = owners[storage._cdata].as_strided(x.shape, x.stride(), x.storage_offset())
            found.append(x)
        return found

    def peak(self, freed: Mapping[int, int]) -> int:
        """The most bytes held beside those of before. `freed`: number of an argument freed after use → bytes."""
        ends = {number: self.last.get(_storage(self.inputs[number]), 0) for number in freed}
        peak = 0
        for look in self.looks:
            made = sum(size for key, (place, size) in self.made.items() if place <= look <= self.last.get(key, place))
            gone = sum(size for number, size in freed.items() if ends[number] < look)
            peak = max(peak, made - gone)
        return peak


def _values(nodes: Any) -> Any:
    """The tensors, without values, that nodes of a graph stand for."""
    return fx.node.map_arg(nodes, lambda node: node.meta.get("val"))


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _size(x: Tensor) -> int:
    return min(x.numel() * x.element_size(), int(x.untyped_storage().nbytes()))


def _held_bytes(x: Tensor) -> int:
    """Bytes of a tensor's memory. Masks take none: kernels of GPUs get them in blocks."""
    return 0 if x.dtype == torch.bool else int(x.untyped_storage().nbytes())


def _name(func: Any) -> str:
    return str(func.name().partition("::")[2].partition(".")[0])


def _is_call(func: Any) -> bool:
    """Whether an operator is a kernel of its own: a collective, a matmul or attention."""
    return func.namespace in COMMUNICATION or _name(func) in MATMULS or _name(func) in ATTENTION


def _count_call(func: Any, args: Sequence[Any], result: Any) -> Counts:
    """The bytes of a collective, a matmul, or the operations of attention."""
    name = _name(func)
    if name in COLLECTIVES and func.namespace in COMMUNICATION:
        kind, place = COLLECTIVES[name]
        whole = _tensors(result if place < 0 else args[place])
        return Counter({Message(_axis_of(args), kind): sum(x.numel() * x.element_size() for x in whole)})
    if name in MATMULS:
        kind = str(args[0].dtype).removeprefix("torch.")
        if kind.startswith("float8"):
            kind = "float8"
        inner = args[MATMULS[name]].shape[-1]
        columns = result.shape[-1]
        return Counter({Matmul(kind, result.numel() // columns, inner, columns): 1})
    if name in ATTENTION:
        matmuls, first, causal = ATTENTION[name]
        q = args[first]
        k = args[first + 1]
        operations = matmuls * 2 * q.numel() * k.shape[2]
        if len(args) > causal and args[causal]:
            operations //= 2
        return Counter({"attention": operations})
    return Counter()


def _written(func: Any, args: Sequence[Any], inputs: Sequence[Tensor], results: Sequence[Tensor]) -> list[Tensor]:
    """What an operator writes: new tensors, and those it changes in place. None for a view."""
    if "empty" in func.name():
        return []
    keys = set(map(_storage, inputs))
    written = [x for x in results if _storage(x) not in keys]
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info and argument.alias_info.is_write:
            written += _tensors(value)
    return written


def _axis_of(args: Sequence[Any]) -> str:
    """The mesh axis of the group among a collective's arguments; "world" if it has all ranks."""
    boxed = [argument for argument in args if isinstance(argument, torch.ScriptObject)]  # the group, then an operation
    if boxed:
        group = dist.ProcessGroup.unbox(boxed[0])
    else:
        group = dist.distributed_c10d._resolve_process_group(args[-1])
    name = group.group_desc
    return name.removeprefix("mesh_") if name.startswith("mesh_") else "world"


def _reduces_columns(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator needs more than a row of a tensor for its result, which only another kernel can use."""
    if func.overloadpacket not in REDUCTIONS:
        return False
    dims = range(args[0].ndim) if len(args) == 1 else args[1]
    return any(args[0].stride(dim) != 1 for dim in dims)
