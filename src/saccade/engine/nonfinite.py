"""Containment of NaN and inf, which must not spread between a query and a key that the mask separates.

In a matrix product, 0 * NaN is NaN, so masking alone does not contain them. Kernels therefore run on inputs whose
non-finite rows are zeroed and masked. Afterwards, the affected queries are set to NaN: those that may attend to such a
key or value, and those that are non-finite themselves and have visible keys. A pair whose score is -inf has weight 0,
regardless of its key and value.

Masked keys and values may also be finite but so large that products with them overflow: inf - inf and 0 * inf are
NaN. If no query may attend to them, attention then runs again without them, on a kernel that skips masked scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from saccade.engine.bias.term import MaskedTerm
from saccade.engine.dropout import Dropped
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Backward, Kernel, KernelWithBackward, Tensors
from saccade.engine.kernels.tiled import Tiled
from saccade.engine.memory_accounting import bytes_widened
from saccade.engine.tiles.grouped_heads import groups_of
from saccade.engine.tiles.index_ranges import at, joined, take
from saccade.engine.tiles.tile_scores import scores_of
from saccade.engine.tiles.tile_splitting import pieces
from saccade.plan import ColumnRange, Tile
from saccade.support.numerics import is_finite, not_finite

_PAIRS_AT_ONCE = 1 << 20
_TILED = Tiled()


class Sanitized(NamedTuple):
    """Inputs whose non-finite rows are replaced by 0, and the queries whose results must nevertheless be NaN.

    Attributes:
        inputs, value: the cleaned inputs. Non-finite rows of query and key are masked.
        nan_scores: queries that have a NaN score or may attend to a non-finite key, bool ``[batch, heads, q_len]``.
        nan_output: the queries in ``nan_scores``, and those that may attend to a non-finite value; the same shape.
    """

    inputs: AttentionInputs
    value: Tensor
    nan_scores: Tensor
    nan_output: Tensor

    def forward(self, kernel: Kernel, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
        """Run a kernel on the cleaned inputs, and return the output and the lse with NaN for the affected queries."""
        out, lse = kernel.forward(self.inputs, self.value, dropped)
        assert lse is not None  # `forward_if_clean` runs kernels without an lse
        if isinstance(kernel, KernelWithBackward) and not is_finite(out):
            out, lse = _forward_again(kernel, self.inputs, self.value, dropped, (out, lse))
        return out.masked_fill(self.nan_output[..., None], math.nan), lse.masked_fill(self.nan_scores, math.nan)


def forward(
    kernel: Kernel, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None = None
) -> tuple[Tensor, Tensor]:
    """Run a kernel so that NaN and inf reach the output and the lse only of queries that may attend to them."""
    if isinstance(kernel, KernelWithBackward):
        out, lse = kernel.forward(inputs, value, dropped)
        # A finite output contains no NaN or inf from the inputs, unless the score function could make them finite.
        if inputs.plan.is_full or (is_finite(out) and (_keeps_infinity(inputs) or is_finite(inputs.query, inputs.key))):
            return out, lse
        sanitized = sanitize(inputs, value)
        if sanitized is not None:
            return sanitized.forward(kernel, dropped)
        return (out, lse) if is_finite(out) else _forward_again(kernel, inputs, value, dropped, (out, lse))
    return _forward_by_autograd(kernel, inputs, value, dropped)


def _forward_by_autograd(
    kernel: Kernel, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None
) -> tuple[Tensor, Tensor]:
    # Autograd differentiates everything that is computed, so masked pairs must not be part of it.
    inputs, value = _without_large_values(inputs, value) or (inputs, value)
    sanitized = None if is_clean(inputs, inputs.query, inputs.key, value) else sanitize(inputs, value)
    if sanitized is not None:
        return sanitized.forward(kernel, dropped)
    out, lse = kernel.forward(inputs, value, dropped)
    assert lse is not None
    nan_rows = lse.detach().isnan()
    if out.requires_grad and not inputs.plan.is_full and bool(nan_rows.any()):
        sanitized = sanitize(inputs, value, nan_rows)
        assert sanitized is not None  # nan_rows has a row to hide
        return sanitized.forward(kernel, dropped)
    return out, lse


def forward_if_clean(kernel: Kernel, inputs: AttentionInputs, value: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """Run a kernel that cannot mask rows. Return None, so that another kernel runs, if NaN or inf could spread."""
    # Check even if nothing is masked, because some kernels return finite results for a query of NaN.
    if not is_finite(inputs.query, inputs.key, value):
        return None
    out, lse = kernel.forward(inputs, value, None)
    # A score can overflow although query and key are finite, and NaN then spreads in the backward pass.
    if out.requires_grad and not inputs.plan.is_full and bool(out.detach().isnan().any()):
        return None
    if out.requires_grad and lse is not None and not inputs.plan.is_full:
        # Empty rows are 0 and -inf already; masking them again stops gradients (even NaN) from flowing into them.
        empty = lse.detach() == -math.inf
        return out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -math.inf)
    return out, lse


def backward(
    kernel: KernelWithBackward,
    inputs: AttentionInputs,
    value: Tensor,
    dropped: Dropped | None,
    results: Backward,
    wanted: tuple[bool, ...],
) -> Tensors:
    """Run a kernel's backward pass, and return gradients in which NaN and inf are contained."""
    # Masked pairs have weight 0, and 0 * NaN and 0 * inf are NaN, so finite gradients are right, and the tensors need
    # not be read before.
    grads: Tensors | None = None
    if _has_plain_rows(inputs, results.lse):
        grads = kernel.backward(inputs, value, dropped, results, wanted)
        if inputs.plan.is_full or is_finite(*(x for x in grads if x is not None)):
            return grads
    if grads is None or not is_finite(inputs.query, inputs.key, value):
        inputs, value, results = _sanitized_inputs(kernel, inputs, value, dropped, results)
        grads = kernel.backward(inputs, value, dropped, results, wanted)
        if inputs.plan.is_full or is_finite(*(x for x in grads if x is not None)):
            return grads
    instead = _rerun_after_overflow(kernel, inputs, value)
    return grads if instead is None else instead[0].backward(*instead[1:], dropped, results, wanted)


def contained(
    inputs: AttentionInputs, value: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> tuple[AttentionInputs, Tensor, Tensor, Tensor | None]:
    """Return inputs and upstream gradients for a differentiable backward pass, with NaN and inf contained.

    Args:
        inputs, value: inputs and values of the forward product.
        lse: log-sum-exp of the forward product; NaN for rows whose bias contains NaN.
        grad_out, grad_lse: upstream gradients. They are zeroed for rows that are NaN.
    """
    inputs, value = _without_large_values(inputs, value) or (inputs, value)
    nan_rows = lse.isnan()
    if is_clean(inputs, inputs.query, inputs.key, value) and (inputs.plan.is_full or not bool(nan_rows.any())):
        return inputs, value, grad_out, grad_lse
    sanitized = sanitize(inputs, value, nan_rows)
    if sanitized is None:
        return inputs, value, grad_out, grad_lse
    grad_lse = None if grad_lse is None else grad_lse.masked_fill(sanitized.nan_scores, 0.0)
    return sanitized.inputs, sanitized.value, grad_out.masked_fill(sanitized.nan_output[..., None], 0.0), grad_lse


def _sanitized_inputs(
    kernel: KernelWithBackward, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None, results: Backward
) -> tuple[AttentionInputs, Tensor, Backward]:
    """Return inputs and results for a backward pass in which NaN cannot spread through masked pairs or empty rows."""
    # A finite output does not imply that masked rows are finite: in a backward pass, 0 * NaN and 0 * inf would spread.
    # Nor do finite inputs suffice: a visible bias may be NaN, and then all weights of its row are NaN.
    nan_rows = results.lse.isnan()
    known = is_clean(inputs, inputs.query, inputs.key, value) and (inputs.plan.is_full or not bool(nan_rows.any()))
    sanitized = None if known else sanitize(inputs, value, nan_rows)
    if sanitized is not None:
        inputs, value = sanitized.inputs, sanitized.value
        out, lse = kernel.forward(inputs, value, dropped)
        if not is_finite(out):
            out, lse = _forward_again(kernel, inputs, value, dropped, (out, lse))
        # The results of affected queries are NaN, regardless of the inputs.
        grad_lse = None if results.grad_lse is None else results.grad_lse.masked_fill(sanitized.nan_scores, 0.0)
        grad_out = results.grad_out.masked_fill(sanitized.nan_output[..., None], 0.0)
        results = Backward(out, lse, grad_out, grad_lse)
    empty = results.lse == -math.inf
    if bool(empty.any()):  # empty rows have gradient 0, even for an upstream NaN
        lse, grad_out = results.lse.masked_fill(empty, math.inf), results.grad_out.masked_fill(empty[..., None], 0.0)
        grad_lse = None if results.grad_lse is None else results.grad_lse.masked_fill(empty, 0.0)
        results = Backward(results.out, lse, grad_out, grad_lse)
    return inputs, value, results


def _forward_again(
    kernel: KernelWithBackward,
    inputs: AttentionInputs,
    value: Tensor,
    dropped: Dropped | None,
    results: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Run the kernel again if overflow at masked pairs may have caused NaN; otherwise, return the earlier results."""
    instead = _rerun_after_overflow(kernel, inputs, value)
    return results if instead is None else instead[0].forward(*instead[1:], dropped)


def _rerun_after_overflow(
    kernel: KernelWithBackward, inputs: AttentionInputs, value: Tensor
) -> tuple[KernelWithBackward, AttentionInputs, Tensor] | None:
    """Return the kernel, inputs and values for a second run if masked pairs may have overflowed; otherwise None."""
    smaller = _without_large_values(inputs, value)
    if smaller is None and not kernel.adds_to_masked:
        return None
    return (_TILED if kernel.adds_to_masked else kernel, *(smaller or (inputs, value)))


def _without_large_values(inputs: AttentionInputs, value: Tensor) -> tuple[AttentionInputs, Tensor] | None:
    """Return the inputs and values with masked keys and values set to 0 if their products may overflow.

    Return None if no key or value is that large, or if any large one is visible to a query.
    """
    if inputs.plan.is_full:
        return None
    most = math.sqrt(torch.finfo(inputs.compute_dtype).max) / 16
    large_key, large_value = ((x.detach().abs() > most).any(-1) for x in (inputs.key, value))
    if not bool(large_key.any() | large_value.any()):
        return None
    no_query = torch.zeros(inputs.query.shape[:3], dtype=torch.bool, device=inputs.device)
    with torch.no_grad():
        affected = affected_queries(inputs.replaced(fingerprints=None), no_query, large_key, large_value)
    if any(bool(x.any()) for x in affected):
        return None
    # No query attends to these keys, because of the mask or a score of -inf; a zeroed key would have score 0.
    bias = _hide_in_bias(inputs, no_query, large_key) if bool(large_key.any()) else inputs.bias
    key = inputs.key.masked_fill(large_key[..., None], 0)
    return inputs.replaced(key=key, bias=bias), value.masked_fill(large_value[..., None], 0)


def _hide_in_bias(inputs: AttentionInputs, bad_query: Tensor, bad_key: Tensor) -> MaskedTerm:
    """Return a bias that masks the marked queries and keys by adding -inf to their scores."""
    hidden = bad_key.repeat_interleave(inputs.shape[1] // bad_key.shape[1], 1)
    return MaskedTerm(inputs.bias, bad_query, hidden, inputs.query.new_zeros(1, 1, 1, 1))


def is_clean(inputs: AttentionInputs, *tensors: Tensor) -> bool:
    """Return whether NaN and inf cannot spread to wrong rows: no pair is masked, or all tensors are finite."""
    return inputs.plan.is_full or is_finite(*tensors)


def _has_plain_rows(inputs: AttentionInputs, lse: Tensor) -> bool:
    """Return whether a quick test shows that no row is empty and, if pairs are masked, that no row is NaN."""
    return lse.numel() > 0 and float(lse.amin()) > -math.inf if inputs.plan.is_full else is_finite(lse)


def _keeps_infinity(inputs: AttentionInputs) -> bool:
    """Return whether non-finite queries and keys always have non-finite scores: no softcap or function changes them."""
    return inputs.softcap is None and inputs.tile_function is None and inputs.modification is None


def bytes_of_check(kernel: Kernel, inputs: AttentionInputs, value_dim: int) -> int:
    """Return the peak memory, in bytes, that the NaN and inf check in `forward` needs beyond a kernel's results."""
    batch, heads, q_len, kv_len = inputs.shape
    if inputs.plan.is_full:
        return 0
    width, groups = inputs.key.shape[3], inputs.key.shape[1]
    if not kernel.has_backward:
        entries = groups * kv_len * max(width, value_dim)
    elif _keeps_infinity(inputs):
        entries = heads * q_len * value_dim
    else:
        entries = max(heads * q_len * max(width, value_dim), groups * kv_len * width)
    return bytes_widened(batch * entries, inputs.query.dtype)


def sanitize(inputs: AttentionInputs, value: Tensor, nan_rows: Tensor | None = None) -> Sanitized | None:
    """Return inputs in which non-finite rows of query, key and value are 0 and masked; None if all are finite.

    Args:
        inputs, value: the original inputs.
        nan_rows: bool ``[batch, heads, q_len]``, queries known to have a NaN score, for example from a bias.

    Cost: O(len * head_dim). If there are non-finite rows, their pairs in the plan are also evaluated.
    """
    bad_query, bad_key, bad_value = (not_finite(x) for x in (inputs.query, inputs.key, value))
    bad_query = bad_query if nan_rows is None else bad_query | nan_rows
    if not bool(bad_query.any() | bad_key.any() | bad_value.any()):
        return None
    # A zeroed key has score 0; -inf in the bias hides it.
    bias = _hide_in_bias(inputs, bad_query, bad_key) if bool(bad_query.any() | bad_key.any()) else inputs.bias
    query, key = inputs.query.masked_fill(bad_query[..., None], 0), inputs.key.masked_fill(bad_key[..., None], 0)
    clean = inputs.replaced(query=query, key=key, bias=bias)
    with torch.no_grad():
        by_scores, by_value = affected_queries(inputs.replaced(fingerprints=None), bad_query, bad_key, bad_value)
    return Sanitized(clean, value.masked_fill(bad_value[..., None], 0), by_scores, by_scores | by_value)


def affected_queries(
    inputs: AttentionInputs, bad_query: Tensor, bad_key: Tensor, bad_value: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the queries whose visible scores involve a bad query or key, and the queries that see a bad value.

    The ``bad_`` arguments mark rows that are not finite or too large. They and the results are bool tensors
    ``[batch, heads | kv_heads, len]``.
    """
    _, heads, _, _ = inputs.shape
    groups = bad_key.shape[1]
    by_scores, by_value = torch.zeros_like(bad_query), torch.zeros_like(bad_query)
    bad_columns = (bad_key | bad_value).any(0).any(0).numpy(force=True)
    for tile in inputs.row_plan.tiles:
        has_bad_query = bool(at(bad_query[tile.batch, tile.heads], tile.rows, 2).any())
        columns = tile.columns if has_bad_query else tuple(_marked_columns(tile, bad_columns))
        if not columns:
            continue
        cut = tile._replace(columns=columns)
        for piece in pieces(cut, share=heads // groups, rows=cut.height, entries=_PAIRS_AT_ONCE):
            visible = scores_of(inputs, piece) != -math.inf
            of_group = (piece.batch, groups_of(piece.heads, heads, groups))
            spans = joined(piece.spans)
            share = visible.shape[1] // (of_group[1].stop - of_group[1].start)
            key, value = (
                take(x[of_group], spans, 2).repeat_interleave(share, 1)[:, :, None] for x in (bad_key, bad_value)
            )
            query = at(bad_query[piece.batch, piece.heads], piece.rows, 2)
            for total, touched in (
                (by_scores, (visible & key).any(-1) | (visible.any(-1) & query)),
                (by_value, (visible & value).any(-1)),
            ):
                at(total[piece.batch, piece.heads], piece.rows, 2).logical_or_(touched)
    return by_scores, by_value


def _marked_columns(tile: Tile, marked: np.ndarray) -> Iterator[ColumnRange]:
    """Yield the runs of adjacent columns of a tile that are marked as non-finite in ``marked``, bool ``[kv_len]``."""
    for strip in tile.columns:
        keys = strip.keys
        places = np.flatnonzero(marked[keys.start : keys.stop : keys.step])
        for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(places) else ():
            span = keys[int(run[0]) : int(run[-1]) + 1]
            yield ColumnRange(span, True if strip.partial is True else ("pairs", tile.rows, span))
