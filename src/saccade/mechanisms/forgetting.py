"""Forgetting: softmax attention whose scores decay by the gates of the tokens between key and query."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.engine.bias.decay_sums import DecayTerm
from saccade.engine.inputs import AttentionInputs
from saccade.masks import Causal, Documents, Full, Mask, Window
from saccade.matrix import AttentionMatrix, Impl, matrix_from_inputs
from saccade.mechanisms.base import Mechanism
from saccade.mechanisms.checked_mechanism import Approximate, Inputs, parts_of
from saccade.mechanisms.readable_tensors import is_readable, is_surely_finite
from saccade.positions import Bias
from saccade.positions.token_positions import GivenPositions
from saccade.support.errors import describe, unsupported, value_error
from saccade.support.language import Message
from saccade.support.validation import check_int, check_number

_LEAST = -1e4  # the logarithm of a gate of 0: its exponential is 0 in every dtype, and sums of it stay finite


class Forgetting(Approximate):
    r"""Softmax attention with forget gates: each score adds the log gates of the tokens after the key, up to the query.

    .. math:: A = \mathrm{softmax}_j \Big( s\, q_i \cdot k_j + \sum_{l=j+1}^{i} \log f_l \Big), \qquad
              f_l = \sigma(z_l)

    The gates before the sigmoid, z, are the last channels of the keys, so every cache stores, crops, copies and saves
    them together with the keys, and decoding gives the same result as one call on the full sequence. Logarithms are
    summed in float64: the sums grow with the length, and only their differences are rounded. Packed documents need no
    special treatment, since a difference contains the gates of only one document. `with_gates` creates such keys;
    `saccade.nn.ForgettingAttention` is the layer.

    Args:
        head_dim: width of the queries, and of the keys without gates.
        scale: s; ``head_dim ** -0.5`` when None.
        impl: see `saccade.AttentionMatrix`.

    Raises:
        ValueError: in a call, the query or the key has the wrong width.
        UnsupportedError: any mask except Causal, Window, Documents with one of these inside, and masks that depend only
            on keys (Padding); keys out of order; a bias, because the gates already are one.

    Cost: the same as for `Softmax` with a bias; memory is linear in the length. On a CPU, the compiled kernel runs
    unless the log decays between the first and the last key add up to more than 128, where float32 sums would be too
    imprecise.

    Example:
        >>> from saccade.masks import Causal
        >>> query = key = torch.ones(1, 1, 4, 4)
        >>> Forgetting(4)(query, with_gates(key, torch.zeros(1, 1, 4)), mask=Causal())[0, 0]
        tensor([[1.0000, 0.0000, 0.0000, 0.0000],
                [0.3333, 0.6667, 0.0000, 0.0000],
                [0.1429, 0.2857, 0.5714, 0.0000],
                [0.0667, 0.1333, 0.2667, 0.5333]])

    Reference: Lin et al. 2025, arXiv:2503.02130 (Forgetting Transformer, FoX).
    """

    needs_all_keys = True

    def __init__(self, head_dim: int, *, scale: float | None = None, impl: Impl = "auto"):
        super().__init__()
        self.head_dim = check_int("head_dim", head_dim)
        self.scale = None if scale is None else check_number("scale", scale)
        self.impl = impl

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        reasons: list[str] = []
        if not mask.is_causal:
            words = "{mask} is not causal: gates apply from a key forward to later queries"
            reasons.append(Message(words, mask=type(mask).__name__))
        for part in parts_of(mask):
            inner = () if not isinstance(part, Documents) or part.rule is None else parts_of(part.rule)
            for rule in (part, *inner):
                if not (isinstance(rule, Causal | Window | Documents | Full) or rule.hides_keys_only):
                    words = (
                        "{mask} is none of Causal, Window, Padding and Documents: the gates of keys that a query does "
                        "not see would count"
                    )
                    reasons.append(Message(words, mask=type(rule).__name__))
        return tuple(reasons)

    def with_bias(self, bias: Tensor | Bias) -> Mechanism:
        """Raise an error, because the decays are already the bias of the scores."""
        raise unsupported("bias", ["its decays are already the bias"], hint="mechanism=Softmax() adds one")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> AttentionMatrix:
        """Return the matrix of softmax attention with forget gates.

        Args:
            query: ``[batch, heads, q_len, head_dim]``, or as wide as the keys; extra channels are ignored.
            key: ``[batch, kv_heads, kv_len, head_dim + gates]``: one gate for each query head of a key head, or one
                gate for all of them.
            mask: a causal mask. The gates of keys that no query sees are ignored.
            q_positions, kv_positions: positions of the tokens, ascending; -1 for padding, whose gates are ignored.
        """
        hint = "mechanisms.forgetting.with_gates(key, gates) joins keys and gates"
        check_widths(query, key, self.head_dim, self.head_dim, hint=hint)
        query, key, gates = query[..., : self.head_dim], key[..., : self.head_dim], key[..., self.head_dim :]
        if not is_surely_finite(gates):  # rows that see such a key are NaN; for all others, its gate is 1
            bad = gates.isnan().any(-1, keepdim=True)
            key, gates = key.masked_fill(bad, math.nan), gates.masked_fill(bad, math.inf)
        return self._matrix_of(self._inputs(query, key, mask, q_positions, kv_positions), gates)

    def _matrix_of(self, inputs: Inputs, gates: Tensor | None = None) -> AttentionMatrix:
        query, key, rule, shape, q_positions, kv_positions = inputs
        attention = AttentionInputs.of(
            query, key, rule, scale=self.scale, q_positions=q_positions, kv_positions=kv_positions
        )
        if 0 in shape or gates is None:
            return matrix_from_inputs(attention, self.impl)
        logs = log_gates(gates, shape[1] // key.shape[1])
        hidden = _hidden_keys(inputs)
        logs = logs if hidden is None else logs.masked_fill(hidden[:, None], 0.0)
        term = DecayTerm(logs.cumsum(2)[:, :, None], last_keys(inputs), inputs.wide)
        return matrix_from_inputs(attention.replaced(bias=term), self.impl)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, scale={self.scale}, impl={self.impl!r}"


def with_gates(key: Tensor, gates: Tensor) -> Tensor:
    """Append forget gates to keys as the last channels, in the form that `Forgetting` requires.

    Args:
        key: ``[batch, kv_heads, kv_len, head_dim]``.
        gates: the gates before the sigmoid, ``[batch, heads, kv_len]``: one for each query head. ``torch.logit(f)``
            converts gates between 0 and 1.

    Returns:
        ``[batch, kv_heads, kv_len, head_dim + heads // kv_heads]``, in the dtype of the keys.
    """
    if gates.dim() != 3 or gates.shape[::2] != key.shape[::2] or gates.shape[1] % max(1, key.shape[1]):
        rule = f"have shape [{key.shape[0]}, a multiple of {key.shape[1]}, {key.shape[2]}]"
        raise value_error("gates", rule, list(gates.shape), facts=[describe("key", key)])
    groups = gates.shape[1] // max(1, key.shape[1])
    channels = gates.unflatten(1, (key.shape[1], groups)).movedim(2, 3)
    return torch.cat([key, channels.to(key.dtype)], 3)


def check_widths(query: Tensor, key: Tensor, head_dim: int, width: int, *, hint: str, needs_gates: bool = True) -> None:
    """Raise an error unless keys have ``width`` channels plus gates, and queries have ``head_dim`` channels.

    Queries may also have as many channels as the keys.

    Args:
        query, key: the arguments of a call.
        head_dim, width: width of the queries, and of the keys without gates.
        hint: the hint of the error, which names a function that creates such keys.
        needs_gates: whether keys must have gates.
    """
    facts = [describe("query", query), describe("key", key)]
    if query.dim() != 4 or key.dim() != 4 or query.shape[3] not in (head_dim, key.shape[3]):
        raise value_error("query", f"have shape [batch, heads, q_len, {head_dim}]", list(query.shape), facts=facts)
    groups = max(1, query.shape[1] // max(1, key.shape[1]))
    if key.shape[3] - width not in ((1, groups) if needs_gates else (0, 1, groups)):
        rule = f"have shape [batch, kv_heads, kv_len, {width} + {groups}]{'' if needs_gates else f' or [..., {width}]'}"
        raise value_error("key", rule, list(key.shape), hint=hint, facts=facts)


def log_gates(gates: Tensor, groups: int) -> Tensor:
    """Return the logarithms of gates, float64 ``[batch, heads, kv_len]``.

    Args:
        gates: the gates before the sigmoid, ``[batch, kv_heads, kv_len, 1 | groups]``.
        groups: number of query heads per key head.
    """
    logs = F.logsigmoid(gates.to(torch.float64)).clamp(min=_LEAST)
    return logs.expand(-1, -1, -1, groups).movedim(3, 2).flatten(1, 2)


def last_keys(inputs: Inputs) -> Tensor:
    """Return the index of the last key whose gate applies to each query, int64 ``[batch | 1, q_len]``.

    Raises:
        UnsupportedError: keys are not sorted by position.
    """
    (_, _, q_len, kv_len), (q_start, kv_start) = inputs.shape, inputs.starts
    if q_start is not None and kv_start is not None:
        first = q_start - kv_start
        return torch.arange(first, first + q_len, device=inputs.key.device)[None].clamp_(0, kv_len - 1)
    q, kv = inputs.position_tables()
    highest = kv.cummax(1).values
    if is_readable(kv) and bool(((kv >= 0) & (kv < highest)).any()):
        reason = "a score includes the gates of the keys between key and query, so keys must be sorted"
        raise unsupported("positions", [reason], hint="sort the keys by position")
    size = max(len(q), len(highest))
    last = torch.searchsorted(highest.expand(size, -1).contiguous(), q.expand(size, -1).contiguous(), right=True) - 1
    return last.clamp_(0, kv_len - 1)


def _hidden_keys(inputs: Inputs) -> Tensor | None:
    """Return the keys that no query sees, bool ``[batch | 1, kv_len]``; None if there are known to be none."""
    _, kv = inputs.position_tables()
    is_marked = inputs.kv_positions is not None and inputs.kv_positions.run is None
    hidden = kv < 0 if is_marked else None
    items = torch.arange(inputs.shape[0], device=kv.device)[:, None]
    for part in parts_of(inputs.rule):
        if part.hides_keys_only:
            hidden_by_part = ~part.allows(items, torch.zeros_like(items), torch.zeros_like(items), kv.clamp(min=0))
            hidden = hidden_by_part if hidden is None else hidden | hidden_by_part
    return hidden
