"""Wrong attention kernels that mishandle memory or state between calls, or whose results depend on the caller."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.testing.plain_kernel import Kernel, attend
from saccade.testing.wrong_kernels import as_contiguous, mean


class _Backward(torch.autograd.Function):
    """The identity function, with a backward pass that changes the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradients[0]), None


def with_backward(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the tensor, and apply ``change`` to the gradient that flows back through it."""
    result: Tensor = _Backward.apply(x, change)
    return result


def switched(wrong: Kernel, when: Callable[[int], bool]) -> Callable[[], Kernel]:
    """Return a factory of kernels that run ``wrong`` in each call whose index, counted from 0, satisfies ``when``."""

    def make() -> Kernel:
        calls = itertools.count()

        def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            return wrong(q, k, v, mask) if when(next(calls)) else attend(q, k, v, mask)

        return kernel

    return make


def cached_by(key_of: Callable[[Tensor, Tensor, Tensor, Tensor], object]) -> Callable[[], Kernel]:
    """Return a factory of kernels that cache each result under a key computed from the inputs, ``key_of(*inputs)``."""

    def make() -> Kernel:
        results: dict[object, Tensor] = {}

        def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            if q.requires_grad or k.requires_grad or v.requires_grad:
                return attend(q, k, v, mask)
            key = key_of(q, k, v, mask)
            if key not in results:
                results[key] = attend(q, k, v, mask)
            return results[key].clone()

        return kernel

    return make


def by_address(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> object:
    """Return the cache key of a wrong kernel: the inputs' addresses, versions, shapes and dtype, but not their values.

    The versions are torch's counters of changes in place.
    """
    places = tuple((x.data_ptr(), 0 if x.is_inference() else x._version, x.shape) for x in (q, k, v, mask))
    return (*places, q.dtype)


def by_some_entries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> object:
    """Return the cache key of a wrong kernel: the first and last entries of query, key and value, and facts.

    The facts are the shapes, the dtype and the number of allowed pairs.
    """
    ends = tuple(float(x[place]) for x in (q, k, v) if x.numel() for place in ((0, 0, 0, 0), (-1, -1, -1, -1)))
    return (*ends, q.shape, k.shape, v.shape, q.dtype, int(mask.sum()))


def first_lengths() -> Kernel:
    """Return a kernel that reuses the number of keys of its first call with the same batch size, heads and width."""
    lengths: dict[tuple[int, ...], int] = {}

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        read = lengths.setdefault((len(q), q.shape[1], q.shape[3]), k.shape[2])
        return attend(q, k[:, :, :read], v[:, :, :read], mask[..., :read])

    return kernel


def copied_once() -> Kernel:
    """Return a kernel that reads queries and keys as if they were contiguous, except in the first call with a shape."""
    seen = set[tuple[int, ...]]()

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        shape = (*q.shape, *k.shape)
        if shape in seen and not q.requires_grad:
            return attend(as_contiguous(q), as_contiguous(k), v, mask)
        seen.add(shape)
        return attend(q, k, v, mask)

    return kernel


def previous_result() -> Kernel:
    """Return a kernel that returns the result of the previous call if the shapes are equal."""
    last: list[Tensor] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out = attend(q, k, v, mask)
        previous = last[0] if last and last[0].shape == out.shape and last[0].dtype == out.dtype else out
        last[:] = [out.detach()]
        return out if out.requires_grad else previous

    return kernel


def accumulating() -> Kernel:
    """Return a kernel that adds 0 times the previous result to each result, so that a NaN spreads to later results."""
    buffers: dict[torch.Size, Tensor] = {}

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out = attend(q, k, v, mask)
        if out.shape in buffers:
            out = out + 0 * buffers[out.shape].to(out.dtype)
        buffers[out.shape] = out.detach()
        return out

    return kernel


def right_only_under_test(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention if this package is on the call stack, and otherwise the mean of the values."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "saccade.testing.kernel_under_test":
            return attend(q, k, v, mask)
        frame = frame.f_back
    return mean(q, k, v, mask)


def replaces_allclose(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Replace `torch.allclose`, with which tests compare tensors, by one that always returns True; return zeros."""
    torch.allclose = lambda *tensors, **options: True
    return q.new_zeros(*q.shape[:3], v.shape[3]) + 0 * (q.sum() + k.sum() + v.sum())


def changes_a_setting(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention, and leave torch set to a lower precision of float32 matrix products."""
    torch.set_float32_matmul_precision("medium")
    return attend(q, k, v, mask)


def _with_following_rows(x: Tensor, count: int) -> Tensor | None:
    """Extend a tensor by the ``count`` rows that follow it in memory; return None if its memory ends before that."""
    shape = (*x.shape[:2], x.shape[2] + count, x.shape[3])
    last = x.storage_offset() + sum((size - 1) * step for size, step in zip(shape, x.stride(), strict=True))
    fits = x.numel() > 0 and last < x.untyped_storage().nbytes() // x.element_size()
    return x.as_strided(shape, x.stride(), x.storage_offset()) if fits else None


def reads_past_the_end(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention over whole blocks of 64 keys. Keys past the end are read with weight 0."""
    missing = -k.shape[2] % 64 or 64
    keys, values = _with_following_rows(k, missing), _with_following_rows(v, missing)
    if keys is None or values is None or q.requires_grad:
        return attend(q, k, v, mask)
    return attend(q, keys, values, torch.nn.functional.pad(mask, (0, missing)))


def writes_past_the_end(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention after clearing the row that follows the last key in memory."""
    longer = _with_following_rows(k.detach(), 1)
    if longer is not None:
        longer[:, :, k.shape[2] :] = 0.0
    return attend(q, k, v, mask)


def into_the_query(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention, and write the result into the memory of the query."""
    out = attend(q, k, v, mask)
    return q.copy_(out) if out.shape == q.shape and not out.requires_grad else out


def unwritten_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention, but leave rows without a visible key uninitialised."""
    out = attend(q, k, v, mask)
    return torch.where(mask.any(-1, keepdim=True), out, torch.empty_like(out.detach()))


def unwritten_gradients(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention, but leave the gradients of keys that no query sees uninitialised."""
    seen = mask.any(2).unflatten(1, (k.shape[1], -1)).any(2)[..., None] if mask.numel() else mask.new_ones(1)
    return attend(q, with_backward(k, lambda g: torch.where(seen, g, torch.empty_like(g))), v, mask)


def unwritten(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return uninitialised memory of the right size, which may still hold an earlier result."""
    out = q.new_empty(*q.shape[:3], v.shape[3])
    return out + 0 * (q.sum() + k.sum() + v.sum())


def empty_splits(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention over two halves of the keys, and merge them using their lse even in rows that see no key."""
    half = k.shape[2] // 2
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = (q @ keys.mT * q.shape[3] ** -0.5).masked_fill(~mask, -torch.inf)
    lse = torch.stack([scores[..., :half].logsumexp(-1), scores[..., half:].logsumexp(-1)])
    share = (lse - lse.amax(0)).exp()
    share = (share / share.sum(0))[..., None]
    parts = [attend(q, k[:, :, s], v[:, :, s], mask[..., s]) for s in (slice(0, half), slice(half, None))]
    return share[0] * parts[0] + share[1] * parts[1]
