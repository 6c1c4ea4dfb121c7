"""Counts what a rank computes, moves, sends and holds, operator by operator and graph by graph."""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
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
COMMUNICATION = ("c10d", "_c10d_functional")  # namespaces of operators
# Operations of matmuls, and of attention without a mask.
OPERATIONS = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
MATMUL_KINDS = {1: "float8", 2: "bfloat16", 4: "float32"}  # by the bytes of a number


class Message(NamedTuple):
    """A kind of collective on an axis of the mesh; "world" if its group has all ranks."""

    axis: str
    kind: str


# What → how much of it. A Message → bytes of the whole tensors; a kind of matmul, "attention" → operations; "operands"
# → bytes that matmuls read and write; "moved", "update" → bytes that everything else reads and writes, fused where
# compiled, before the update and in it.
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
            if written:
                self.counts[self.part] += sum(map(_size, [*inputs, *written]))
        self.peak = max(self.peak, self.live)
        return result

    def count(self, x: Tensor) -> None:
        """Count the memory of a tensor until it is freed. Masks take none: kernels of GPUs get them in blocks."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self.held:
            weakref.finalize(storage, self._free, key)
        size = int(storage.nbytes())
        if x.dtype == torch.bool:
            size = 0
        self._resize(key, size)

    def _resize(self, key: int, size: int) -> None:
        self.live += size - self.held.get(key, 0)
        self.held[key] = size

    def _free(self, key: int) -> None:
        self.live -= self.held.pop(key)

    def backend(self) -> Any:
        """A backend for torch.compile: inductor's graphs of forward and backward, counted once, and empty results."""
        return aot_autograd(
            fw_compiler=self._compile,
            bw_compiler=self._compile,
            decompositions=select_decomp_table,
            partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
            keep_inference_input_mutations=True,
        )

    def _compile(self, module: fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
        graph = Graph(module.graph)

        def run(arguments: list[Any]) -> Any:
            self.counts += graph.counts
            self.counts[self.part] += graph.moved
            results = graph.results(arguments)
            arguments.clear()
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

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


class Graph:
    """What a compiled graph computes and moves.

    In memory are its inputs, its results, and what its matmuls, attention and collectives take and return. Everything
    else is fused: of each tensor in memory it reads once what it needs, and writes once what it computes. Tensors go by
    their storages.
    """

    def __init__(self, graph: fx.Graph):
        self.inputs = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
        self.outputs = _values(graph.output_node().args[0])
        self.counts: Counts = Counter()
        in_memory = _tensors([self.inputs, self.outputs])
        read: dict[int, int] = {}  # storage → bytes
        written: dict[int, int] = {}
        for node in graph.nodes:
            if not isinstance(node.target, OpOverload):
                continue
            args = _values(node.args)
            result = node.meta.get("val")  # none: of an operator that only writes in place
            if _is_call(node.target):
                self.counts += _count_call(node.target, args, result)
                in_memory += _tensors([args, result])
                continue
            inputs = _tensors(_values(node.all_input_nodes))
            outputs = _written(node.target, args, inputs, _tensors(result))
            if outputs:
                read |= {_storage(x): _size(x) for x in inputs}
                written |= {_storage(x): _size(x) for x in outputs}
        keys = set(map(_storage, in_memory))
        self.moved = sum(size for key, size in [*read.items(), *written.items()] if key in keys)

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


def _values(nodes: Any) -> Any:
    """The tensors, without values, that nodes of a graph stand for."""
    return fx.node.map_arg(nodes, lambda node: node.meta.get("val"))


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _size(x: Tensor) -> int:
    return min(x.numel() * x.element_size(), int(x.untyped_storage().nbytes()))


def _is_call(func: Any) -> bool:
    """Whether an operator is a kernel of its own: a collective, a matmul or attention."""
    return func.namespace in COMMUNICATION or func.overloadpacket in OPERATIONS


def _count_call(func: Any, args: Sequence[Any], result: Any) -> Counts:
    """The bytes of a collective, the operations and operands of a matmul, or the operations of attention."""
    name = func.overloadpacket.__name__
    if name in COLLECTIVES:
        kind, place = COLLECTIVES[name]
        whole = _tensors(result if place < 0 else args[place])
        return Counter({Message(_axis_of(args), kind): sum(x.numel() * x.element_size() for x in whole)})
    if func.overloadpacket not in OPERATIONS:
        return Counter()  # a wait
    operations = OPERATIONS[func.overloadpacket](*args, out_val=result)
    if "attention" in name:
        return Counter({"attention": operations // 2})  # causal
    kind = MATMUL_KINDS[args[0].element_size()]
    return Counter({kind: operations, "operands": sum(map(_size, _tensors([args, result])))})


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
