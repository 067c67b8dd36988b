"""BlockDiffusion: the mask for block-diffusion training, over noisy tokens followed by clean tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
from torch import Tensor

from saccade.masks.mask import Domain, Mask
from saccade.masks.mask_fields import SIZE_BITS, check_field
from saccade.plan import Groups
from saccade.plan.key_ranges import Bounds, Ints, KeyDomain, Spans
from saccade.support.argument_hints import argument_hints


@argument_hints(length="BlockDiffusion(4, length=512): the number of tokens in the text; the sequence is twice as long")
@dataclasses.dataclass(frozen=True)
class BlockDiffusion(Mask):
    """A mask for block-diffusion training, over ``length`` noisy tokens followed by the same tokens without noise.

    A noisy token sees its own noisy block and the clean blocks before it. A clean token sees its own clean block and
    the clean blocks before it, but no noisy token. One pass then trains the denoising of all blocks. In generation,
    all earlier blocks are clean, so no noisy half is needed: ``Coarse(Causal(), block)``.

    >>> print(BlockDiffusion(2, 4).picture(8))
    1 1 . . . . . .
    1 1 . . . . . .
    . . 1 1 1 1 . .
    . . 1 1 1 1 . .
    . . . . 1 1 . .
    . . . . 1 1 . .
    . . . . 1 1 1 1
    . . . . 1 1 1 1

    Both halves have the same positions in the text, so pass ``[*range(length), *range(length)]`` as rotary positions.
    The mask itself counts tokens over the full sequence.

    Args:
        block: number of tokens in a block, at least 1; the last block may be shorter.
        length: number of tokens in the text, at least 1. Attention over more than ``2 * length`` positions raises an
            error.

    Raises:
        ValueError: an argument does not meet the conditions above.

    Reference: Arriola et al. 2025, arXiv:2503.09573, section 3.
    """

    block: int
    length: int

    def __post_init__(self) -> None:
        check_field(self, "block", 1, bits=SIZE_BITS)
        check_field(self, "length", 1, bits=SIZE_BITS)

    @property
    def domain(self) -> Domain:
        return Domain(range(2 * self.length), range(2 * self.length))

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        is_clean_query, is_clean_key = q >= self.length, kv >= self.length
        row = (q - self.length * is_clean_query) // self.block
        column = (kv - self.length * is_clean_key) // self.block
        is_earlier = is_clean_key & (column < row)
        is_own = (is_clean_query == is_clean_key) & (column == row)
        exists = (q >= 0) & (q < 2 * self.length) & (kv >= 0) & (kv < 2 * self.length)
        return (is_earlier | is_own) & exists

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        length, low, high = self.length, np.maximum(groups.first, 0), np.minimum(groups.last, 2 * self.length - 1)
        is_noisy, is_clean = (low < length) & (low <= high), (high >= length) & (low <= high)
        noisy = self._block_of(low), self._block_of(np.minimum(high, length - 1))
        clean = self._block_of(np.maximum(low, length) - length), self._block_of(high - length)
        # Every noisy row sees its own block, and the clean tokens up to the begin of this block; every clean row sees
        # the clean tokens up to the end of its block.
        longest = np.maximum(np.where(is_noisy, noisy[1][0], 0), np.where(is_clean, clean[1][1], 0))
        shortest = np.minimum(np.where(is_noisy, noisy[0][0], length), np.where(is_clean, clean[0][1], length))
        any_own = np.where(is_noisy, noisy[0][0], 0), np.where(is_noisy, noisy[1][1], 0)
        all_own = np.where(is_clean, 0, noisy[1][0]), np.where(is_clean, 0, noisy[0][1])
        exists = (groups.first >= 0) & (groups.last < 2 * length)
        any_row = self._spans(*any_own, longest, keys)
        all_rows = self._spans(*all_own, shortest, keys).where(exists, Spans.nothing(keys))
        is_exact = np.array_equal(any_row.starts, all_rows.starts) and np.array_equal(any_row.ends, all_rows.ends)
        return Bounds.exactly(any_row) if is_exact else Bounds(any_row, all_rows)

    def _block_of(self, position: Ints) -> tuple[Ints, Ints]:
        """Return the start and end of the block that contains each position in the text."""
        begin = position // self.block * self.block
        return begin, np.minimum(begin + self.block, self.length)

    def _spans(self, begin: Ints, end: Ints, num_clean: Ints, keys: KeyDomain) -> Spans:
        """Return the noisy keys from ``begin`` to ``end``, and the first ``num_clean`` clean keys, for each group."""
        first = np.full_like(begin, self.length)
        return Spans.of(np.stack([begin, first], 1), np.stack([end, first + num_clean], 1), keys)

    def cuts(self, batch: int, rows: range) -> Ints:
        edges = []
        for begin in (0, self.length):
            first, stop = max(rows.start - begin, 0), min(rows.stop - begin, self.length)
            edges.append(begin + np.arange(first // self.block * self.block, stop, self.block))
        return np.concatenate(edges)
