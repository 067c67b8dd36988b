"""Mamba3: a state space with a rotating state, to which each token is written in two steps, its own and the next."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.mechanisms.checked_mechanism import Inputs
from saccade.mechanisms.features.mask_support import Visible
from saccade.mechanisms.features.sequence_order import check_in_order
from saccade.mechanisms.linear_time import take_rows
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
    """The last visible tokens of the same document before each token of a call, and before the next call.

    Attributes:
        previous: index of the visible token before each visible token, -1 if there is none, int64 ``[batch | 1, len]``.
        first: index of the first visible token, ``len`` if there is none, int64 ``[batch | 1, 1]``.
        last: index of the last visible token in the document of the last token, -1 if there is none, int64 ``[batch |
            1, 1]``.
    """

    previous: Tensor
    first: Tensor
    last: Tensor

    @classmethod
    def of(cls, visible: Visible, length: int) -> Preceding:
        """Find the last visible token of the same document before each of ``length`` tokens."""
        hidden, documents = visible.hidden_keys, visible.kv_documents
        index = torch.arange(length, device=visible.kv_positions.device)[None]
        seen = index if hidden is None else index.masked_fill(hidden, -1)
        seen = F.pad(seen, (1, 0), value=-1).cummax(1).values  # the last visible token before each token, and the end
        if documents is not None and length:
            own = torch.cat([documents, documents[:, -1:]], 1).expand(max(len(seen), len(documents)), -1)
            seen = seen.expand(len(own), -1)
            seen = seen.masked_fill(own.gather(1, seen.clamp(min=0)) != own, -1)
        previous = seen[:, :-1] if hidden is None else seen[:, :-1].masked_fill(hidden, -1)
        first = index if hidden is None else index.masked_fill(hidden, length)
        return cls(previous, F.pad(first, (0, 1), value=length).amin(1, keepdim=True), seen[:, -1:])


class Mamba3Matrix(RecurrenceMatrix):
    """The lazy matrix of `Mamba3`.

    Each token is added to the state S twice: in its own step, and in the step of the next token. The underlying
    recurrence adds both terms of a token in the step of the next token. The weight of a token for its own query is
    added on the diagonal of the matrix.

    A stored state is S followed by ``k v^T`` of the last token, ``[head_dim, 2 * value_dim]``. Both are rotated back by
    the angle of the last token, so that later calls sum angles from 0.
    """

    def with_steps(self, own: Tensor, before: Tensor, angles: Tensor, preceding: Preceding) -> Mamba3Matrix:
        """Set the strengths and angles of all steps in place. Return this matrix.

        Args:
            own, before: the strengths with which a step adds its own token and the preceding token to the state,
                ``[batch, heads, len, 1]``.
            angles: the angles, summed over the tokens, ``[batch, heads, len, pairs]``.
            preceding: the visible token before each token.
        """
        rule, (batch, heads) = self._rule, self.shape[:2]
        length = rule.key.shape[1]
        lead = take_rows(F.pad(before, (0, 0, 0, 1)), preceding.first)  # for the last token before this call
        own, before, lead, angles = (self._lines(x) for x in (own, before, lead, angles))
        previous, last = (x.expand(batch, -1).repeat_interleave(heads, 0)[..., None] for x in preceding[::2])
        own, before, angles, previous = (x[:, :length] for x in (own, before, angles, previous))
        strength = _taken(own, previous) + before
        strength = strength if rule.decay is None else strength * rule.decay.exp()
        strength = strength.masked_fill(previous < 0, 0.0)
        extras = (rule.key, own, lead, previous, last, angles)
        self._rule = rule._replace(key=_taken(rule.key, previous), beta=strength, extras=extras)
        return self

    @property
    def key(self) -> Tensor | None:
        """Rotated keys up to the last query, ``[batch, heads, len, head_dim]``."""
        return self._rule.extras[0].unflatten(0, self.shape[:2])

    def _state_size(self, value_dim: int) -> tuple[int, int]:
        return self._rule.key.shape[2], 2 * value_dim

    def _run(self, rule: Rule, value: Tensor, state: Tensor, segment: Tensor | None) -> tuple[Tensor, Tensor]:
        key, own, lead, previous, last, angles = rule.extras
        held, pending = state.split(value.shape[2], 2)
        out, after = super()._run(rule, _taken(value, previous), held + lead * pending, segment)
        if not value.shape[1]:
            return out, state
        out = out + own * (rule.query * key).sum(-1, keepdim=True) * rule.scale * value
        if rule.segments is not None and segment is not None:
            pending = pending.masked_fill((rule.segments[:, -1] != segment)[:, None, None], 0.0)
        fresh = _taken(key, last).mT @ _taken(value, last)
        after = torch.where(last < 0, after, after + _taken(own, last) * fresh)
        pending = torch.where(last < 0, pending, fresh)
        after, pending = (_turned(x.mT[:, None], -angles[:, None, -1:])[:, 0].mT for x in (after, pending))
        return out, torch.cat([after, pending], 2)

    def _transposed(self, rule: Rule, x: Tensor) -> Tensor:
        key, own, _, previous, *_ = rule.extras
        shifted = super()._transposed(rule, x)
        out = torch.zeros_like(shifted).scatter_add(1, previous.clamp(min=0).expand_as(shifted), shifted)
        first = key.shape[1] - x.shape[1]
        of_itself = (own * (rule.query * key).sum(-1, keepdim=True) * rule.scale)[:, first:] * x
        return out + F.pad(of_itself, (0, 0, first, 0))


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
        ValueError: gates with a wrong shape or out of range.
        UnsupportedError: any mask except Causal or Causal within Documents, each alone or combined with masks that only
            hide keys (Padding).

    Cost: as for `GatedLinear`. For decoding, a `saccade.caches.RecurrentCache` stores ``2 * head_dim * value_dim``
    elements per head.

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
            blend: λ, from 0 to 1, in the shape of ``step``: the share of a step that adds its own token; the rest
                adds the token before it. None for 1.
            decay: g, the log decay of the state in each step, at most 0, in the shape of ``step``; None for 0.
            angle: by how many radians each step rotates each pair of channels of the state, ``[batch, kv_heads, kv_len,
                pairs]`` for the first ``2 * pairs`` channels; None for no rotation.
            mask, q_positions, kv_positions: as in `GatedLinear`.

        Raises:
            ValueError: gates with a wrong shape or out of range.
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
        return matrix.with_steps(clean(own, wide), before, angles, Preceding.of(visible, kv_len))

    def extra_repr(self) -> str:
        return ""


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """Gather tokens of ``x [sequences, len, width]`` by ``index [sequences, any, 1]``; index -1 returns token 0."""
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
    """Repeat each head of ``x`` for a group of adjacent heads, so that there are ``heads`` in total."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // max(1, x.shape[1]), 1)


def _checked_share(name: str, x: Tensor | None, inputs: Inputs) -> Tensor:
    """Check the step sizes or the blend of a call, and return them as ``[batch, heads, kv_len, 1]``; all 1 if None."""
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
    """Check the angles of a call and return them, ``[batch, heads, kv_len, pairs]``, with 0 pairs if None."""
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
