"""NaN and inf must not pass between a query and a key where the one may not attend to the other.

In a product of matrices 0 * NaN is NaN, so masking the given alone does not keep them apart. Kernels therefore run on
ingredients in which such rows are zeroed and hidden, and afterwards mark with NaN the queries that are affected: those
that may attend to such a key or value, and those that hold it themselves and may attend to anything. A pair whose score
is -inf has weight 0, whatever its key and value hold.

What is hidden may also be finite and so large that products with it overflow: inf - inf and 0 * inf are NaN. There
the product is run once more without such keys and values, if nobody may attend to them, and by a kernel that leaves
hidden scores out.
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
from saccade.engine.tiles.grouped_heads import at, groups_of, joined, take
from saccade.engine.tiles.tile_scores import scores_of
from saccade.engine.tiles.tile_splitting import pieces
from saccade.plan import ColumnRange, Tile
from saccade.support.numerics import is_finite, not_finite

_PAIRS_AT_ONCE = 1 << 20
_TILED = Tiled()


class Sanitized(NamedTuple):
    """AttentionInputs without non-finite rows, and the queries whose results are NaN all the same.

    Attributes:
        inputs, value: the cleaned ingredients; rows of query and key that were not finite are hidden.
        nan_scores: queries with a score that is NaN, or that reach such a key; bool ``[batch, heads, q_len]``.
        nan_output: these, and queries that may attend to such a value.
    """

    inputs: AttentionInputs
    value: Tensor
    nan_scores: Tensor
    nan_output: Tensor

    def forward(self, kernel: Kernel, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
        """Output and lse of the cleaned ingredients, NaN for the queries affected; other rows stay as they are."""
        out, lse = kernel.forward(self.inputs, self.value, dropped)
        assert lse is not None  # a kernel that gives none is run by `forward_if_clean`
        if isinstance(kernel, KernelWithBackward) and not is_finite(out):
            out, lse = _forward_again(kernel, self.inputs, self.value, dropped, (out, lse))
        return out.masked_fill(self.nan_output[..., None], math.nan), lse.masked_fill(self.nan_scores, math.nan)


def forward(
    kernel: Kernel, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None = None
) -> tuple[Tensor, Tensor]:
    """Output and lse of any kernel, in which NaN and inf are where they may be seen."""
    if isinstance(kernel, KernelWithBackward):
        out, lse = kernel.forward(inputs, value, dropped)
        # Where the output is finite, nothing that is not has had a part in it, unless scores could bring it back.
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
    # Autograd goes back through what is computed: what is hidden must not be part of it.
    inputs, value = _without_large(inputs, value) or (inputs, value)
    sanitized = None if is_clean(inputs, inputs.query, inputs.key, value) else sanitize(inputs, value)
    if sanitized is not None:
        return sanitized.forward(kernel, dropped)
    out, lse = kernel.forward(inputs, value, dropped)
    assert lse is not None
    nan_rows = lse.detach().isnan()
    if out.requires_grad and not inputs.plan.is_full and bool(nan_rows.any()):
        sanitized = sanitize(inputs, value, nan_rows)
        assert sanitized is not None  # there is a row to hide
        return sanitized.forward(kernel, dropped)
    return out, lse


def forward_if_clean(kernel: Kernel, inputs: AttentionInputs, value: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """Output and lse of a kernel that can hide no rows; None where NaN or inf could pass: another one has to run."""
    # Even where nothing is hidden: kernels have been seen to answer a query of NaN with numbers.
    if not is_finite(inputs.query, inputs.key, value):
        return None
    out, lse = kernel.forward(inputs, value, None)
    # A score can overflow though its query and its key are finite, and in a backward pass spread from there.
    if out.requires_grad and not inputs.plan.is_full and bool(out.detach().isnan().any()):
        return None
    if out.requires_grad and lse is not None and not inputs.plan.is_full:
        # They are 0 and -inf already: what flows back to rows that see nothing, a NaN even, ends here.
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
    """Gradients by a kernel's own backward pass."""
    if not _is_plain(inputs, value, results.lse):
        inputs, value, results = _sanitized_inputs(kernel, inputs, value, dropped, results)
    found = kernel.backward(inputs, value, dropped, results, wanted)
    if inputs.plan.is_full or is_finite(*(x for x in found if x is not None)):
        return found
    instead = _instead(kernel, inputs, value)
    return found if instead is None else instead[0].backward(*instead[1:], dropped, results, wanted)


def contained(
    inputs: AttentionInputs, value: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> tuple[AttentionInputs, Tensor, Tensor, Tensor | None]:
    """Return the inputs of a differentiable backward pass such that NaN and inf spread to no row that is not theirs.

    Args:
        inputs, value: of the product.
        lse: its result; NaN for the rows that a bias makes so.
        grad_out, grad_lse: gradients of the results, which are zeroed for the rows that are NaN.
    """
    inputs, value = _without_large(inputs, value) or (inputs, value)
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
    """Return inputs of a backward pass from which nothing spreads through hidden pairs or empty rows."""
    # A finite output does not say that what is hidden was: here 0 * NaN and 0 * inf would spread from there.
    # Nor do finite inputs: a bias may be NaN where it is seen, and then all weights of the row are.
    nan_rows = results.lse.isnan()
    known = is_clean(inputs, inputs.query, inputs.key, value) and (inputs.plan.is_full or not bool(nan_rows.any()))
    sanitized = None if known else sanitize(inputs, value, nan_rows)
    if sanitized is not None:
        inputs, value = sanitized.inputs, sanitized.value
        out, lse = kernel.forward(inputs, value, dropped)
        if not is_finite(out):
            out, lse = _forward_again(kernel, inputs, value, dropped, (out, lse))
        # The results of the queries affected are NaN, whatever the inputs are.
        grad_lse = None if results.grad_lse is None else results.grad_lse.masked_fill(sanitized.nan_scores, 0.0)
        grad_out = results.grad_out.masked_fill(sanitized.nan_output[..., None], 0.0)
        results = Backward(out, lse, grad_out, grad_lse)
    empty = results.lse == -math.inf
    if bool(empty.any()):  # a row that sees nothing cannot be moved, not even by NaN
        lse, grad_out = results.lse.masked_fill(empty, math.inf), results.grad_out.masked_fill(empty[..., None], 0.0)
        grad_lse = None if results.grad_lse is None else results.grad_lse.masked_fill(empty, 0.0)
        results = Backward(results.out, lse, grad_out, grad_lse)
    return inputs, value, results


def _forward_again(
    kernel: KernelWithBackward,
    inputs: AttentionInputs,
    value: Tensor,
    dropped: Dropped | None,
    found: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Run the product again if hidden pairs may have overflowed; else return the earlier results."""
    instead = _instead(kernel, inputs, value)
    return found if instead is None else instead[0].forward(*instead[1:], dropped)


def _instead(
    kernel: KernelWithBackward, inputs: AttentionInputs, value: Tensor
) -> tuple[KernelWithBackward, AttentionInputs, Tensor] | None:
    """Return the kernel and inputs to run where hidden pairs may have overflowed; None if nothing could."""
    smaller = _without_large(inputs, value)
    if smaller is None and not kernel.adds_to_masked:
        return None
    return (_TILED if kernel.adds_to_masked else kernel, *(smaller or (inputs, value)))


def _without_large(inputs: AttentionInputs, value: Tensor) -> tuple[AttentionInputs, Tensor] | None:
    """Without keys and values that products overflow with; None if there are none, or somebody may attend to one."""
    if inputs.plan.is_full:
        return None
    most = math.sqrt(torch.finfo(inputs.compute_dtype).max) / 16
    large_key, large_value = ((x.detach().abs() > most).any(-1) for x in (inputs.key, value))
    if not bool(large_key.any() | large_value.any()):
        return None
    nobody = torch.zeros(inputs.query.shape[:3], dtype=torch.bool, device=inputs.device)
    with torch.no_grad():
        affected = affected_queries(inputs.replaced(answers=None), nobody, large_key, large_value)
    if any(bool(x.any()) for x in affected):
        return None
    # Nobody may attend to it by the mask, or since its score is -inf: that of zeros would not be.
    bias = _masked(inputs, nobody, large_key) if bool(large_key.any()) else inputs.bias
    key = inputs.key.masked_fill(large_key[..., None], 0)
    return inputs.replaced(key=key, bias=bias), value.masked_fill(large_value[..., None], 0)


def _masked(inputs: AttentionInputs, bad_query: Tensor, bad_key: Tensor) -> MaskedTerm:
    """Return the bias with -inf for some queries and keys, which masks their scores."""
    hidden = bad_key.repeat_interleave(inputs.shape[1] // bad_key.shape[1], 1)
    return MaskedTerm(inputs.bias, bad_query, hidden, inputs.query.new_zeros(1, 1, 1, 1))


def is_clean(inputs: AttentionInputs, *tensors: Tensor) -> bool:
    """Whether nothing that is not finite could pass where it must not: nothing is hidden, or all is finite."""
    return inputs.plan.is_full or is_finite(*tensors)


def _is_plain(inputs: AttentionInputs, value: Tensor, lse: Tensor) -> bool:
    """Whether nothing that is not finite could spread, and every row sees something: one look in place of several."""
    if inputs.plan.is_full:
        return lse.numel() > 0 and float(lse.amin()) > -math.inf
    return is_finite(lse, inputs.query, inputs.key, value)


def _keeps_infinity(inputs: AttentionInputs) -> bool:
    """Whether a query or key that is not finite has no finite score; a cap, or a function, may make one of it."""
    return inputs.softcap is None and inputs.tile_function is None and inputs.modification is None


def bytes_of_check(kernel: Kernel, inputs: AttentionInputs, value_dim: int) -> int:
    """Return the bytes held beside a kernel's results, or instead of them, while `forward` tests for NaN and inf."""
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
    """Zero and hide the non-finite rows of query, key and value; None if there are none.

    Args:
        inputs, value: as they are.
        nan_rows: bool ``[batch, heads, q_len]``, queries that are known to have a score of NaN, such as from a bias.

    Cost: O(len * head_dim), and if there are such rows a look at the pairs of the plan that they have a part in.
    """
    bad_query, bad_key, bad_value = (not_finite(x) for x in (inputs.query, inputs.key, value))
    bad_query = bad_query if nan_rows is None else bad_query | nan_rows
    if not bool(bad_query.any() | bad_key.any() | bad_value.any()):
        return None
    # A zeroed key has score 0; -inf in the bias hides it.
    bias = _masked(inputs, bad_query, bad_key) if bool(bad_query.any() | bad_key.any()) else inputs.bias
    query, key = inputs.query.masked_fill(bad_query[..., None], 0), inputs.key.masked_fill(bad_key[..., None], 0)
    clean = inputs.replaced(query=query, key=key, bias=bias)
    with torch.no_grad():
        by_scores, by_value = affected_queries(inputs.replaced(answers=None), bad_query, bad_key, bad_value)
    return Sanitized(clean, value.masked_fill(bad_value[..., None], 0), by_scores, by_scores | by_value)


def affected_queries(
    inputs: AttentionInputs, bad_query: Tensor, bad_key: Tensor, bad_value: Tensor
) -> tuple[Tensor, Tensor]:
    """Return queries with a score, other than -inf, of a bad query or key; and those that reach a bad value."""
    _, heads, _, _ = inputs.shape
    groups = bad_key.shape[1]
    by_scores, by_value = torch.zeros_like(bad_query), torch.zeros_like(bad_query)
    bad_columns = (bad_key | bad_value).any(0).any(0).numpy(force=True)
    for tile in inputs.row_plan.tiles:
        is_own = bool(at(bad_query[tile.batch, tile.heads], tile.rows, 2).any())
        columns = tile.columns if is_own else tuple(_picked(tile, bad_columns))
        if not columns:
            continue
        cut = tile._replace(columns=columns)
        for piece in pieces(cut, share=heads // groups, rows=cut.height, entries=_PAIRS_AT_ONCE):
            seen = scores_of(inputs, piece) != -math.inf
            of_group = (piece.batch, groups_of(piece.heads, heads, groups))
            spans = joined(piece.spans)
            share = seen.shape[1] // (of_group[1].stop - of_group[1].start)
            key, value = (
                take(x[of_group], spans, 2).repeat_interleave(share, 1)[:, :, None] for x in (bad_key, bad_value)
            )
            query = at(bad_query[piece.batch, piece.heads], piece.rows, 2)
            for total, touched in (
                (by_scores, (seen & key).any(-1) | (seen.any(-1) & query)),
                (by_value, (seen & value).any(-1)),
            ):
                at(total[piece.batch, piece.heads], piece.rows, 2).logical_or_(touched)
    return by_scores, by_value


def _picked(tile: Tile, marked: np.ndarray) -> Iterator[ColumnRange]:
    """Yield the marked columns of a tile (bool ``[kv_len]``), as ranges."""
    for strip in tile.columns:
        keys = strip.keys
        places = np.flatnonzero(marked[keys.start : keys.stop : keys.step])
        for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(places) else ():
            span = keys[int(run[0]) : int(run[-1]) + 1]
            yield ColumnRange(span, True if strip.partial is True else ("pairs", tile.rows, span))
