"""Mamba3: a state space whose state rotates, and to which a token is written in its own step and in the next."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.mechanisms.checked_mechanism import Inputs
from saccade.mechanisms.fake_tensors import is_readable
from saccade.mechanisms.features.mask_support import Visible
from saccade.mechanisms.features.sequence_order import check_in_order
from saccade.mechanisms.linear_time import take_rows
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


class Following(NamedTuple):
    """The strengths with which tokens are written in the step of the next visible token of their document.

    Attributes:
        later: this strength for each token, 0 if no token follows, ``[batch, heads, len, 1]``.
        lead: the same for the last token before this call, ``[batch, heads, 1, 1]``.
        last: index of the last visible token, -1 if there is none, int64 ``[batch | 1, 1]``.
    """

    later: Tensor
    lead: Tensor
    last: Tensor

    @classmethod
    def of(cls, before: Tensor, visible: Visible) -> Following:
        """Find the next visible token of each token.

        Args:
            before: the strength with which each token's step writes the token before it, ``[batch, heads, len, 1]``.
            visible: the mask.
        """
        length, hidden, documents = before.shape[2], visible.hidden_keys, visible.kv_documents
        index = torch.arange(length, device=before.device)[None]
        seen = index if hidden is None else index.masked_fill(hidden, length)
        seen = F.pad(seen, (0, 1), value=length).flip(1).cummin(1).values.flip(1)  # the first from each token on
        strengths = take_rows(F.pad(before, (0, 0, 0, 1)), seen)
        later = strengths[:, :, 1:]
        if documents is not None and length:
            size = max(len(seen), len(documents))
            next_one = seen[:, 1:].clamp(max=length - 1).expand(size, -1)
            documents = documents.expand(size, -1)
            later = later.masked_fill((documents.gather(1, next_one) != documents)[:, None, :, None], 0.0)
        last = index if hidden is None else index.masked_fill(hidden, -1)
        return cls(later, strengths[:, :, :1], F.pad(last, (1, 0), value=-1).amax(1, keepdim=True))


class Mamba3Matrix(RecurrenceMatrix):
    """The lazy matrix of `Mamba3`.

    It is the matrix of a recurrence that writes each token with the strengths of both steps at once, minus the strength
    of the later step on the diagonal. A state holds S and, behind it, the last token's k v^T, for the step of the next
    token, ``[head_dim, 2 * value_dim]``. Both are rotated so that the last token has the angle 0.
    """

    def with_steps(self, following: Following, angles: Tensor) -> Mamba3Matrix:
        """Add what later steps write, and the summed angles ``[batch, heads, len, pairs]``. Return this matrix."""
        batch, heads = self.shape[:2]
        last = following.last.expand(batch, -1).repeat_interleave(heads, 0)[..., None]
        later, angles = (self._lines(self._order.with_keys(x)) for x in (following.later, angles))
        self._rule = self._rule._replace(extras=(later, self._lines(following.lead), last, angles))
        return self

    def _state_size(self, value_dim: int) -> tuple[int, int]:
        return self._rule.key.shape[2], 2 * value_dim

    def _product(
        self, rule: Rule, value: Tensor, state: Tensor | None, segment: Tensor | None, blind: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        (batch, heads, q_len, _), dtype, width = self.shape, rule.key.dtype, value.shape[3]
        _, lead, last, angles = rule.extras
        of_groups = slice(None, None, max(1, heads // max(1, self.kv_heads)))
        earlier = pending = None
        if state is not None:
            earlier, pending = state.to(dtype).split(width, 3)
            earlier = earlier + lead.unflatten(0, (batch, heads))[:, of_groups] * pending
        out, after = super()._product(rule, value, earlier, segment, blind)
        lines = self._lines(self._order.with_keys(value.to(dtype)))
        own = _own_strengths(rule) * lines
        out = out - own[:, own.shape[1] - q_len :].unflatten(0, (batch, heads))
        out = out if blind is None else out.masked_fill(blind[..., None], 0.0)  # once more: it stops NaN in gradients
        pending = torch.zeros_like(after) if pending is None else pending
        if lines.shape[1]:
            key, written = (x.gather(1, last.clamp(min=0).expand(-1, -1, x.shape[2])) for x in (rule.key, lines))
            fresh = (key.mT @ written).unflatten(0, (batch, heads))[:, of_groups]
            has_token = (last >= 0).unflatten(0, (batch, heads))[:, of_groups]
            pending = torch.where(has_token, fresh, pending)
            turned = angles[:, -1:].unflatten(0, (batch, heads))[:, of_groups]
            after, pending = (_turned(x.mT, -turned).mT for x in (after, pending))
        return out, torch.cat([after, pending], 3)

    def _transposed(self, rule: Rule, x: Tensor) -> Tensor:
        first = rule.key.shape[1] - x.shape[1]
        own = _own_strengths(rule)[:, first:] * x
        return super()._transposed(rule, x) - F.pad(own, (0, 0, first, 0))


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
            blend: λ, from 0 to 1, in the shape of ``step``: the share of a step that writes its own token, while the
                rest writes the token before it. None for 1.
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
        following, angles = Following.of(before, visible), angle.cumsum(2)
        beta = own + following.later
        beta = beta if bad is None else beta.masked_fill(bad[..., None], torch.nan)
        past, (_, _, q_len, _) = visible.offset or 0, inputs.shape
        query, key = (
            _turned(inputs.query.to(wide), angles[:, :, past : past + q_len]),
            _turned(inputs.key.to(wide), angles),
        )
        each = inputs._replace(query=query, key=key, shape=(inputs.shape[0], query.shape[1], *inputs.shape[2:]))
        matrix = self._recurrence(each, decay, beta, visible=visible)
        assert isinstance(matrix, Mamba3Matrix)
        matrix.dtype = inputs.query.dtype
        return matrix.with_steps(following, angles)

    def extra_repr(self) -> str:
        return ""


def _own_strengths(rule: Rule) -> Tensor:
    """Return what the diagonal must lose: each token's weight for itself in the next token's step."""
    return rule.extras[0] * (rule.query * rule.key).sum(-1, keepdim=True) * rule.scale


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
    """Repeat each of fewer heads for the heads of its group."""
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
    """Check the angles of a call; no pairs when None."""
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
