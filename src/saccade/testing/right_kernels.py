"""`RIGHT_KERNELS`: correct attention kernels that use different algorithms. None of them may break a law."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from saccade.matrix import attention
from saccade.testing.blocked_kernel import BlockedKernel
from saccade.testing.plain_kernel import Kernel, attend
from saccade.testing.right_backward import by_vjp, numpy_attention, with_saved_weights
from saccade.testing.stepwise_attention import Stepwise

Core = Kernel
"""A kernel for inputs in float32 or wider, with a key and value head for every query head and no empty rows."""


def guarded(core: Core, wide: torch.dtype = torch.float32) -> Kernel:
    """Return a kernel that adds support for grouped heads, rows without visible keys and empty inputs to ``core``."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if 0 in (*q.shape, *k.shape):
            return q.new_zeros(*q.shape[:3], v.shape[3]) + 0 * (q.sum() + k.sum() + v.sum())
        dtype = torch.promote_types(q.dtype, wide)
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).to(dtype) for x in (k, v))
        some = mask.any(-1, keepdim=True)
        out = core(q.to(dtype), keys, values, mask | ~some)
        return out.masked_fill(~some, 0.0).to(q.dtype)

    return kernel


def _scores(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)


def _einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[3])
    return torch.einsum("bhqk,bhke->bhqe", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def _batched(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    heads, flat = q.shape[:2], mask.flatten(0, 1)
    bias = torch.zeros_like(flat, dtype=q.dtype).masked_fill(~flat, -torch.inf)
    scores = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=q.shape[3] ** -0.5)
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).unflatten(0, heads)


def _head_by_head(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    heads = [_scores(q[:, h], k[:, h], mask[:, h]).softmax(-1) @ v[:, h] for h in range(q.shape[1])]
    return torch.stack(heads, 1)


def _item_by_item(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.cat([_einsum(*(x[b : b + 1] for x in (q, k, v, mask))) for b in range(len(q))])


def _rows_at_once(size: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    parts = [_einsum(q[:, :, at : at + size], k, v, mask[:, :, at : at + size]) for at in range(0, q.shape[2], size)]
    return torch.cat(parts, 2)


def _reordered(order: Callable[[int], Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    indices = order(k.shape[2]).to(q.device)
    return _einsum(q, k[:, :, indices], v[:, :, indices], mask[..., indices])


def _shuffled(length: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(5))


def _rows_reordered(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    indices = _shuffled(q.shape[2]).to(q.device)
    return _einsum(q[:, :, indices], k, v, mask[:, :, indices])[:, :, indices.argsort()]


def _powers_of_two(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.mT * (q.shape[3] ** -0.5 * math.log2(math.e))).masked_fill(~mask, -torch.inf)
    powers = (scores - scores.amax(-1, keepdim=True).detach()).exp2()
    return powers @ v / powers.sum(-1, keepdim=True)


def _log_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    logs = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~mask, -torch.inf).log_softmax(-1)
    return logs.exp() @ v


def _by_lse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = _scores(q, k, mask)
    return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v


def _by_running_lse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[3] ** -0.5
    low = scores.detach().masked_fill(~mask, torch.inf).amin(-1, keepdim=True) - 1e4
    scores = torch.where(mask, scores, low)
    return torch.where(mask, (scores - scores.logcumsumexp(-1)[..., -1:]).exp(), 0.0) @ v


def _weights_hidden_last(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[3] ** -0.5
    largest = scores.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True).detach()
    powers = torch.where(mask, (torch.where(mask, scores, largest) - largest).exp(), 0.0)
    return (powers / powers.sum(-1, keepdim=True)) @ v


def _finite_fill(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~mask, torch.finfo(q.dtype).min)
    return scores.softmax(-1) @ v


def _two_scales(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    side = q.shape[3] ** -0.25
    return ((q * side) @ (k * side).mT).masked_fill(~mask, -torch.inf).softmax(-1) @ v


def _transposed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhe->bqhe", weights, v).transpose(1, 2)


def _values_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (v.mT @ _scores(q, k, mask).mT.softmax(-2)).mT


def _padded(rows: int, keys: int, width: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A right kernel: lengths and width padded to multiples of given sizes, with the scale of the original width."""
    extra = [-x.shape[2] % size for x, size in ((q, rows), (k, keys))]
    more = -q.shape[3] % width
    wide = (1 + more / q.shape[3]) ** 0.5
    query, key = F.pad(q * wide, (0, more, 0, extra[0])), F.pad(k, (0, more, 0, extra[1]))
    value = F.pad(v, (0, 0, 0, extra[1]))
    hidden = F.pad(mask, (0, extra[1]))
    visible = torch.cat([hidden, hidden[:, :, :1].expand(-1, -1, extra[0], -1)], 2)
    return _einsum(query, key, value, visible)[:, :, : q.shape[2]]


def _online(size: int, backwards: bool, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A right kernel: blocks of keys with a running maximum, with gradients from autograd."""
    high = q.new_full((*q.shape[:3], 1), -torch.inf)
    total, out = torch.zeros_like(high), q.new_zeros(*q.shape[:3], v.shape[3])
    starts = range(0, k.shape[2], size)
    for start in reversed(starts) if backwards else starts:
        block = slice(start, start + size)
        scores = _scores(q, k[:, :, block], mask[..., block])
        new = torch.maximum(high, scores.amax(-1, keepdim=True).detach())
        level = new.masked_fill(new.isneginf(), 0.0)
        share, powers = (high - level).exp(), (scores - level).exp()
        out, total, high = out * share + powers @ v[:, :, block], total * share + powers.sum(-1, keepdim=True), new
    return out / total


def _two_passes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    blocks = [slice(at, at + 90) for at in range(0, k.shape[2], 90)]
    scores = [_scores(q, k[:, :, block], mask[..., block]) for block in blocks]
    high = torch.stack([x.amax(-1, keepdim=True) for x in scores]).amax(0).detach()
    powers = [(x - high).exp() for x in scores]
    total = torch.stack([x.sum(-1, keepdim=True) for x in powers]).sum(0)
    return torch.stack([x @ v[:, :, block] for x, block in zip(powers, blocks, strict=True)]).sum(0) / total


def _merged(split: Callable[[int], list[Tensor]], q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A right kernel: attention over parts of the keys, whose results are merged by their lse."""
    outs, lses = [], []
    for indices in split(k.shape[2]):
        part = mask[..., indices]
        some = part.any(-1, keepdim=True)
        scores = _scores(q, k[:, :, indices], part | ~some)
        outs.append(scores.softmax(-1) @ v[:, :, indices])
        lses.append(scores.logsumexp(-1, keepdim=True).masked_fill(~some, -torch.inf))
    shares = torch.stack(lses).softmax(0)
    return (torch.stack(outs) * shares).sum(0)


def _into(count: int, length: int) -> list[Tensor]:
    return [part for part in torch.arange(length).tensor_split(count) if len(part)]


def _every(count: int, length: int) -> list[Tensor]:
    return [torch.arange(start, length, count) for start in range(min(count, length))]


def _visible_alone(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A right kernel: only those keys that are visible to at least one query."""
    indices = mask.flatten(0, 2).any(0).nonzero()[:, 0]
    return _einsum(q, k[:, :, indices], v[:, :, indices], mask[..., indices])


def _blocks_with_pairs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A right kernel: 40 rows at a time, over only those blocks of 40 keys that contain a visible key."""
    parts = []
    for at in range(0, q.shape[2], 40):
        here = mask[:, :, at : at + 40]
        blocks = [s for s in torch.arange(k.shape[2]).split(40) if here[..., s].any()]
        indices = torch.cat(blocks)
        parts.append(_einsum(q[:, :, at : at + 40], k[:, :, indices], v[:, :, indices], here[..., indices]))
    return torch.cat(parts, 2)


def _sdpa_additive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf))


def _sdpa_math(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, mask)


def _sdpa_flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A right kernel: torch's flash backend, with the narrower tensors padded to equal widths."""
    width = max(q.shape[3], v.shape[3])
    query, key, value = (F.pad(x, (0, width - x.shape[3])).contiguous() for x in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, mask, scale=q.shape[3] ** -0.5)[..., : v.shape[3]]


def _recomputed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    out: Tensor = checkpoint(_einsum, q, k, v, mask, use_reentrant=False)
    return out


def _grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A right kernel: query heads split into groups, without repeating the keys."""
    if 0 in (*q.shape, *k.shape):
        return attend(q, k, v, mask)
    wide, groups = torch.promote_types(q.dtype, torch.float32), (k.shape[1], -1)
    some = mask.any(-1, keepdim=True)
    scores = torch.einsum("bgrqd,bgkd->bgrqk", q.to(wide).unflatten(1, groups), k.to(wide)) * q.shape[3] ** -0.5
    weights = scores.masked_fill(~(mask | ~some).unflatten(1, groups), -torch.inf).softmax(-1)
    out = torch.einsum("bgrqk,bgke->bgrqe", weights, v.to(wide)).flatten(1, 2)
    return out.masked_fill(~some, 0.0).to(q.dtype)


def _written_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    out = torch.empty_like(q[..., :1].expand(-1, -1, -1, v.shape[3]), memory_format=torch.contiguous_format)
    rows = [_einsum(*(x[:, h : h + 1] for x in (q, k, v, mask))) for h in range(q.shape[1])]
    for h, row in enumerate(rows):
        out = out.slice_scatter(row, 1, h, h + 1)
    return out


def remembering() -> Kernel:
    """Return a right kernel that caches its last result, and returns it again if the next inputs are equal."""
    last: list[tuple[Tensor, ...]] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        given = (q, k, v, mask)
        if any(x.requires_grad for x in given):
            return attend(*given)
        if last and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(given, last[0], strict=False)):
            return last[0][4].clone()
        out = attend(*given)
        last[:] = [(*(x.clone() for x in given), out.clone())]
        return out

    return kernel


_CORES: dict[str, Core] = {
    "einsum": _einsum,
    "baddbmm and bmm": _batched,
    "head by head": _head_by_head,
    "item by item": _item_by_item,
    **{f"{size} rows at once": partial(_rows_at_once, size) for size in (17, 64, 128, 1000)},
    "keys reversed": partial(_reordered, lambda n: torch.arange(n).flip(0)),
    "keys shuffled": partial(_reordered, _shuffled),
    "rows shuffled": _rows_reordered,
    "powers of two": _powers_of_two,
    "log_softmax": _log_softmax,
    "logsumexp": _by_lse,
    "logcumsumexp": _by_running_lse,
    "masked after exp": _weights_hidden_last,
    "masked with the most negative number": _finite_fill,
    "query and key scaled": _two_scales,
    "tokens before heads": _transposed,
    "values first": _values_first,
    "keys padded to 64": partial(_padded, 1, 64, 1),
    "rows padded to 128": partial(_padded, 128, 1, 1),
    "width padded to 32": partial(_padded, 1, 1, 32),
    "all axes padded": partial(_padded, 48, 80, 64),
    **{f"running maximum over {size} keys": partial(_online, size, False) for size in (50, 64, 100, 512)},
    "running maximum from the last key": partial(_online, 70, True),
    "two passes": _two_passes,
    **{f"{count} parts merged by lse": partial(_merged, partial(_into, count)) for count in (2, 3, 7)},
    **{f"every {count} keys merged by lse": partial(_merged, partial(_every, count)) for count in (2, 5)},
    "only visible keys": _visible_alone,
    "only blocks with visible pairs": _blocks_with_pairs,
    "SDPA": F.scaled_dot_product_attention,
    "SDPA with an additive mask": _sdpa_additive,
    "SDPA, math": _sdpa_math,
    "SDPA, flash": _sdpa_flash,
    "recomputed": _recomputed,
    "head by head into empty memory": _written_rows,
    "weights saved for backward": with_saved_weights,
    "backward by torch.func.vjp": by_vjp,
    "NumPy, with its own backward": numpy_attention,
}

RIGHT_KERNELS: dict[str, Kernel] = {
    "plain": attend,
    **{name: guarded(core) for name, core in _CORES.items()},
    "in float64": guarded(_einsum, torch.float64),
    "powers of two, in float64": guarded(_powers_of_two, torch.float64),
    "grouped heads as an axis": _grouped,
    "SDPA with grouped heads": lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True),
    **{f"FlashAttention in blocks of {size}": BlockedKernel(size) for size in (32, 48, 64, 100, 128, 300)},
    **{f"saccade, {impl}": partial(attention, impl=impl) for impl in ("reference", "fused", "tiled", "auto")},
    "saccade, step by step": Stepwise(),
    "a cache of equal inputs": remembering(),
}
"""Correct kernels by name."""
