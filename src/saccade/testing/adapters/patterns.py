"""Read what flags and lengths express a dense mask. The functions use torch alone, so that scripts can hold them."""

from __future__ import annotations

import torch
from torch import Tensor


def distances(q_len: int, kv_len: int, like: Tensor) -> Tensor:
    """Return the key's position minus the query's, the last query at the last key: ``[q_len, kv_len]``."""
    q = torch.arange(kv_len - q_len, kv_len, device=like.device)
    return torch.arange(kv_len, device=like.device)[None] - q[:, None]


def in_band(q_len: int, kv_len: int, band: tuple[int, int], like: Tensor) -> Tensor:
    """Return the mask of a band: keys from ``left`` before to ``right`` after a query; -1 is no limit."""
    far = distances(q_len, kv_len, like)
    left, right = (far.numel() if side < 0 else side for side in band)
    return (far >= -left) & (far <= right)


def band_of(mask: Tensor) -> tuple[int, int] | None:
    """Return the band that a mask ``[q_len, kv_len]`` equals; causal is (-1, 0), all is (-1, -1), another is None."""
    q_len, kv_len = mask.shape
    seen = distances(q_len, kv_len, mask)[mask]
    measured = (max(0, -int(seen.min())), max(0, int(seen.max()))) if seen.numel() else (0, 0)
    for band in ((-1, 0), (-1, -1), (measured[0], 0), (-1, measured[1]), measured):
        if torch.equal(mask, in_band(q_len, kv_len, band, mask)):
            return band
    return None


def one_mask(mask: Tensor) -> Tensor | None:
    """Return the mask ``[q_len, kv_len]`` if it is equal for all batch items and heads, else None."""
    if not mask.numel():
        return mask.new_ones(mask.shape[2:])
    return mask[0, 0] if bool((mask == mask[:1, :1]).all()) else None


def of_items(mask: Tensor) -> Tensor | None:
    """Return the masks ``[batch, q_len, kv_len]`` if heads share them, else None."""
    if not mask.numel():
        return mask.new_ones(mask.shape[0], *mask.shape[2:])
    return mask[:, 0] if bool((mask == mask[:, :1]).all()) else None


def blocks_of(mask: Tensor) -> list[tuple[int, int, int, int]]:
    """Return the documents of one item's mask ``[q_len, kv_len]``, as (first, last + 1) of queries and of keys.

    With as many queries as keys, they are the smallest groups of neighbours that attend to one another alone; tokens
    that see nothing and are not seen are left out. Otherwise there is one document, of the keys up to the last seen.
    """
    q_len, kv_len = mask.shape
    if q_len != kv_len:
        seen = mask.any(0).nonzero()
        return [(0, q_len, 0, int(seen.max()) + 1)] if seen.numel() else []
    place = torch.arange(q_len, device=mask.device)
    first = torch.where(mask, place[None], q_len).amin(1, keepdim=False).minimum(place) if q_len else place
    last = torch.where(mask, place[None], -1).amax(1).maximum(place) if q_len else place
    blocks, start, end = [], 0, -1
    spans = sorted(zip(first.tolist(), last.tolist(), strict=True))
    for low, high in spans:
        if low > end:
            blocks += [(start, end + 1)] if end >= 0 else []
            start = low
        end = max(end, high)
    blocks += [(start, end + 1)] if end >= 0 else []
    return [(a, b, a, b) for a, b in blocks if bool(mask[a:b, a:b].any())]


def band_of_blocks(mask: Tensor, blocks: list[list[tuple[int, int, int, int]]]) -> tuple[int, int] | None:
    """Return the one band with which the documents of all items express the masks ``[batch, q_len, kv_len]``."""
    far = [
        distances(b - a, d - c, mask)[mask[item, a:b, c:d]] for item, found in enumerate(blocks) for a, b, c, d in found
    ]
    seen = torch.cat(far) if far else distances(0, 0, mask).flatten()
    measured = (max(0, -int(seen.min())), max(0, int(seen.max()))) if seen.numel() else (0, 0)
    for band in ((-1, 0), (-1, -1), (measured[0], 0), measured):
        says = torch.zeros_like(mask)
        for item, found in enumerate(blocks):
            for a, b, c, d in found:
                says[item, a:b, c:d] = in_band(b - a, d - c, band, mask)
        if torch.equal(says, mask):
            return band
    return None
