"""Counts what a rank computes, moves, sends and holds, operator by operator."""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import select_decomp_table  # here: forked processes need not import it again
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
REDUCTIONS = frozenset({torch.ops.aten.amax, torch.ops.aten.max, torch.ops.aten.sum, torch.ops.aten.mean})
# Operator → what runs in its place: operators that are counted one by one.
INSIDE: dict[Any, Callable[..., Any]] = {
    run_and_save_rng_state: lambda operator, *args, **kwargs: (torch.empty(0), operator(*args, **kwargs)),
    run_with_rng_state: lambda _, operator, *args, **kwargs: operator(*args, **kwargs),
}


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

    Outside a compiled graph each operator reads its inputs and writes its results. Inside, operators between the same
    matmuls, collectives and reductions over columns (on one *level*) are one kernel. It writes what something else
    needs, and computes again whatever else it needs itself, as inductor does.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # torch.compile refuses to run under others

    def __init__(self) -> None:
        super().__init__()
        self.in_graph = False
        self.held: dict[int, tuple[int, int]] = {}  # storage → a number that no other storage had before, bytes
        self.n_storages = self.live = 0
        self.begin_step()
        self._begin_graph()

    def begin_step(self) -> None:
        """Forget what came before the step, except for what is held."""
        self.counts: Counts = Counter()
        self.peak = self.live
        self.part = "moved"

    def _begin_graph(self) -> None:
        """Forget the graph before. Its tensors go by their storages' numbers."""
        self.sizes: dict[int, int] = {}
        self.levels: dict[int, int] = {}  # of the first kernel that may use a tensor
        self.made: dict[int, tuple[int, list[int]]] = {}  # by a kernel: its level, what it used
        self.needed: set[int] = set()  # must be written
        self.freed: set[int] = set()
        self.samples: list[tuple[int, int, set[int]]] = []  # bytes held, last storage made, those freed by then

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor, say: its inner tensors come next
        name = func.name().partition("::")[2].partition(".")[0]
        if func in INSIDE:
            with self:
                return INSIDE[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        inputs, results = ([x for x in tree_leaves(of) if isinstance(x, Tensor)] for of in ((args, kwargs), result))
        for x in results:
            self.count(x)
        if func.namespace in ("c10d", "_c10d_functional") or name in MATMULS or name in ATTENTION:
            self._count_call(func, name, args, result)
            self.levels |= dict.fromkeys(map(self._number, results), self._level(inputs) + 1)
            self.needed.update(map(self._number, inputs))
            self._sample()
        elif func.namespace != "prim":
            self._count_moved(func, args, inputs, results)
        return result

    def _count_call(self, func: Any, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Count a collective, a matmul, or the operations of attention."""
        if name in COLLECTIVES and func.namespace in ("c10d", "_c10d_functional"):
            kind, place = COLLECTIVES[name]
            whole = tree_leaves(result if place < 0 else args[place])
            self.counts[Message(_axis_of(args), kind)] += sum(x.numel() * x.element_size() for x in whole)
        elif name in MATMULS:
            kind = str(args[0].dtype).removeprefix("torch.")
            if kind.startswith("float8"):
                kind = "float8"
            inner = args[MATMULS[name]].shape[-1]
            columns = result.shape[-1]
            self.counts[Matmul(kind, result.numel() // columns, inner, columns)] += 1
        elif name in ATTENTION:
            matmuls, first, causal = ATTENTION[name]
            q = args[first]
            k = args[first + 1]
            operations = matmuls * 2 * q.numel() * k.shape[2]
            if len(args) > causal and args[causal]:
                operations //= 2
            self.counts["attention"] += operations

    def _count_moved(self, func: Any, args: Any, inputs: list[Tensor], results: list[Tensor]) -> None:
        """Count what an operator reads and writes; in a graph later, with the others of its kernel."""
        used = [self._number(x) for x in inputs]
        new = {self._number(x): x for x in results}
        for number in used:
            new.pop(number, None)
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info and argument.alias_info.is_write:
                    for x in tree_leaves(value):
                        self.n_storages += 1  # written in place: as if it were another tensor
                        new[self.n_storages] = x
                        self.needed.add(self.n_storages)
        if "empty" in func.name() or not (new or func._schema.is_mutable):
            return  # nothing is moved: a view
        if not self.in_graph:
            self.counts[self.part] += sum(map(_size, [*inputs, *new.values()]))
            self._sample()
            return
        level = self._level(inputs)
        for number, x in zip(used, inputs, strict=True):
            self.sizes.setdefault(number, _size(x))
        for number, x in new.items():
            self.sizes[number] = _size(x)
            self.made[number] = (level, used)
            self.levels[number] = level + _reduces_columns(func, args, x)
            if x.numel() < max((y.numel() for y in inputs), default=0):
                self.needed.add(number)  # small: kept, not computed again

    def _number(self, x: Tensor) -> int:
        return self.held.get(x.untyped_storage()._cdata, (-1, 0))[0]

    def _level(self, inputs: list[Tensor]) -> int:
        return max((self.levels.get(self._number(x), 0) for x in inputs), default=0)

    def _sample(self) -> None:
        if self.in_graph:
            self.samples.append((self.live, self.n_storages, set(self.freed)))
        else:
            self.peak = max(self.peak, self.live)

    def _end_graph(self) -> None:
        """Count what its kernels moved, and that what they computed for themselves was never in memory."""
        self.needed |= self.made.keys() - self.freed
        written = self.made.keys() & self.needed
        passing = self.made.keys() - self.needed
        sources = {number: self._sources(number) for number in self.made}
        read = {(self.made[number][0], source) for number in written for source in sources[number]}
        read = {(level, number) for level, number in read if self.made.get(number, (-1,))[0] != level}
        self.counts[self.part] += sum(self.sizes[n] for n in written) + sum(self.sizes[n] for _, n in read)
        for live, last, freed in self.samples:
            pending = {n for n in passing - freed if n <= last}  # not in memory, but what it is computed from
            kept = set[int]().union(*(sources[number] for number in pending)) & freed
            held = live + sum(self.sizes[n] for n in kept) - sum(self.sizes[n] for n in pending)
            self.peak = max(self.peak, held)
        self.in_graph = False

    def _sources(self, number: int) -> set[int]:
        """The tensors in memory that a kernel reads to make this one."""
        passing = self.made.keys() - self.needed
        found = set()
        left = list(self.made[number][1])
        while left:
            source = left.pop()
            if source in passing and source not in found:
                left += self.made[source][1]
            found.add(source)
        return found - passing

    def count(self, x: Tensor) -> None:
        """Count the memory of a tensor until it is freed. Masks take none: kernels of GPUs get them in blocks."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self.held:
            self.n_storages += 1
            self.held[key] = self.n_storages, 0
            weakref.finalize(storage, self._free, key)
        self._resize(key, 0 if x.dtype == torch.bool else storage.nbytes())

    def _resize(self, key: int, size: int) -> None:
        number, before = self.held[key]
        self.held[key], self.live = (number, size), self.live + size - before

    def _free(self, key: int) -> None:
        number, size = self.held.pop(key)
        self.live -= size
        self.freed.add(number)

    def backend(self, *args: Any, **kwargs: Any) -> Any:
        """A backend for torch.compile: inductor's graphs of forward and backward, whose operators run one by one."""

        def compile(graph: Any, inputs: Any) -> Callable[[list[Any]], Any]:
            run = boxed_nop(graph, inputs)

            def run_counted(arguments: list[Any]) -> Any:
                self._begin_graph()
                self.in_graph = True
                result = run(arguments)
                self._sample()
                self._end_graph()
                return result

            run_counted._boxed_call = True  # type: ignore[attr-defined]
            return run_counted

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


def _axis_of(args: tuple[Any, ...]) -> str:
    """The mesh axis of the group among a collective's arguments; "world" if it has all ranks."""
    boxed = [argument for argument in args if isinstance(argument, torch.ScriptObject)]  # the group, then an operation
    group = dist.ProcessGroup.unbox(boxed[0]) if boxed else dist.distributed_c10d._resolve_process_group(args[-1])
    return group.group_desc.removeprefix("mesh_") if group.group_desc.startswith("mesh_") else "world"


def _size(x: Tensor) -> int:
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def _reduces_columns(func: Any, args: Any, result: Tensor) -> bool:
    """Whether an operator needs more than a row of a tensor for its result, which only another kernel can use."""
    if func.overloadpacket not in REDUCTIONS or args[0].numel() == result.numel():
        return False
    over = args[1] if len(args) > 1 else None
    dims = [over] if isinstance(over, int) else over
    return not dims or any(args[0].stride(dim) != 1 for dim in dims)
