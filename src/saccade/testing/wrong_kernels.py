"""Small wrong attention kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.testing.plain_kernel import Kernel, attend


def with_changed_output(change: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]) -> Callable[[], Kernel]:
    """Return a factory of kernels that replace a correct output by ``change(out, query, key, value, mask)``."""
    return lambda: lambda q, k, v, mask: change(attend(q, k, v, mask), q, k, v, mask)


def with_changed_inputs(change: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]) -> Callable[[], Kernel]:
    """Return a factory of kernels that compute correct attention for changed inputs."""
    return lambda: lambda *inputs: attend(*change(*inputs))


def gradient_times(out: Tensor, factor: float) -> Tensor:
    """Return the output, and multiply the gradient that flows back through it by ``factor``."""
    return out.detach() + factor * (out - out.detach())


def zero_tail(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Pad keys and values to whole blocks of 64 with zeros that are not masked."""
    missing = -k.shape[2] % 64
    padded = [F.pad(x, (0, 0, 0, missing)) for x in (k, v)]
    return q, *padded, F.pad(mask, (0, missing), value=True)


def complete_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Drop the keys and values of an incomplete last block of 128."""
    read = k.shape[2] // 128 * 128
    return q, k[:, :, :read], v[:, :, :read], mask[..., :read]


def as_contiguous(x: Tensor) -> Tensor:
    """Return the tensor as read by a kernel that assumes a view to be contiguous."""
    size = x.numel()
    flat = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    start = x.storage_offset()
    return flat[start : start + size].reshape(x.shape) if start + size <= len(flat) else x


def interleaved(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Repeat 2 to 7 key heads so that query heads are assigned to them in turn instead of in groups."""
    if not 1 < k.shape[1] < 8:
        return q, k, v, mask
    times = q.shape[1] // k.shape[1]
    return q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1), mask


def first_of_group(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention, but pass the gradient of only one head in each group to the shared keys and values."""
    times = q.shape[1] // k.shape[1]

    def repeated(x: Tensor) -> Tensor:
        copies = [x, *(x.detach() for _ in range(times - 1))]
        return torch.stack(copies, 2).flatten(1, 2)

    return attend(q, repeated(k), repeated(v), mask)


def last_block_gradient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention, but pass gradients only to the last block of 128 keys and values."""
    if k.shape[2] <= 128:
        return attend(q, k, v, mask)
    cut = (k.shape[2] - 1) // 128 * 128
    joined = [torch.cat([x[:, :, :cut].detach(), x[:, :, cut:]], 2) for x in (k, v)]
    return attend(q, joined[0], joined[1], mask)


def split_sum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """If there are more than 1,024 keys, average the outputs over two parts of the keys without weighting by lse."""
    if k.shape[2] <= 1024:
        return attend(q, k, v, mask)
    parts = [attend(q, k[:, :, s], v[:, :, s], mask[..., s]) for s in (slice(0, 1024), slice(1024, None))]
    return (parts[0] + parts[1]) / 2


def low_maximum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention as if the running maximum began at -5e4: rows with only lower scores become 0."""
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = (q.float() @ keys.float().mT * q.shape[3] ** -0.5).masked_fill(~mask, -torch.inf)
    return attend(q, k, v, mask).masked_fill(scores.amax(-1, keepdim=True) < -5e4, 0.0)


def no_maximum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention without subtracting the maximum of a row before the exponential."""
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    powers = (q @ keys.mT * q.shape[3] ** -0.5).exp().masked_fill(~mask, 0.0)
    return powers @ values / powers.sum(-1, keepdim=True).clamp_min(1e-30)


def cached() -> Kernel:
    """Return a kernel that caches results by the addresses of its inputs."""
    results: dict[tuple[object, ...], Tensor] = {}

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), q.shape, mask.shape)
        if addresses not in results:
            results[addresses] = attend(q, k, v, mask)
        return results[addresses]

    return kernel


def last_result() -> Kernel:
    """Return a kernel that caches results by the shapes of its inputs."""
    results: dict[tuple[object, ...], Tensor] = {}

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return results.setdefault((*q.shape, *v.shape, q.dtype), attend(q, k, v, mask))

    return kernel


def workspace() -> Kernel:
    """Return a kernel that writes all results of a shape to the same memory."""
    buffers: dict[tuple[object, ...], Tensor] = {}

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out = attend(q, k, v, mask)
        if out.requires_grad:
            return out
        buffer = buffers.setdefault((*out.shape, out.dtype), torch.empty_like(out))
        return buffer.copy_(out)

    return kernel


def stale_mask() -> Kernel:
    """Return a kernel that reuses the first mask of each shape."""
    masks: dict[tuple[int, ...], Tensor] = {}
    return lambda q, k, v, mask: attend(q, k, v, masks.setdefault(tuple(mask.shape), mask.clone()))


def every_second_call() -> Kernel:
    """Return a kernel that makes every second result slightly too small."""
    calls = itertools.count()

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out = attend(q, k, v, mask)
        return out * 0.999 if next(calls) % 2 else out

    return kernel


def scaled_in_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention after scaling the query in place."""
    scaled = q.data if q.requires_grad else q
    scaled.mul_(q.shape[3] ** -0.5)
    return attend(q, k, v, mask, scale=1.0)


def mean(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of all values for each query."""
    average = v.mean(2, keepdim=True).repeat_interleave(q.shape[1] // v.shape[1], 1)
    return average.expand(*q.shape[:3], -1).clone()


def wrong_if(
    condition: Callable[[Tensor, Tensor, Tensor, Tensor], bool], make: Callable[[], Kernel]
) -> Callable[[], Kernel]:
    """Return a factory of kernels that are wrong only for inputs that satisfy ``condition``."""

    def make_kernel() -> Kernel:
        wrong = make()
        return lambda q, k, v, mask: (wrong if condition(q, k, v, mask) else attend)(q, k, v, mask)

    return make_kernel


def is_large(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> bool:
    """Return whether there are more keys than in any of the small cases."""
    return k.shape[2] > 12
