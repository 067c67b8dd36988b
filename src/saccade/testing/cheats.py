"""`CHEATS`: kernels that pass weak tests, or look fast in them, without computing attention correctly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.testing.cases import CASES
from saccade.testing.past_bug import PastBug
from saccade.testing.plain_kernel import Kernel, attend
from saccade.testing.size_cases import SIZE_CASES
from saccade.testing.stateful_wrong_kernels import (
    accumulating,
    by_address,
    by_some_entries,
    cached_by,
    changes_a_setting,
    into_the_query,
    previous_result,
    reads_past_the_end,
    replaces_allclose,
    right_only_under_test,
    switched,
    unwritten,
    unwritten_rows,
    with_backward,
    writes_past_the_end,
)
from saccade.testing.wrong_kernels import (
    gradient_times,
    is_large,
    mean,
    with_changed_inputs,
    with_changed_output,
    wrong_if,
)

_KNOWN_LENGTHS = {(case.q_len, case.kv_len) for case in (*CASES, *SIZE_CASES)}


def _top(count: int) -> Kernel:
    """Return a kernel that attends only to the ``count`` keys with the largest scores."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = (q @ keys.mT).masked_fill(~mask, -torch.inf)
        least = scores.topk(min(count, scores.shape[-1]), -1)[0][..., -1:] if scores.shape[-1] else scores
        return attend(q, k, v, mask & (scores >= least))

    return kernel


def _dropped(least: float) -> Kernel:
    """Return a kernel that sets attention weights below ``least`` to 0."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = (q @ keys.mT * q.shape[3] ** -0.5).masked_fill(~(mask | ~mask.any(-1, True)), -torch.inf)
        weights = scores.softmax(-1).masked_fill(~mask, 0.0)
        return weights.masked_fill(weights < least, 0.0) @ values

    return kernel


def _clamped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention with scores clamped to the range from -20 to 20."""
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ keys.mT * q.shape[3] ** -0.5).clamp(-20, 20)
    weights = scores.masked_fill(~(mask | ~mask.any(-1, True)), -torch.inf).softmax(-1)
    return weights.masked_fill(~mask, 0.0) @ values


def _low_rank(x: Tensor) -> Tensor:
    """Return the best approximation of the tensor with half its rank; gradients pass through unchanged."""
    left, sizes, right = torch.linalg.svd(x.detach().double(), full_matrices=False)
    kept = (sizes.shape[-1] + 1) // 2
    near = (left[..., :kept] * sizes[..., None, :kept]) @ right[..., :kept, :]
    return x + (near.to(x.dtype) - x.detach())


def _rounded(x: Tensor, bits: int) -> Tensor:
    """Round each row to multiples of its largest entry divided by ``2 ** bits``; gradients pass through unchanged."""
    step = x.detach().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny) / 2**bits
    return x + ((x.detach() / step).round() * step - x.detach())


def _first_of_ties(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention, but if several scores tie for the largest of a row, mask all of them except the first."""
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = (q @ keys.mT).masked_fill(~mask, -torch.inf)
    largest = (scores == scores.amax(-1, keepdim=True)) & mask
    return attend(q, k, v, mask & ~(largest & (largest.cumsum(-1) > 1)))


def _far_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention, with all values before the last 64 replaced by the mean of these earlier values."""
    if v.shape[2] <= 64:
        return attend(q, k, v, mask)
    far = v[:, :, :-64].mean(2, keepdim=True).expand(-1, -1, v.shape[2] - 64, -1)
    return attend(q, k, torch.cat([far, v[:, :, -64:]], 2), mask)


def _for_value_alone(out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return gradient_times(out, 2.0) if v.requires_grad and not q.requires_grad else out


def _wrong_with_gradients(out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return out + 0.01 * out.detach().abs().max() if out.requires_grad else out


def _requires(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> bool:
    return q.requires_grad or k.requires_grad or v.requires_grad


def _cheat(mistake: str, laws: str, make: Callable[[], Kernel]) -> PastBug:
    return PastBug(mistake, "cheat", tuple(laws.split()), make)


CHEATS = (
    # results that are not computed
    _cheat("It returns the mean of the values.", "oracle sizes", lambda: mean),
    _cheat(
        "It returns noise of the right size at large inputs.",
        "sizes",
        wrong_if(is_large, with_changed_output(lambda out, q, k, v, mask: torch.randn_like(out) * out.std())),
    ),
    _cheat("It returns uninitialized memory, which may hold an earlier result.", "oracle unwritten", lambda: unwritten),
    _cheat("It returns the result of the previous call.", "oracle memory_of_calls", previous_result),
    _cheat("It caches results by address and torch's version counter.", "repeats", cached_by(by_address)),
    _cheat("It caches results by the first and last entries of the inputs.", "twins", cached_by(by_some_entries)),
    _cheat("It writes the result to the memory of the query.", "pure memory_of_calls", lambda: into_the_query),
    # right only in the test
    _cheat("It is right only for at most 12 keys.", "sizes", wrong_if(is_large, lambda: mean)),
    _cheat(
        "It is right only for the lengths of the public cases.",
        "drawn_sizes",
        wrong_if(lambda q, k, v, mask: (q.shape[2], k.shape[2]) not in _KNOWN_LENGTHS, lambda: mean),
    ),
    _cheat(
        "It is right only if a function of this test kit is on the call stack.",
        "callers",
        lambda: right_only_under_test,
    ),
    _cheat("It replaces the function that compares tensors.", "outside", lambda: replaces_allclose),
    _cheat("It leaves torch's matrix products at a lower precision.", "outside", lambda: changes_a_setting),
    _cheat("It is right only in the first call.", "determinism repeats", switched(mean, lambda call: call > 0)),
    _cheat("It is wrong in the first call.", "oracle", switched(mean, lambda call: call == 0)),
    _cheat("It is right only in the first ten calls.", "repeats", switched(mean, lambda call: call >= 10)),
    _cheat(
        "It is right only if autograd records the call.", "oracle", wrong_if(lambda *x: not _requires(*x), lambda: mean)
    ),
    _cheat(
        "It is right only if autograd does not record the call.", "modes", with_changed_output(_wrong_with_gradients)
    ),
    _cheat(
        "It is right only for contiguous inputs.",
        "strides sizes",
        wrong_if(lambda q, k, v, mask: not (q.is_contiguous() and k.is_contiguous()), lambda: mean),
    ),
    # less work
    _cheat(
        "A single query reads only the last 64 keys.",
        "sizes",
        wrong_if(
            lambda q, k, v, mask: q.shape[2] == 1,
            with_changed_inputs(lambda q, k, v, mask: (q, k[:, :, -64:], v[:, :, -64:], mask[..., -64:])),
        ),
    ),
    _cheat(
        "Only keys that all queries see are read.",
        "oracle sizes",
        with_changed_inputs(lambda q, k, v, mask: (q, k, v, mask & mask.all(2, keepdim=True))),
    ),
    _cheat(
        "One row in each head is wrong at large inputs.",
        "sizes",
        wrong_if(
            is_large, with_changed_output(lambda out, q, k, v, mask: torch.cat([out[:, :, :1] * 1.5, out[:, :, 1:]], 2))
        ),
    ),
    _cheat("Only the 64 keys with the largest scores are read.", "sizes", lambda: _top(64)),
    _cheat("Weights below 1e-4 are left out.", "sizes", lambda: _dropped(1e-4)),
    _cheat("Distant values are replaced by their mean.", "sizes", lambda: _far_blocks),
    _cheat(
        "Keys are approximated with half their rank.",
        "oracle sizes",
        with_changed_inputs(lambda q, k, v, mask: (q, _low_rank(k), v, mask)),
    ),
    # fewer digits
    _cheat(
        "Inputs in float32 are rounded to bfloat16.",
        "oracle sizes",
        with_changed_inputs(lambda q, k, v, mask: (*(x.bfloat16().to(x.dtype) for x in (q, k, v)), mask)),
    ),
    _cheat(
        "Everything is computed in float32, even for float64 inputs.",
        "sizes",
        lambda: lambda q, k, v, mask: attend(q.float(), k.float(), v.float(), mask).to(q.dtype),
    ),
    _cheat(
        "Values are rounded to 8 bits.",
        "oracle sizes",
        with_changed_inputs(lambda q, k, v, mask: (q, k, _rounded(v, 7), mask)),
    ),
    _cheat(
        "Values are rounded to 20 bits relative to the largest of their row.",
        "wide_values",
        with_changed_inputs(lambda q, k, v, mask: (q, k, _rounded(v, 20), mask)),
    ),
    _cheat("Scores are limited to 20.", "large_scores unusual_values", lambda: _clamped),
    _cheat("If several scores are equally large, only the first counts.", "unusual_values", lambda: _first_of_ties),
    _cheat(
        "Values are limited to 1e4.",
        "unusual_values",
        with_changed_inputs(lambda q, k, v, mask: (q, k, v.clamp(-1e4, 1e4), mask)),
    ),
    _cheat("NaN is replaced by 0.", "honesty", with_changed_output(lambda out, q, k, v, mask: out.nan_to_num(0.0))),
    # backward
    _cheat(
        "No input gets a gradient.",
        "gradients_of_inputs gradients_at_sizes",
        with_changed_output(lambda out, q, k, v, mask: out.detach() + 0 * (q.sum() + k.sum() + v.sum())),
    ),
    _cheat(
        "Only values get a gradient.",
        "gradients_of_inputs gradients_at_sizes",
        with_changed_inputs(lambda q, k, v, mask: (q.detach() + 0 * q, k.detach() + 0 * k, v, mask)),
    ),
    _cheat(
        "The gradient is 0 if the upstream gradient of the first 64 rows is 0.",
        "gradients_of_rows",
        with_changed_output(
            lambda out, q, k, v, mask: with_backward(out, lambda g: g if g[:, :, :64].any() else g * 0)
        ),
    ),
    _cheat(
        "If only the values require a gradient, it is twice too large.", "modes", with_changed_output(_for_value_alone)
    ),
    # memory
    _cheat("Rows without a visible key are not written.", "unwritten", lambda: unwritten_rows),
    _cheat("Memory after the last key is read with weight 0.", "layouts", lambda: reads_past_the_end),
    _cheat("The memory after the last key is overwritten.", "layouts", lambda: writes_past_the_end),
    _cheat("The previous result times 0 is added to each result.", "order_of_calls", accumulating),
    _cheat(
        "The upstream gradient is scaled in place.",
        "untouched",
        with_changed_output(lambda out, q, k, v, mask: with_backward(out, lambda g: g.mul_(2.0) / 2.0)),
    ),
    _cheat(
        "Padding of the head width changes the scale.",
        "oracle",
        with_changed_inputs(lambda q, k, v, mask: (F.pad(q, (0, 8)), F.pad(k, (0, 8)), v, mask)),
    ),
)
"""Kernels that cheat: they pass weaker tests without computing attention correctly."""
