"""A plan in the words of other engines: FlexAttention's blocks of a rank, TransformerEngine's kind of exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from saccade.distributed.exchange_plan import Exchange
from saccade.engine.positions.positioned_mask import AtPositions
from saccade.masks import Causal, Full, Mask
from saccade.masks.convert.varlen import packed_of
from saccade.positions.token_positions import Positions
from saccade.support.errors import unsupported

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["block_mask", "cp_comm_types"]

CommType = Literal["p2p", "all_gather", "a2a"]


def block_mask(
    plan: Exchange, rank: int, block_size: tuple[int, int] = (128, 128), device: torch.device | str = "cpu"
) -> BlockMask:
    """FlexAttention's BlockMask of a rank's own rows over the keys that it has after the exchange.

    Args:
        plan: of "fetch" or "gather".
        rank: whose rows.
        block_size: rows and columns of a block, as the backend asks for them.
        device: where FlexAttention will run.

    Returns:
        A BlockMask over ``[own rows, own and fetched keys in the order of their positions]``.
    """
    from saccade.engine.kernels.block_mask import blocks_of  # noqa: PLC0415  imports a compiler

    if plan.strategy == "ulysses":
        reason = "each rank then has all rows of its heads: saccade.integrations.flex.block_mask makes that one"
        raise unsupported('strategy="ulysses"', [reason])
    own = plan.rank(rank)
    rows, columns = plan.layout.tokens(rank), own.columns
    where = torch.device(device)
    q, kv = (Positions(None, torch.from_numpy(places)[None]) for places in (rows, columns))
    rule = AtPositions.of(plan.mask, q, kv, where)
    return blocks_of(rule, (plan.mask.shape[0], 1, len(rows), len(columns)), (0, 0), where, block_size)


def cp_comm_types(layers: Sequence[Mask | None]) -> list[CommType]:
    """TransformerEngine's ``cp_comm_type`` for each layer: what its mask can be exchanged by without being changed.

    Its ring ("p2p") knows full and causal masks; for windows it takes "a2a", which hands whole rows of some heads to
    each rank. Other masks it does not have.

    Raises:
        UnsupportedError: a mask that is neither full, causal nor a causal window.
    """
    return [_comm_type(Full() if mask is None else mask, number) for number, mask in enumerate(layers)]


def _comm_type(mask: Mask, number: int) -> CommType:
    if isinstance(mask, Full | Causal):
        return "p2p"
    packed = packed_of(mask, 1 << 30)
    if packed is None or packed.right != 0 or len(packed.lengths[0]) != 1:
        reason = f"TransformerEngine has full and causal masks and causal windows, and layer {number} has {mask}"
        raise unsupported("a mask", [reason], hint="saccade.distributed runs every mask")
    return "p2p" if packed.left is None else "a2a"
