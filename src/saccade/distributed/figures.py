"""Draw an exchange plan: the transfers between ranks and the balance of the work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from saccade import viz
from saccade.distributed.exchange_plan import Exchange
from saccade.plan.key_ranges import Ints
from saccade.support.language import translated

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHADES = " ░▒▓█"
_WIDEST = 32  # maximum number of ranks in a line of text, each two characters wide


def traffic(plan: Exchange) -> Ints:
    """Return the bytes that each rank (row) receives from each other rank (column), int64 ``[ranks, ranks]``."""
    counts, ranks = plan.layout.counts, plan.ranks
    if plan.strategy != "fetch":
        width = plan.bytes_received.sum() / max(1, (ranks - 1) * plan.seq_len)
        return np.where(np.eye(ranks, dtype=bool), 0, (np.broadcast_to(counts, (ranks, ranks)) * width)).astype(
            np.int64
        )
    tokens = np.zeros((ranks, ranks), dtype=np.int64)
    for rank in range(ranks):
        for peer, keys in plan.needs.from_others(rank):
            tokens[rank, peer] += len(keys)
    return tokens * plan.bytes_of_token


def picture(plan: Exchange) -> str:
    """Draw the transfers between ranks as text: rows receive, columns send, and darker cells mean more bytes.

    The number after each row is the rank's work, as a multiple of the mean.

    With more than 32 ranks, adjacent ranks are grouped, and the maximum of each group is shown.
    """
    sent, work = traffic(plan), plan.pairs / max(1.0, plan.pairs.mean())
    group = -(-plan.ranks // _WIDEST)
    starts = np.arange(0, plan.ranks, group)
    sent = np.maximum.reduceat(np.maximum.reduceat(sent, starts, 0), starts, 1)
    work = np.maximum.reduceat(work, starts)
    shades = np.ceil(sent * (len(_SHADES) - 1) / max(1, sent.max())).astype(int)
    lines = [translated("receives from ranks 0 to {last}; work relative to the mean:", last=plan.ranks - 1)]
    for start, row, share in zip(starts.tolist(), shades.tolist(), work.tolist(), strict=True):
        cells = "".join(
            2 * ("·" if start == column else _SHADES[shade]) for column, shade in zip(starts, row, strict=True)
        )
        lines.append(f"{start:>5} {cells} {share:.2f}")
    return "\n".join([*lines, translated("darkest: {most:,.2f} MiB", most=sent.max() / 2**20)])


def figure(plan: Exchange, title: str | None = None) -> Figure:
    """Draw the transfers between ranks as a heatmap in MiB.

    Args:
        plan: an exchange plan for any number of ranks.
        title: title of the figure; by default, the mask, the layout and the strategy.

    Returns:
        A figure that is not registered with pyplot and not shown. `viz.save` writes it to a file.
    """
    default = translated(
        "{mask} over {tokens:,} tokens, {layout}, {strategy}: MiB received by each rank; the busiest rank has "
        "{imbalance:.2f} times the mean work",
        mask=plan.mask_text,
        tokens=plan.seq_len,
        layout=plan.layout.name,
        strategy=plan.strategy,
        imbalance=plan.imbalance,
    )
    return viz.heatmap(
        traffic(plan) / 2**20,
        title=default if title is None else title,
        x_name="sender",
        y_name="receiver",
        scale_name="MiB",
    )
