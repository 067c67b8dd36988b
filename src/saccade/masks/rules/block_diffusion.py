"""BlockDiffusion: the mask for block-diffusion training, over noisy tokens followed by clean tokens."""

from __future__ import annotations

import dataclasses

import numpy as np

from saccade.masks.mask_fields import SIZE_BITS, check_field
from saccade.masks.rules.range_table import RangeTable
from saccade.plan.key_ranges import Ints
from saccade.support.argument_hints import argument_hints

_LENGTH_BITS = 30  # 64 bytes for each position


@argument_hints(length="BlockDiffusion(4, length=512): the number of tokens in the text; the sequence is twice as long")
@dataclasses.dataclass(frozen=True)
class BlockDiffusion(RangeTable):
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
        check_field(self, "length", 1, bits=_LENGTH_BITS)
        position = np.arange(self.length, dtype=np.int64)
        begin = position // self.block * self.block
        end = np.minimum(begin + self.block, self.length)
        clean = np.full_like(position, self.length)
        nothing = np.zeros_like(position)
        noisy_rows = np.stack([begin, clean], 1), np.stack([end, clean + begin], 1)
        clean_rows = np.stack([clean, nothing], 1), np.stack([clean + end, nothing], 1)
        starts, ends = (np.concatenate(sides) for sides in zip(noisy_rows, clean_rows, strict=True))
        self._set_ranges([starts], [ends])

    def cuts(self, batch: int, rows: range) -> Ints:
        half = np.arange(0, self.length, self.block)
        return np.concatenate([half, half + self.length])
