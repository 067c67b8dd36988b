"""Recover a model's attention call from its lazy weights and the values that they multiply."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.fusion.axes import Axis, split_axes
from saccade.fusion.product_spellings import Product
from saccade.fusion.repeated_heads import Repeats
from saccade.fusion.roles import HIDDEN, Roles, roles_of
from saccade.fusion.scores import Scores, detached_if_no_grad, is_dense, product_dtype
from saccade.masks import Mask, as_mask
from saccade.matrix import AttentionMatrix, Matrix
from saccade.support.errors import unsupported
from saccade.support.numerics import is_finite
from saccade.support.torch_modes import without_autocast


@dataclass(frozen=True)
class AttentionCall:
    """The inputs of a softmax attention call, recovered from a model's operations; see `saccade.attention`.

    Args:
        query: ``[batch, heads, q_len, head_dim]``.
        key, value: ``[batch, kv_heads, kv_len, head_dim]`` and ``[batch, kv_heads, kv_len, value_dim]``.
        mask: bool, True = may attend, broadcasts to ``[batch, heads, q_len, kv_len]``; None if every pair is allowed.
            If a model fills a whole row with one number, the row's query is set to 0 and all its pairs are allowed. A
            row is empty only if the model sets all its weights to 0.
        bias: added to the scores, broadcasts to ``[batch, heads, q_len, kv_len]``; None for no bias.
        scale, softcap: see `saccade.attention`.
        dropout_p: dropout probability of the weights.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    bias: Tensor | None
    scale: float
    softcap: float | None
    dropout_p: float

    def matrix(self, pattern: Mask | None = None) -> AttentionMatrix:
        """Return the attention matrix of the call, without dropout.

        Args:
            pattern: combined with the mask of the call by ``&``.
        """
        mask: Mask | Tensor | None = self.mask
        if pattern is not None:
            shape = (*self.query.shape[:3], self.key.shape[2])
            mask = pattern if mask is None else pattern & as_mask(mask, (shape[0], shape[1], shape[2], shape[3]))
        return AttentionMatrix(self.query, self.key, mask, bias=self.bias, scale=self.scale, softcap=self.softcap)

    def run(self) -> Tensor:
        """Compute the output of the attention call with saccade, ``[batch, heads, q_len, value_dim]``."""
        with torch._C.DisableTorchFunction():  # modes observe one call, not the kernel's operations
            return self.matrix().matmul(self.value, dropout_p=self.dropout_p)


class Output(NamedTuple):
    """The layout and dtype in which the model expects the output of an attention call, and the roles of its axes."""

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    roles: Roles

    def arranged(self, out: Tensor) -> Tensor:
        """Convert an attention output ``[batch, heads, q_len, value_dim]`` to the model's layout and dtype."""
        return out.to(self.dtype).reshape(self.sizes).permute(self.order).reshape(self.shape).contiguous()

    def to_heads(self, grad: Tensor, call: AttentionCall) -> Tensor:
        """Convert the gradient with respect to the model's output to ``[batch, heads, q_len, value_dim]``."""
        inverse = [self.order.index(axis) for axis in range(len(self.order))]
        x = grad.reshape([self.sizes[axis] for axis in self.order]).permute(inverse)
        return x.reshape(*call.query.shape[:3], call.value.shape[3])

    def weights_of(self, matrix: Matrix, kv_len: int, weights: Scores) -> Tensor:
        """Return a matrix in the layout and dtype of the model's weights, with their dropout.

        Args:
            matrix: ``[batch, heads, q_len, kv_len]``, possibly without keys at the end that no query attends to.
            kv_len: the number of keys in the model's weights.
            weights: the weights.

        Raises:
            UnsupportedError: the model has split axes of the weights since the call.
        """
        dense = matrix.to_dense(limit=math.prod(matrix.shape))
        dense = F.pad(dense, (0, kv_len - dense.shape[3])).to(weights.dtype)
        known = [factor for dimension in self.roles.dimensions for factor in dimension]
        seen = [factor for axis in weights.axes.axes for factor in axis]
        if sorted(seen) != sorted(known):
            reasons = ["the model reads the weights of a call that saccade has changed, in another layout"]
            raise unsupported("weights", reasons, hint="saccade.record(model) returns the weights")
        x = dense.reshape([self.roles.sizes[factor] for factor in known])
        x = x.permute([known.index(factor) for factor in seen]).reshape(weights.axes.shape)
        return F.dropout(x, weights.dropout_p) if weights.dropout_p else x


def attention_call(
    product: Product, repeats: Repeats, *, allow_non_finite: bool = False
) -> tuple[AttentionCall, Output] | None:
    """Convert a product of attention weights and values to an attention call; return None if that is not possible.

    It is not possible if the values depend on the query, if the weights are not summed over the axis of the softmax,
    or if the model's result may differ from exact attention because of rows without a visible key, NaN or inf, or a
    mask with numbers that are not negative enough to mask a pair.

    Args:
        product: the product.
        repeats: the known tensors with repeated entries.
        allow_non_finite: whether to accept NaN and inf. The call propagates them only to queries that may attend to
            them, whereas the model's own code would propagate them to all outputs.
    """
    is_left = isinstance(product.left, Scores)
    weights, value = (product.left, product.right) if is_left else (product.right, product.left)
    names, value_names = product.left_letters, product.right_letters
    names, value_names = (names, value_names) if is_left else (value_names, names)
    if not isinstance(weights, Scores) or weights.softmax is None or isinstance(value, Scores):
        return None
    if not is_dense(value):
        return None
    axes = dict(zip(names, weights.axes.axes, strict=True))
    dtype = _dtype_of_product(weights, value)
    if dtype is None or len(product.summed) != 1 or set(axes[product.summed[0]]) != set(weights.softmax):
        return None
    if product.alpha != 1.0 or product.added is not None or weights.left.device != value.device:
        return None
    of_value = dict(axes)
    repeated = repeats.find(value)
    name = product.summed[0] if repeated is None else value_names[repeated.axis]
    is_head = name not in product.summed and bool(axes.get(name))
    if repeated is not None and is_head and weights.axes.sizes[axes[name][-1]] == repeated.copies:
        value = value.unflatten(repeated.axis, (-1, repeated.copies)).select(repeated.axis + 1, 0)
        of_value[name] = axes[name][:-1]
    # Ignore an axis along which the values are expanded.
    steps = dict(zip(value_names, zip(value.shape, value.stride(), strict=True), strict=True))
    shared = [x for x in value_names if axes.get(x) and steps[x][0] > 1 and (steps[x][1] or x in product.summed)]
    roles = roles_of(weights, axes[product.summed[0]], {factor for x in shared for factor in of_value[x]})
    if roles is None:
        return None
    extra = [x for x in value_names if not axes.get(x)]
    with without_autocast(value.device):
        value = _arranged_values(detached_if_no_grad(value), value_names, shared, extra, of_value, roles)
        wide = torch.promote_types(weights.product_dtype, dtype)
        call = _build_call(weights, roles, value, wide, allow_non_finite=allow_non_finite)
    return None if call is None else (call, _output_layout(product, axes, roles, extra, dtype))


def _dtype_of_product(weights: Scores, value: Tensor) -> torch.dtype | None:
    """Return the dtype of the product of attention weights and values, or None if torch cannot multiply them."""
    dtype = product_dtype(value)
    weights_dtype = product_dtype(weights.left.new_empty(0, dtype=weights.dtype))
    return dtype if dtype == weights_dtype and value.is_floating_point() else None


def _build_call(
    weights: Scores, roles: Roles, value: Tensor, dtype: torch.dtype, *, allow_non_finite: bool
) -> AttentionCall | None:
    query, key = weights.left, weights.right
    queries, keys = (*weights.batch, *weights.left_only), (*weights.batch, *weights.right_only)
    if set(roles.columns) <= set(weights.left_only):
        query, key, queries, keys = key, query, keys, queries
    query = _permuted_and_expanded(
        query.to(weights.product_dtype), queries, (*roles.batch, *roles.groups, *roles.rows), roles
    )
    key = _permuted_and_expanded(key.to(weights.product_dtype), keys, (*roles.batch, *roles.columns), roles)
    for factor in weights.factors:
        x = factor.permute(
            [weights.all_factors.index(one) for one in (*roles.batch, *roles.groups, *roles.rows)]
            + [weights.all_factors.index(one) for one in roles.columns]
        )
        if math.prod(x.shape[-len(roles.columns) :]) == 1:
            query = query * x.reshape(*x.shape[: -len(roles.columns)], 1)
        else:
            key = key * x.reshape(*x.shape[: len(roles.batch)], *x.shape[-len(roles.columns) :], 1)
    items, heads, rows, columns = map(roles.length, roles.dimensions)
    kv_heads = roles.length(roles.heads)
    query = query.reshape(items, heads, rows, -1).to(dtype)
    key = key.reshape(items, kv_heads, columns, -1).to(dtype)
    value = value.reshape(items, kv_heads, columns, -1).to(dtype)
    scale, cap = weights.scale, weights.cap
    scale = scale if cap is None else scale * cap
    if not math.isfinite(scale) or not (cap is None or 0 < cap < math.inf):
        return None
    if not ((allow_non_finite and not weights.replaces_nan) or is_finite(query, key, value)):
        return None
    masked = _mask_and_bias(weights, roles, query, key)
    if masked is None or not _masks_all_zeros(weights, roles, masked[0]):
        return None
    mask, bias, empty = masked
    if empty is not None:
        query = query.masked_fill(empty, 0.0)
    return AttentionCall(query, key, value, mask, bias, scale, cap, weights.dropout_p)


def _permuted_and_expanded(x: Tensor, factors: Axis, order: Axis, roles: Roles) -> Tensor:
    """Permute an operand's factors (sub-axes) to the given order, and expand it along the factors that it lacks."""
    missing = [factor for factor in order if factor not in factors]
    x = x[(None,) * len(missing)]
    have = [*missing, *factors]
    x = x.permute(*(have.index(factor) for factor in order), x.dim() - 1)
    return x.expand(*(roles.sizes[factor] for factor in order), -1)


def _arranged_values(
    x: Tensor, names: tuple[str, ...], shared: list[str], extra: list[str], axes: dict[str, Axis], roles: Roles
) -> Tensor:
    """Reshape the values to one dimension for each factor of batch, heads and keys, and one for all other axes."""
    unused = [name for name in names if name not in (*shared, *extra)]
    for name in unused:
        x = x.narrow(names.index(name), 0, 1)
    x = x.permute([names.index(name) for name in (*shared, *extra, *unused)])
    x = x.reshape(*x.shape[: len(shared)], -1)
    order = (*roles.batch, *roles.columns)
    x = split_axes(x, [axes[name] for name in shared], roles.sizes, order)
    return x.expand(*(roles.sizes[factor] for factor in order), -1)


def _output_layout(
    product: Product, axes: dict[str, Axis], roles: Roles, extra: list[str], dtype: torch.dtype
) -> Output:
    factors = (*roles.batch, *roles.groups, *roles.rows)
    names: list[int | str] = [*factors, *extra]
    sizes = (*(roles.sizes[x] for x in factors), *(product.sizes[x] for x in extra))
    order = [names.index(x) for letter in product.letters for x in (axes.get(letter) or [letter]) if x in names]
    return Output(sizes, tuple(order), tuple(product.sizes[x] for x in product.letters), dtype, roles)


def _mask_and_bias(
    weights: Scores, roles: Roles, query: Tensor, key: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
    """Split the fills and terms of lazy scores into allowed pairs, a bias, and the rows whose query must be set to 0.

    Return None if the softmax may give weight to a pair that should be masked. A number such as -1e9 masks a pair only
    if the pair's weight rounds to 0 relative to the weight of any visible key. A row whose keys are all filled with one
    number attends to them uniformly.
    """
    every = weights.all_factors
    hidden = [roles.to_four_dims(fill.pairs, every) for fill in weights.fills]
    highest = max((fill.value for fill in weights.fills), default=-math.inf)
    bias, largest = None, abs(weights.shift)
    for tensor, factor in weights.terms:
        x = roles.to_four_dims(tensor if factor == 1.0 else tensor * factor, every)
        values = x.detach()
        low = values <= HIDDEN
        if bool(low.any()):
            hidden.append(low)
            highest = max(highest, float(values.masked_fill(~low, -math.inf).amax()))
            values = values.masked_fill(low, 0.0)
            x = x if x.requires_grad else values
        size = max(map(abs, torch.stack(torch.aminmax(values)).tolist()))
        if not math.isfinite(size):
            return None
        largest += size
        if size or x.requires_grad:
            bias = x if bias is None else bias + x
    if not hidden:
        return None, bias, None
    if highest > -math.inf:
        underflow = 104.0 if query.dtype != torch.float64 else 746.0
        if not -highest >= underflow + 2 * (_score_bound(weights, query, key) + largest):
            return None
    allowed = ~functools.reduce(torch.logical_or, hidden)
    empty = ~allowed.any(-1, keepdim=True) & ~_rows_of_zeros(weights, roles, has_nan=highest == -math.inf)
    if not bool(empty.any()):
        return allowed, bias, None
    is_filled_last = all(fill.num_terms == len(weights.terms) for fill in weights.fills)
    numbers = {fill.value for fill in weights.fills}
    if len(hidden) > len(weights.fills) or not is_filled_last or len(numbers) > 1 or numbers == {-math.inf}:
        return None
    return allowed | empty, None if bias is None else bias.masked_fill(empty, 0.0), empty


def _rows_of_zeros(weights: Scores, roles: Roles, *, has_nan: bool) -> Tensor:
    """Return the rows ``[..., q_len, 1]`` whose weights the model has all set to 0 after the softmax.

    Args:
        weights, roles: see `_mask_and_bias`.
        has_nan: whether the weights of rows without a visible key are NaN, which stays NaN if it is multiplied by 0.
    """
    none = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=weights.left.device)
    every = [none | (has_nan and weights.replaces_nan)]
    every += [roles.to_four_dims(x.pairs, weights.all_factors) for x in weights.cleared if x.is_filled or not has_nan]
    return functools.reduce(torch.logical_or, every).all(-1, keepdim=True)


def _masks_all_zeros(weights: Scores, roles: Roles, allowed: Tensor | None) -> bool:
    """Return whether every pair is masked whose score was multiplied by 0, or whose weight was set to 0."""
    pairs_of_zeros = (*weights.zeros, *(one.pairs for one in weights.cleared))
    zeros = [roles.to_four_dims(pairs, weights.all_factors) for pairs in pairs_of_zeros]
    return all(allowed is not None and not bool((pairs & allowed).any()) for pairs in zeros)


def _score_bound(weights: Scores, query: Tensor, key: Tensor) -> float:
    """Return an upper bound for the absolute value of the finite attention scores before the bias is added."""
    if weights.cap is not None:
        return weights.cap
    norms = [torch.linalg.vector_norm(x.detach(), dim=-1) for x in (query, key)]
    return abs(weights.scale) * math.prod(float(x.nan_to_num(0.0, 0.0).amax()) for x in norms)
