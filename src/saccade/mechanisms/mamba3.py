"""Mamba3: a state space whose state rotates, and to which a token is written in its own step and in the next."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.mechanisms.checked_mechanism import Inputs
from saccade.mechanisms.features.mask_support import Visible
from saccade.mechanisms.features.sequence_order import check_in_order
from saccade.mechanisms.readable_tensors import is_readable
from saccade.mechanisms.recurrences.mechanism import (
    Recurrence,
    check_decay_of_tokens,
    check_heads,
    checked_gate,
    clean,
    finite_product,
    nonfinite,
)
from saccade.mechanisms.recurrences.recurrence_matrix import RecurrenceMatrix
from saccade.mechanisms.recurrences.recurrence_spec import Rule
from saccade.positions.rotary import paired, rotated
from saccade.positions.token_positions import GivenPositions
from saccade.support.errors import describe, value_error
from saccade.support.validation import check_type


class Preceding(NamedTuple):
    """For each token of a call, and for the next call, the last visible token before it in the same document.

    Attributes:
        previous: for each visible token, 1 + the index of the visible token before it, 0 if that is the last token
            before this call, or -1 if there is none, int64 ``[batch | 1, len]``. -1 for hidden tokens.
        reads: for each token, the index of the last visible token up to and including it, -1 if there is none, int64
            ``[batch | 1, len]``; None if all tokens are visible.
        last: 1 + the index of the last visible token in the document of the last token; 0 if there is none, int64
            ``[batch | 1, 1]``.
    """

    previous: Tensor
    reads: Tensor | None
    last: Tensor

    @classmethod
    def of(cls, visible: Visible, length: int) -> Preceding:
        """Find the preceding visible tokens of ``length`` tokens."""
        hidden, documents = visible.hidden_keys, visible.kv_documents
        index = torch.arange(length, device=visible.kv_positions.device)[None]
        seen = index + 1 if hidden is None else (index + 1).masked_fill(hidden, 0)
        # For each token, and for the end: 1 + the index of the last visible token before it.
        seen = F.pad(seen, (1, 0)).cummax(1).values
        is_other = torch.zeros_like(seen, dtype=torch.bool)
        if documents is not None and length:
            own = torch.cat([documents, documents[:, -1:]], 1).expand(max(len(seen), len(documents)), -1)
            seen = seen.expand(len(own), -1)
            is_other = (seen > 0) & (own.gather(1, (seen - 1).clamp(min=0)) != own)
        previous, last = seen[:, :-1].masked_fill(is_other[:, :-1], -1), seen.masked_fill(is_other, 0)[:, -1:]
        if hidden is None:
            return cls(previous, None, last)
        reads = torch.where(hidden, previous.clamp(min=0) - 1, index)
        return cls(previous.masked_fill(hidden, -1), reads, last)


class Mamba3Matrix(RecurrenceMatrix):
    """The lazy matrix of `Mamba3`.

    Each token is added to the state S twice: in its own step, and in the step of the next token. The underlying
    recurrence adds both terms of a token in the step of the next token. The weight of a token for its own query is
    added on the diagonal of the matrix.

    A stored state is ``[head_dim + 1, value_dim + 1]``: S, with the last key in an additional column and the last value
    in an additional row, which the next step adds. It is rotated back by the angle of the last token, so that later
    calls sum angles from 0.
    """

    def with_steps(self, before: Tensor, angles: Tensor, preceding: Preceding) -> Mamba3Matrix:
        """Set the tensors that the steps of the recurrence need, and return this matrix.

        Args:
            before: the strengths with which each step adds the preceding token to the state, ``[batch, heads, len,
                1]``.
            angles: the angles, summed over the tokens, ``[batch, heads, len, pairs]``.
            preceding: for each token, the visible token before it.
        """
        (batch, heads), length = self.shape[:2], self._rule.key.shape[1]
        of_tokens = [self._lines(x)[:, :length] for x in (before, angles)]
        for index in (*preceding[:2], preceding.last):
            index = torch.arange(length, device=before.device)[None] if index is None else index  # noqa: PLW2901
            of_tokens.append(index.expand(batch, -1).repeat_interleave(heads, 0)[:, :length, None])
        self._rule = self._rule._replace(extras=tuple(of_tokens))
        return self

    def _state_size(self, value_dim: int) -> tuple[int, int]:
        return self._rule.key.shape[2] + 1, value_dim + 1

    def _run(self, rule: Rule, value: Tensor, state: Tensor, segment: Tensor | None) -> tuple[Tensor, Tensor]:
        _, angles, previous, reads, last = rule.extras
        keys = torch.cat([state[:, :-1, -1:].mT, rule.key], 1)  # those of the last token before this call first
        values = torch.cat([state[:, -1:, :-1], value], 1)
        shifted = _shifted(rule, keys, segment)
        out, after = super()._run(shifted, _gather_tokens(values, previous), state[:, :-1, :-1], segment)
        if not value.shape[1]:
            return out, state
        out = out + _own_weights(rule) * _gather_tokens(value, reads)
        assert rule.beta is not None  # always given
        key, written, own = (
            _gather_tokens(keys, last),
            _gather_tokens(values, last),
            _gather_tokens(F.pad(rule.beta, (0, 0, 1, 0)), last),
        )
        if rule.segments is not None and segment is not None:
            is_over = (last == 0) & (rule.segments[:, -1] != segment)[:, None, None]
            key, written = key.masked_fill(is_over, 0.0), written.masked_fill(is_over, 0.0)
        after = torch.cat([after + own * (key.mT @ written), key.mT], 2)
        after = _turned(after.mT[:, None], -angles[:, None, -1:])[:, 0].mT
        return out, torch.cat([after, F.pad(written, (0, 1))], 1)

    def _transposed(self, rule: Rule, x: Tensor) -> Tensor:
        _, _, previous, reads, _ = rule.extras
        keys = F.pad(rule.key, (0, 0, 1, 0))
        of_previous = super()._transposed(_shifted(rule, keys, None), x)
        first = rule.key.shape[1] - x.shape[1]
        of_itself = F.pad(_own_weights(rule)[:, first:] * x, (0, 0, first, 0))
        out = of_previous.new_zeros(len(x), keys.shape[1], x.shape[2])
        out = out.scatter_add(1, previous.clamp(min=0).expand_as(of_previous), of_previous)
        return out.scatter_add(1, (reads + 1).expand_as(of_itself), of_itself)[:, 1:]


class Mamba3(Recurrence):
    r"""Mamba-3's state space: the exponential-trapezoidal rule, with a state that each token rotates.

    .. math:: S_t = R_t e^{g_t} \big( S_{t-1} + (1 - \lambda_t) \Delta_t\, B_{t-1} x_{t-1}^T \big)
              + \lambda_t \Delta_t B_t x_t^T, \qquad y_t = S_t^T C_t

    .. math:: A_{ij} = \big( \lambda_j \Delta_j + [j < i] (1 - \lambda_{j+1}) \Delta_{j+1} \big)\,
              C_i \cdot \Big( \prod_{t=j+1}^{i} e^{g_t} R_t \Big) B_j

    C is the query, B the key and x the value. :math:`R_t` rotates each pair of adjacent channels of the state by
    minus its angle, as in a state space with complex numbers. With :math:`\lambda = 1` and no angles, this is `SSD`;
    :math:`\lambda = 1/2` is the trapezoidal rule. C and B may have fewer heads than x. The norms and biases of C and B
    and the term D·x are parts of the layer (`saccade.nn.Recurrence`), not of the matrix. The output of Mamba-3 with
    several inputs and outputs (MIMO) is a sum of products with such matrices, one for each input.

    Raises:
        ValueError: a gate has the wrong shape or is out of range.
        UnsupportedError: any mask except Causal or Causal within Documents, each alone or combined with masks that
            depend only on keys (Padding).

    Cost: as for `GatedLinear`. For decoding, a `saccade.caches.RecurrentCache` stores ``(head_dim + 1) *
    (value_dim + 1)`` elements per head.

    Example:
        >>> import torch
        >>> from saccade.masks import Causal
        >>> read = written = torch.ones(1, 1, 3, 2)
        >>> Mamba3()(read, written, blend=torch.full((1, 1, 3), 0.5), mask=Causal())[0, 0]
        tensor([[1., 0., 0.],
                [2., 1., 0.],
                [2., 2., 1.]])
        >>> half = torch.full((1, 1, 3, 1), torch.pi)  # each token turns the state by half a circle
        >>> Mamba3()(read, written, angle=half, mask=Causal())[0, 0, 2]
        tensor([ 2., -2.,  2.])

    Reference: Lahoti et al. 2026, arXiv:2603.15569.
    """

    matrix_class = Mamba3Matrix

    def __init__(self) -> None:
        super().__init__(scale=1.0)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        step: Tensor | None = None,
        blend: Tensor | None = None,
        decay: Tensor | None = None,
        angle: Tensor | None = None,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> RecurrenceMatrix:
        """Return the matrix of Mamba-3 for the queries, keys and gates of one call.

        Args:
            query: C, ``[batch, heads, q_len, head_dim]``.
            key: B, ``[batch, key_heads, kv_len, head_dim]``.
            step: Δ, at least 0, ``[batch, kv_heads, kv_len]``; None for 1.
            blend: λ, from 0 to 1, with the shape of ``step``: the share of a step with which its own token is written;
                the rest of the step writes the token before it. None for 1.
            decay: g, the log decay of the state in each step, at most 0, with the shape of ``step``; None for 0.
            angle: by how many radians each step rotates each pair of channels of the state, ``[batch, kv_heads, kv_len,
                pairs]`` for the first ``2 * pairs`` channels; None for no rotation.
            mask, q_positions, kv_positions: as in `GatedLinear`.

        Raises:
            ValueError: a gate has the wrong shape or is out of range.
            UnsupportedError: a mask that is not causal, or tokens that are not in order.
        """
        inputs = self._inputs(query, key, mask, q_positions, kv_positions)
        check_decay_of_tokens(decay, "with a decay for each channel, rotations and decays would not commute")
        step, blend = (_checked_share(name, x, inputs) for name, x in (("step", step), ("blend", blend)))
        angle = _checked_angle(angle, inputs)
        if decay is not None:
            decay = checked_gate("decay", decay, inputs)
        check_heads(inputs, step=step, blend=blend, decay=decay, angle=angle)
        return self._matrix_with(inputs, step, blend, decay, angle)

    def _matrix_of(self, inputs: Inputs) -> RecurrenceMatrix:
        one = inputs.key.new_ones(inputs.shape[0], 1, inputs.shape[3], 1)
        return self._matrix_with(inputs, one, one, None, one[..., :0])

    def _matrix_with(
        self, inputs: Inputs, step: Tensor, blend: Tensor, decay: Tensor | None, angle: Tensor
    ) -> RecurrenceMatrix:
        heads, wide = max(x.shape[1] for x in (inputs.key, step, blend, angle)), inputs.wide
        step, blend, angle = (_spread(x.to(wide), heads) for x in (step, blend, angle))
        visible = Visible.of(inputs)
        check_in_order(visible, *inputs.shape[2:])
        hidden, bad = visible.hidden_keys, nonfinite(angle)
        own, angle = finite_product(step, blend), clean(angle, torch.float64)
        before = clean(step, wide) - clean(own, wide)
        if hidden is not None:
            before, angle = (x.masked_fill(hidden[:, None, :, None], 0.0) for x in (before, angle))
        own = own if bad is None else own.masked_fill(bad[..., None], torch.nan)  # marks the token
        angles, (batch, _, q_len, kv_len), past = angle.cumsum(2), inputs.shape, visible.offset or 0
        query = _turned(inputs.query.to(wide), angles[:, :, past : past + q_len])
        key = _turned(inputs.key.to(wide), angles)
        each = inputs._replace(query=query, key=key, shape=(batch, query.shape[1], q_len, kv_len))
        matrix = self._recurrence(each, decay, own, visible=visible)
        assert isinstance(matrix, Mamba3Matrix)
        matrix.dtype = inputs.query.dtype
        return matrix.with_steps(before, angles, Preceding.of(visible, kv_len))

    def extra_repr(self) -> str:
        return ""


def _shifted(rule: Rule, keys: Tensor, segment: Tensor | None) -> Rule:
    """Return the recurrence in which each token writes the key of the token before it.

    Args:
        rule: the recurrence, in which each token writes its own key with the strength of its own step.
        keys: the last key of the previous call, followed by the keys of this call, ``[sequences, 1 + len, head_dim]``.
        segment: the segment of the last key of the previous call; None if there is no such key, or without segments.
    """
    before, _, previous, *_ = rule.extras
    assert rule.beta is not None  # always given
    strength = _gather_tokens(F.pad(rule.beta, (0, 0, 1, 0)), previous) + before
    strength = strength if rule.decay is None else strength * rule.decay.exp()
    is_absent = previous < 0
    if rule.segments is not None and segment is not None:
        is_absent = is_absent | ((previous == 0) & (rule.segments != segment[:, None])[..., None])
    return rule._replace(key=_gather_tokens(keys, previous), beta=strength.masked_fill(is_absent, 0.0))


def _own_weights(rule: Rule) -> Tensor:
    """Return the weight with which each row reads its own token or, if that is hidden, the last visible one."""
    reads = rule.extras[3]
    assert rule.beta is not None  # always given
    weights = (
        (rule.query * _gather_tokens(rule.key, reads)).sum(-1, keepdim=True)
        * rule.scale
        * _gather_tokens(rule.beta, reads)
    )
    return weights.masked_fill(reads < 0, 0.0)


def _gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Gather tokens of ``[sequences, len, width]`` at ``[sequences, any, 1]``.

    An index of -1 reads an arbitrary token, whose entries the caller must ignore.
    """
    return x.gather(1, index.clamp(min=0).expand(-1, -1, x.shape[2]))


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs of channels ``[batch, heads, len, head_dim]`` by angles ``[batch, heads, len, pairs]``.

    Tokens that are not finite become NaN and pass no gradient.
    """
    if not angles.shape[3]:
        return x
    heads, bad = max(x.shape[1], angles.shape[1]), nonfinite(x)
    angles = _spread(angles, heads)
    cos, sin = paired(angles.cos().to(x.dtype), angles.sin().to(x.dtype), "interleaved")
    turned = rotated(_spread(clean(x, x.dtype), heads), cos, sin, "interleaved")
    return turned if bad is None else turned.masked_fill(_spread(bad[..., None], heads), torch.nan)


def _spread(x: Tensor, heads: int) -> Tensor:
    """Repeat each head of ``x`` for the heads of its group, so that the result has ``heads`` heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // max(1, x.shape[1]), 1)


def _checked_share(name: str, x: Tensor | None, inputs: Inputs) -> Tensor:
    """Check the step sizes or the blend of a call, and return them as ``[batch, heads, kv_len, 1]``; 1 when None."""
    if x is None:
        return inputs.key.new_ones(inputs.shape[0], 1, inputs.shape[3], 1)
    x = checked_gate(name, x, inputs)
    if is_readable(x) and x.numel():
        if bool((x < 0).any()):
            raise value_error(name, "be at least 0", f"{float(x[x < 0].min()):.3g}", hint="for instance softplus(x)")
        if name == "blend" and bool((x > 1).any()):
            raise value_error(name, "be at most 1", f"{float(x[x > 1].max()):.3g}", hint="for instance sigmoid(x)")
    return x


def _checked_angle(angle: Tensor | None, inputs: Inputs) -> Tensor:
    """Check the angles of a call and return them; when None, return angles for no pairs of channels."""
    batch, _, _, kv_len = inputs.shape
    if angle is None:
        return inputs.key.new_zeros(batch, 1, kv_len, 0)
    check_type("angle", angle, Tensor, "be a tensor [batch, kv_heads, kv_len, pairs]")
    pairs = inputs.key.shape[3] // 2
    fits = angle.dim() == 4 and angle.shape[0] in (1, batch) and angle.shape[2] == kv_len and angle.shape[3] <= pairs
    if not fits or not angle.is_floating_point():
        rule = f"be a float tensor [{batch}, heads, {kv_len}, pairs] with at most {pairs} pairs"
        raise value_error("angle", rule, list(angle.shape), facts=[describe("key", inputs.key)])
    return angle.expand(batch, -1, -1, -1)
