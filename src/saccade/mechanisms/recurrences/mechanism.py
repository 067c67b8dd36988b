"""Recurrence: the base class of mechanisms whose matrix is a recurrence, and the checks of their gates."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from saccade.caches import RecurrentCache
from saccade.masks import Mask
from saccade.mechanisms.checked_mechanism import Approximate, Inputs, scale_of
from saccade.mechanisms.features.mask_support import Visible, why_no_sum
from saccade.mechanisms.features.sequence_order import check_in_order
from saccade.mechanisms.readable_tensors import is_readable, is_surely_finite
from saccade.mechanisms.recurrences.recurrence_matrix import RecurrenceMatrix
from saccade.positions.token_positions import GivenPositions
from saccade.support.errors import describe, value_error
from saccade.support.language import Message
from saccade.support.validation import check_number, check_type

_LEAST = -1e4  # its exponential is 0 in every dtype, and sums of it stay finite


class Recurrence(Approximate):
    """The base class of mechanisms whose matrix is a recurrence.

    Args:
        scale: scale of the outputs; ``head_dim ** -0.5`` when None.
    """

    is_delta: ClassVar[bool] = False
    matrix_class: ClassVar[type[RecurrenceMatrix]] = RecurrenceMatrix

    def __init__(self, *, scale: float | None = None):
        super().__init__()
        self.scale = None if scale is None else check_number("scale", scale)

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        if mask.is_causal:
            return why_no_sum(mask)
        words = "{mask} is not causal: a token reads only what earlier tokens have written"
        return (*why_no_sum(mask), Message(words, mask=type(mask).__name__))

    def new_cache(self, max_len: int | None = None) -> RecurrentCache:
        """Return an empty `saccade.caches.RecurrentCache`, which stores the recurrence's state in constant memory."""
        return RecurrentCache(max_len)

    def _matrix_of(self, inputs: Inputs) -> RecurrenceMatrix:
        return self._matrix(inputs, None, None)

    def _matrix(self, inputs: Inputs, decay: Tensor | None, beta: Tensor | None) -> RecurrenceMatrix:
        return self._recurrence(inputs, decay, beta)

    def _recurrence(
        self,
        inputs: Inputs,
        decay: Tensor | None,
        beta: Tensor | None,
        recall: Tensor | None = None,
        visible: Visible | None = None,
    ) -> RecurrenceMatrix:
        """Return a recurrence's matrix for checked inputs.

        Args:
            inputs, decay, beta: the inputs and gates.
            recall: the keys with which tokens read the state, with the shape of the keys; None to read with the keys.
            visible: the evaluated mask of the inputs; None to evaluate it.
        """
        where, dtype = type(self).__name__, inputs.query.dtype
        gates = [checked_gate(name, x, inputs) for name, x in (("decay", decay), ("beta", beta)) if x is not None]
        decay = None if decay is None else gates.pop(0)
        beta = gates.pop() if gates else None
        check_heads(inputs, decay=decay, beta=beta)
        visible = Visible.of(inputs) if visible is None else visible
        check_in_order(visible, *inputs.shape[2:])
        if decay is not None:
            decay = decay.clamp(min=_LEAST)  # -inf is valid: it resets the state to 0
        tainted = _union([nonfinite(x) for x in (inputs.key, decay, beta, recall) if x is not None])
        nonfinite_queries = nonfinite(inputs.query)
        tensors = (inputs.query, inputs.key, decay, beta, recall)
        query, key, decay, beta, recall = (None if x is None else clean(x, inputs.wide) for x in tensors)
        assert query is not None and key is not None  # noqa: PT018  for the type checker
        return self.matrix_class(
            query,
            key,
            decay,
            beta,
            visible,
            recall=recall,
            scale=scale_of(self.scale, key.shape[3]),
            is_delta=self.is_delta,
            dtype=dtype,
            tainted=tainted,
            nonfinite_queries=nonfinite_queries,
            source=where,
        )

    def extra_repr(self) -> str:
        return f"scale={self.scale}"


class GatedRecurrence(Recurrence):
    """The base class of recurrences whose gates are passed to each call."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        decay: Tensor | None = None,
        beta: Tensor | None = None,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> RecurrenceMatrix:
        """Return the recurrence's matrix for the queries, keys and gates of one call.

        Args:
            query: ``[batch, heads, q_len, head_dim]``.
            key: ``[batch, key_heads, kv_len, head_dim]``.
            decay: log decay of the state before each token is written, at most 0: ``[batch, kv_heads, kv_len]``, or
                ``[batch, kv_heads, kv_len, head_dim]`` for one per channel. -inf resets the state to 0. None for no
                decay.
            beta: strength with which each token is written, ``[batch, kv_heads, kv_len]``; None for 1. Both gates may
                have any float dtype; computations use float32 or wider.
            mask: a causal mask. With `saccade.masks.Documents`, the state is reset at the start of each document.
                Tokens masked by `saccade.masks.Padding` neither write to the state nor let it decay.
            q_positions, kv_positions: positions of the tokens, in order; -1 for padding.

        Raises:
            ValueError: a gate has the wrong shape, or a decay is above 0.
            UnsupportedError: a mask that is not causal, or tokens that are not in order.
        """
        inputs = self._inputs(query, key, mask, q_positions, kv_positions)
        return self._matrix(inputs, decay, beta)


def checked_gate(name: str, x: Tensor, inputs: Inputs) -> Tensor:
    """Check a gate of a recurrence and return it as ``[batch, heads, kv_len, width]``."""
    check_type(name, x, Tensor, "be a tensor")
    (batch, kv_len), head_dim = (inputs.shape[0], inputs.shape[3]), inputs.key.shape[3]
    shapes = f"[{batch}, heads, {kv_len}]" + (f" or [{batch}, heads, {kv_len}, {head_dim}]" if name == "decay" else "")
    whole = x[..., None] if x.dim() == 3 else x
    widths = {1, head_dim} if name == "decay" else {1}
    fits = whole.dim() == 4 and whole.shape[0] in (1, batch) and whole.shape[2] == kv_len and whole.shape[3] in widths
    if not fits or not x.is_floating_point():
        got = f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        raise value_error(name, f"be a float tensor {shapes}", got, facts=[describe("key", inputs.key)])
    if name == "decay" and is_readable(x) and x.numel() and bool((x > 0).any()):
        hint = "it is the logarithm of a factor of at most 1, for instance -softplus(x)"
        raise value_error(name, "be at most 0", f"{float(x.max()):.3g}", hint=hint)
    return whole.expand(batch, -1, -1, -1)


def check_gate_of_channels(name: str, x: Tensor | None, key: Tensor) -> None:
    """Raise an error unless a gate is None or has one value for each channel of each key."""
    if x is not None and (x.shape != key.shape or not x.is_floating_point()):
        rule = f"be floats {list(key.shape)}, like key"
        raise value_error(name, rule, list(x.shape), facts=[describe("key", key)])


def check_decay_of_tokens(decay: Tensor | None, hint: str) -> None:
    """Raise an error if there is a decay for each channel, because the mechanism needs one decay per token.

    Args:
        decay: the decay, or None.
        hint: the hint of the error, which says why.
    """
    if decay is not None and decay.dim() == 4 and decay.shape[3] != 1:
        raise value_error("decay", "have one value for each token", list(decay.shape), hint=hint)


def check_heads(inputs: Inputs, **gates: Tensor | None) -> None:
    """Raise an error unless the head counts of a recurrence's queries, keys and gates are multiples of one another."""
    counts = {"query": inputs.shape[1], "key": inputs.key.shape[1]}
    counts |= {name: x.shape[1] for name, x in gates.items() if x is not None}
    most_inputs = max([count for name, count in counts.items() if name != "query"])
    most = max(most_inputs, counts["query"])
    wholes = {name: most if name == "query" else most_inputs for name in counts}
    if most % max(1, most_inputs) or any(wholes[name] % max(1, count) for name, count in counts.items()):
        text = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise value_error("heads", "be multiples of one another for queries, keys and gates", text)


def nonfinite(x: Tensor) -> Tensor | None:
    """Return which tokens of a query, key or gate contain NaN or inf, bool ``[batch, heads, len]``; None if none."""
    if is_surely_finite(x):
        return None
    return (~x.detach().isfinite()).any(-1) if x.shape[3] else None


def _union(marks: list[Tensor | None]) -> Tensor | None:
    """Return which tokens are marked in at least one of several tensors, or None if all are None."""
    present = [x for x in marks if x is not None]
    heads = max([1, *[x.shape[1] for x in present]])
    whole = None
    for x in present:
        repeated = x.repeat_interleave(heads // x.shape[1], 1)
        whole = repeated if whole is None else whole | repeated
    return whole


def finite_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two tensors. Where either is not finite, the product is NaN and neither gets a gradient."""
    if is_surely_finite(a) and is_surely_finite(b):
        return a * b
    bad = ~(a.isfinite() & b.isfinite())
    return (a.masked_fill(bad, 0.0) * b.masked_fill(bad, 0.0)).masked_fill(bad, torch.nan)


def clean(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert queries, keys or a gate to the dtype of the recurrence, and set non-finite elements to 0."""
    return x.to(dtype) if is_surely_finite(x) else torch.where(x.isfinite(), x, 0.0).to(dtype)
