"""Linformer: attention to a fixed number of slots, each a weighted sum of all keys with trained weights."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from saccade.engine.tiles.grouped_heads import groups_of
from saccade.masks import Mask
from saccade.mechanisms.checked_mechanism import Approximate, Inputs, scale_of
from saccade.mechanisms.low_rank import LowRankMatrix, MaskedTokens, NarrowSoftmax, why_not_keys_only
from saccade.mechanisms.readable_tensors import marks_or_none
from saccade.positions.token_positions import Positions
from saccade.support.errors import value_error
from saccade.support.torch_modes import without_autocast
from saccade.support.validation import check_choice, check_int, check_number

Share = Literal["none", "heads", "key_value"]


class Linformer(Approximate):
    r"""Attention to a few slots, which are sums of all keys weighted by a trained projection along the length.

    .. math:: A = \mathrm{softmax}(Q (E K)^\top)\, F, \qquad E, F \in \mathbb{R}^{\text{rank} \times \text{kv\_len}}

    E pools keys, and F pools values. Both initially average equal numbers of neighbouring positions, and are trained
    with the model. At initialisation, the result is exact if rank = kv_len, since E and F are then identities, or if
    all keys and values that are averaged in a slot are equal. The length is fixed: a shorter sequence uses the first
    columns, and a longer one raises an error. A slot mixes keys of the full sequence, so the mechanism is not causal.

    To inspect it, read `LinformerMatrix.slots()`, ``[batch, heads, q_len, rank]``, and ``matrix.projection``. Their
    product, which is the matrix itself, is not a distribution over keys.

    Args:
        kv_len: largest number of key positions.
        rank: number of slots.
        share: "heads" for one E and one F for all heads, "key_value" for one matrix that is both E and F, or "none" for
            separate matrices for each key and value head. To share E and F among layers, pass the same Linformer to all
            of them.
        num_kv_heads: number of key and value heads; only for ``share="none"``.
        scale: scale of the dot products; ``head_dim ** -0.5`` when None.

    Raises:
        TypeError, ValueError: a count below 1, a rank above kv_len, more keys than kv_len, or ``num_kv_heads`` missing
            with ``share="none"`` or passed without it.
        UnsupportedError: a mask that lets queries see different keys.

    Cost: O((q_len + kv_len) * rank * (head_dim + value_dim)) time, and memory that is linear in the lengths.

    Example:
        >>> import torch
        >>> query = key = value = torch.randn(1, 2, 64, 8)
        >>> matrix = Linformer(64, 16)(query, key)
        >>> (matrix @ value).shape, matrix.slots().shape
        (torch.Size([1, 2, 64, 8]), torch.Size([1, 2, 64, 16]))

    Reference: Wang et al. 2020, arXiv:2006.04768, section 4. Its theorem 2 states that for every input, projections
    exist that are accurate up to a relative error, but the paper's construction did not achieve this in our tests.
    """

    def __init__(
        self,
        kv_len: int,
        rank: int,
        *,
        share: Share = "heads",
        num_kv_heads: int | None = None,
        scale: float | None = None,
    ):
        super().__init__()
        self.kv_len, self.rank = check_int("kv_len", kv_len), check_int("rank", rank)
        if rank > kv_len:
            raise value_error("rank", f"be at most kv_len {kv_len}", rank)
        if (num_kv_heads is not None) != (share == "none"):
            rule = "be given if and only if share is 'none'"
            raise value_error("num_kv_heads", rule, f"{num_kv_heads} with share={share!r}")
        self.share: Share = check_choice("share", share, ("none", "heads", "key_value"))
        self.num_kv_heads = 1 if num_kv_heads is None else check_int("num_kv_heads", num_kv_heads)
        self.scale = None if scale is None else check_number("scale", scale)
        self.key_projection = nn.Parameter(torch.empty(self.num_kv_heads, rank, kv_len))
        value_projection = None if share == "key_value" else nn.Parameter(torch.empty(self.num_kv_heads, rank, kv_len))
        self.register_parameter("value_projection", value_projection)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set each slot to the mean of a (nearly) equal number of neighbouring positions."""
        slots = torch.arange(self.kv_len) * self.rank // self.kv_len
        means = nn.functional.one_hot(slots, self.rank).mT.to(torch.float32)
        means = means / means.sum(1, keepdim=True)
        with torch.no_grad():
            for projection in self.parameters():
                projection.copy_(means)

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        return why_not_keys_only(
            mask, "a slot mixes keys of the whole sequence, some of which would be hidden from a query"
        )

    def _matrix_of(self, inputs: Inputs) -> LinformerMatrix:
        kv_heads = inputs.key.shape[1]
        if self.share == "none" and kv_heads != self.num_kv_heads:
            raise value_error("key heads", f"be {self.num_kv_heads} (num_kv_heads)", kv_heads)
        tokens = MaskedTokens.of(inputs)
        self._check_last(inputs.kv_positions, inputs.shape[3])
        scale = scale_of(self.scale, inputs.query.shape[3])
        with without_autocast(inputs.query.device):
            pool = self._columns(self.key_projection, tokens).to(inputs.wide)
            other = self.value_projection
            projection = self._columns(other, tokens).to(inputs.wide) if isinstance(other, Tensor) else pool
            is_empty = ((pool == 0) & (projection == 0)).all(-1).all(1).expand(inputs.shape[0], -1)
            slots = (pool @ tokens.key).expand(-1, kv_heads, -1, -1)
            left = NarrowSoftmax(tokens.query, slots, is_empty, scale)
        return LinformerMatrix(left, projection, tokens, dtype=inputs.query.dtype)

    def _check_last(self, positions: Positions | None, kv_len: int) -> None:
        """Raise an error if a key is at position ``kv_len`` or later. Unreadable positions are checked at run time."""
        ends = (0, kv_len - 1) if positions is None else positions.ends
        last = -1 if ends is None else ends[1]
        if last >= self.kv_len:
            rule = f"be at positions below {self.kv_len}, the kv_len of this Linformer"
            raise value_error("keys", rule, f"a key at position {last}", hint="Performer and Nystrom accept any length")

    def extra_repr(self) -> str:
        text = f"{self.kv_len}, {self.rank}, share={self.share!r}"
        return text if self.scale is None else f"{text}, scale={self.scale}"

    def _columns(self, projection: Tensor, tokens: MaskedTokens) -> Tensor:
        """Return the weight of each key position in each slot, ``[batch | 1, kv_heads | 1, rank, kv_len]``."""
        columns = projection[:, :, tokens.keys.clamp(min=0)].movedim(2, 0)
        hidden = marks_or_none(tokens.hidden)
        return columns if hidden is None else columns.masked_fill(hidden[:, None, None], 0.0)


class LinformerMatrix(LowRankMatrix):
    """The Linformer's matrix ``slots @ projection``: slot weights for each query, times value weights for each slot.

    Args:
        left: attention from queries to the pooled keys, ``[batch, heads, q_len, rank]``.
        projection: weight of each value in each slot, ``[batch | 1, kv_heads | 1, rank, kv_len]``; 0 for masked keys.
        tokens: the queries and keys.
        dtype: dtype of the inputs and of matrix products.

    Cost: products take O((q_len + kv_len) * rank * width) time, and memory that is linear in the lengths.
    """

    def __init__(self, left: NarrowSoftmax, projection: Tensor, tokens: MaskedTokens, *, dtype: torch.dtype):
        super().__init__(left, left.key.shape[1], projection.shape[3], dtype=dtype, padding_rows=tokens.padding_rows)
        self.projection, self._hidden = projection, tokens.hidden

    def slots(self) -> Tensor:
        """Return the weight of each slot for each query, ``[batch, heads, q_len, rank]``. Each row sums to 1."""
        return self._zero_padding(self.left.matrix().to_dense())

    def _gathered(self, value: Tensor) -> Tensor:
        return self.projection @ value.masked_fill(self._hidden[:, None, :, None], 0.0)

    def _scattered(self, x: Tensor) -> Tensor:
        groups = self.projection.shape[1]
        each = self.projection if groups == 1 else self.projection.repeat_interleave(self.shape[1] // groups, 1)
        return each.mT @ x

    def _right(self, items: slice, heads: slice) -> Tensor:
        each = self.projection if len(self.projection) == 1 else self.projection[items]
        return each if each.shape[1] == 1 else each[:, groups_of(heads, self.shape[1], self.kv_heads)]
