"""CompressiveMemory (Infini-attention): softmax attention within a segment, and a memory of earlier segments."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from saccade.caches.compressive_cache import CompressiveCache
from saccade.masks import Causal, Full, Mask, Segments
from saccade.matrix import AttentionMatrix
from saccade.matrix.algebra import Sum
from saccade.mechanisms.checked_mechanism import CheckedMechanism, Inputs, parts_of
from saccade.mechanisms.earlier_segments import EarlierSegments, SegmentLayout
from saccade.mechanisms.features.mask_support import Visible
from saccade.mechanisms.readable_tensors import is_readable
from saccade.positions import Rotary
from saccade.support.errors import unsupported, value_error
from saccade.support.language import Message
from saccade.support.numerics import wide_dtype
from saccade.support.validation import check_choice, check_int, check_number, check_type

Update = Literal["linear", "delta"]


class CompressiveMatrix(Sum):
    """The lazy matrix ``(1 - g) * within + g * earlier``: softmax within segments, and a memory of earlier segments.

    Args:
        within: the softmax matrix within segments.
        earlier: the matrix of the memory.
        gate: g, ``[heads, 1, 1]``.
    """

    def __init__(self, within: AttentionMatrix, earlier: EarlierSegments, gate: Tensor):
        super().__init__((1.0 - gate, within), (gate, earlier))

    def advance_segments(
        self, value: Tensor, memory: Tensor | None, tainted: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Return the output for new tokens that continue from the memory of all earlier segments, and the new memory.

        The arguments and results are as in `saccade.mechanisms.earlier_segments.EarlierSegments.advance_segments`.
        """
        (rest, within), (gate, earlier) = self.terms
        assert isinstance(earlier, EarlierSegments)
        out, memory, tainted, is_open = earlier.advance_segments(value, memory, tainted)
        return (within.matmul(value) * rest + out * gate).to(value.dtype), memory, tainted, is_open


class CompressiveMemory(CheckedMechanism):
    r"""Infini-attention: softmax within a segment, and linear attention to all segments before it.

    .. math:: A = (1 - g)\, \mathrm{softmax}(q k^\top)_{\text{own segment}} + g\, A_{\text{mem}}, \qquad
              A_{\text{mem}} V = \frac{\sigma(Q) M_{s-1}}{\sigma(Q) z_{s-1}}, \qquad \sigma(x) = \mathrm{elu}(x) + 1

    .. math:: M_s = M_{s-1} + \sigma(K)^\top \Big( V - \Big[ \frac{\sigma(K) M_{s-1}}{\sigma(K) z_{s-1}} \Big] \Big),
              \qquad z_s = z_{s-1} + \sum_j \sigma(k_j), \qquad g = \mathrm{sigmoid}(\text{gate})

    The bracketed term applies only with ``update="delta"``: it is what the memory already returns for a key, so that
    only the difference between a value and this result is written. The matrix is a lazy sum. In the first segment, the
    memory is empty and returns 0, so rows sum to 1 - g. With the linear update, later rows sum to 1. With the delta
    rule, weights may have any sign and rows any sum.

    Args:
        num_heads: number of query heads; each has a gate.
        segment: number of positions in a segment; the first segment starts at position 0.
        update: how a segment is written to the memory, "linear" or "delta".
        scale: scale of the dot products within a segment; ``head_dim ** -0.5`` when None.
        rotary: rotates queries and keys, but only for the softmax within a segment; as in the paper, the memory has no
            positions. None if queries and keys are already rotated, or should not be rotated at all.

    Attributes:
        gate: trainable, ``[num_heads]``; initially 0, so that both terms have the same weight.

    Raises:
        ValueError: a size is out of range, or ``update`` is unknown; in a call, the query has a different number of
            heads.
        UnsupportedError: any mask except Causal, alone or combined with masks that depend only on keys (Padding).

    Cost: O(n * segment * head_dim) for the softmax and O(n * head_dim * value_dim) for the memory; the backward pass
    stores a state for each segment. Decoding uses a `saccade.caches.CompressiveCache` of constant size.

    Example:
        >>> from saccade.masks import Causal
        >>> query = key = torch.zeros(1, 1, 4, 8)
        >>> CompressiveMemory(1, 2)(query, key, mask=Causal())[0, 0].detach()
        tensor([[0.5000, 0.0000, 0.0000, 0.0000],
                [0.2500, 0.2500, 0.0000, 0.0000],
                [0.2500, 0.2500, 0.5000, 0.0000],
                [0.2500, 0.2500, 0.2500, 0.2500]])

    Reference: Munkhdalai et al. 2024, arXiv:2404.07143, section 2.1.
    """

    def __init__(
        self,
        num_heads: int,
        segment: int,
        *,
        update: Update = "linear",
        scale: float | None = None,
        rotary: Rotary | None = None,
    ):
        super().__init__()
        hint = "MultiHeadAttention(rotary=...) also rotates what the memory stores"
        self.gate = nn.Parameter(torch.zeros(check_int("num_heads", num_heads)))
        self.segment = Segments(check_int("segment", segment), 0).segment
        self.update: Update = check_choice("update", update, ("linear", "delta"))
        self.scale = None if scale is None else check_number("scale", scale)
        self.rotary = (
            None if rotary is None else check_type("rotary", rotary, Rotary, "be a saccade Rotary or None", hint=hint)
        )

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        parts = parts_of(mask)
        neither = "{mask} is neither Causal nor Padding: a memory stores whole segments of one sequence"
        reasons = [
            Message(neither, mask=type(part).__name__)
            for part in parts
            if not (isinstance(part, Causal | Full) or part.hides_keys_only)
        ]
        if not any(isinstance(part, Causal) for part in parts) and not reasons:
            words = "{mask} is not causal: a segment is read after it was written"
            reasons.append(Message(words, mask=type(mask).__name__))
        return tuple(reasons)

    def new_cache(self, max_len: int | None = None) -> CompressiveCache:
        """Return an empty `saccade.caches.CompressiveCache`, which stores the memory and the open segment."""
        return CompressiveCache(max_len)

    def _matrix_of(self, inputs: Inputs) -> CompressiveMatrix:
        if len(self.gate) != inputs.shape[1]:
            raise value_error("heads of query", f"be num_heads {len(self.gate)}", inputs.shape[1])
        q, kv = inputs.position_tables()
        if None in inputs.starts and not is_readable(q, kv):
            reason = "the segments follow from the positions, whose values cannot be read here"
            raise unsupported("a table of positions", [reason], hint="pass a range")
        query, key = inputs.query, inputs.key
        if self.rotary is not None:
            query, key = self.rotary(query, q), self.rotary(key, kv)
        within = AttentionMatrix(
            query,
            key,
            inputs.rule & Segments(self.segment, 0),
            scale=self.scale,
            q_positions=inputs.q_positions,
            kv_positions=inputs.kv_positions,
        )
        visible = Visible.of(inputs)
        rows, columns = SegmentLayout.pair(inputs, q, kv, self.segment)
        earlier = EarlierSegments(
            inputs.query, inputs.key, rows, columns, hidden=visible.hidden_keys, is_delta=self.update == "delta"
        )
        return CompressiveMatrix(within, earlier, self.gate.to(wide_dtype(self.gate.dtype)).sigmoid()[:, None, None])

    def extra_repr(self) -> str:
        return f"{len(self.gate)}, segment={self.segment}, update={self.update!r}, scale={self.scale}"
