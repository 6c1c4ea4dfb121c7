"""Context parallelism: ranks share each sequence, and see each other's keys and values in attention.

A sequence is cut into 2 cp chunks. Rank r holds chunks r and 2 cp - 1 - r, so that all ranks compute equally much of
the causal triangle (Llama 3, Grattafiori et al. 2024, section 3.3.2; zigzag in the ring: Brandon et al. 2023).

Shapes: B batch   N query heads   K key/value heads   S this rank's tokens   T all tokens   H head_dim
"""

import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

aten = torch.ops.aten


def local_indices(seq_len: int, mesh: DeviceMesh, device: torch.device | None = None) -> Tensor:
    """The places in a sequence of `seq_len` tokens of those that this rank holds: [seq_len / cp], int64."""
    rank, size = mesh.get_local_rank(), mesh.size()
    if size == 1:
        return torch.arange(seq_len, device=device)
    chunks = torch.arange(seq_len, device=device).view(2 * size, -1)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


def build_gather(mesh: DeviceMesh) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Build the function from this rank's keys and values [B, K, S, H] to all ranks' [B, K, T, H], in sequence order.

    Its backward sums the gradients of all ranks and returns this rank's part.
    """
    # torch 2.13 has another name for it and warns on every rank.
    warnings.filterwarnings("ignore", message=".*all_gather_tensor_autograd. is deprecated")
    group = mesh.get_group()

    def gather(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        # Not along S: torch would add a copy that the compiler of torch 2.12 cannot trace.
        gathered = all_gather_tensor_autograd(torch.stack((k, v)), gather_dim=0, group=group)
        halves = [part.chunk(2, dim=-2) for part in gathered.chunk(mesh.size())]
        first_halves, second_halves = zip(*halves, strict=True)
        k, v = torch.cat(first_halves + second_halves[::-1], dim=-2)
        return k, v

    return gather


# A custom operator, which is one kernel to the compiler: it cannot trace the exchange.
@torch.library.custom_op("titanite::ring_attention", mutates_args=())
def ring_attention(q: Tensor, k: Tensor, v: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    """Causal attention over the whole sequence, with keys and values passed from rank to rank (Liu et al. 2023).

    Takes this rank's q [B, N, S, H], k and v [B, K, S, H]. Returns [B, N, S, H] and log-sum-exp [B, N, S] (float32).
    It holds the keys and values of only one other rank at a time.
    """
    q = q.contiguous()
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]
    for queries, _, of_keys, causal in _ring(k, v, q.shape[1], group):
        part, part_lse = _flash(q[:, :, queries], *of_keys, causal=causal)
        merged = torch.logaddexp(lse[:, :, queries], part_lse)
        kept = (lse[:, :, queries] - merged).exp()
        added = (part_lse - merged).exp()
        out[:, :, queries] *= kept[..., None]
        out[:, :, queries] += part.float() * added[..., None]
        lse[:, :, queries] = merged
    return out.to(q.dtype), lse


@torch.library.custom_op("titanite::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, group_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. Those of k and v travel the ring with them, and are back after a full turn."""
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dkv = torch.zeros((2, *k.shape), dtype=torch.float32, device=q.device)
    for queries, keys, of_keys, causal in _ring(k, v, q.shape[1], group):
        of_queries = [x[:, :, queries].contiguous() for x in (grad, q, out, lse)]
        part_q, *part_kv = _flash_backward(of_queries, of_keys, causal=causal)
        dq[:, :, queries] += part_q
        shared = torch.stack(part_kv).unflatten(2, (k.shape[1], -1))
        dkv[:, :, :, keys] += shared.sum(3, dtype=torch.float32)
        dkv, transfer = _pass_on(dkv, group)
        for work in transfer:
            work.wait()
    dk, dv = dkv.to(k.dtype)
    return dq.to(q.dtype), dk, dv.clone()


def _ring(k: Tensor, v: Tensor, n_heads: int, group: dist.ProcessGroup) -> Iterator[tuple[slice, slice, Tensor, bool]]:
    """Yield what a rank has to compute at each step of the ring, while the next keys and values are on their way.

    That is: which of its queries, which of the keys it has, those keys and values [2, B, N, S, H], repeated for the
    `n_heads` query heads that share them, whether causal.
    """
    kv = torch.stack((k, v))
    shared_by = n_heads // k.shape[1]
    last = group.size() - 1
    for step in range(group.size()):
        if step < last:
            kv_next, transfer = _pass_on(kv, group)
        queries, keys = _halves(step, group.rank(), k.shape[2])
        yield queries, keys, kv[:, :, :, keys].repeat_interleave(shared_by, dim=2), step == 0
        if step < last:
            for work in transfer:
                work.wait()
            kv = kv_next


def _halves(step: int, rank: int, length: int) -> tuple[slice, slice]:
    """Which queries a rank computes at a step of the ring, with which of the keys it has.

    The keys are those of rank - step (mod size). Own keys: all with all, causal. Keys of an earlier rank: their first
    chunk is before all our queries, their second after all. Keys of a later rank: only our second chunk is after them,
    and after all of them.
    """
    half = length // 2
    if step == 0:
        return slice(None), slice(None)
    if step <= rank:
        return slice(None), slice(0, half)
    return slice(half, None), slice(None)


def _pass_on(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[dist.Work]]:
    """Start to send `x` to the next rank and receive the previous one's. Wait for the transfer before using either."""
    rank, size = group.rank(), group.size()
    received = torch.empty_like(x)
    operations = [
        dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
    ]
    return received, dist.batch_isend_irecv(operations)


def _flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Flash attention and its log-sum-exp. Only the operator's name differs by device."""
    if q.is_cpu:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    else:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse


def _flash_backward(of_queries: list[Tensor], of_keys: Tensor, *, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from (grad, q, out, lse) and (k, v). `out` and `lse` are over all keys, not only `k`."""
    grad, q, out, lse = of_queries
    k, v = of_keys
    if q.is_cpu:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
    offset = torch.zeros((), dtype=torch.uint64)
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, offset
    )


@ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


@ring_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, group_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.group_name = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grad, _):  # type: ignore[no-untyped-def]
    gradients = ring_attention_backward(grad, *ctx.saved_tensors, ctx.group_name)
    return *gradients, None


ring_attention.register_autograd(_backward, setup_context=_save)
