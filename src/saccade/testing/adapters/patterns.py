"""Convert a dense mask to flags and lengths. All functions use only torch, so that scripts can include their source."""

from __future__ import annotations

import torch
from torch import Tensor


def distances(q_len: int, kv_len: int, like: Tensor) -> Tensor:
    """Return key positions minus query positions, ``[q_len, kv_len]``, with the last query aligned to the last key."""
    q = torch.arange(kv_len - q_len, kv_len, device=like.device)
    return torch.arange(kv_len, device=like.device)[None] - q[:, None]


def in_band(q_len: int, kv_len: int, band: tuple[int, int], like: Tensor) -> Tensor:
    """Return the mask ``[q_len, kv_len]`` that allows only keys within a band around each query.

    A band ``(left, right)`` extends from ``left`` tokens before a query to ``right`` after it; -1 means no limit.
    """
    far = distances(q_len, kv_len, like)
    left, right = (far.numel() if side < 0 else side for side in band)
    return (far >= -left) & (far <= right)


def band_of(mask: Tensor) -> tuple[int, int] | None:
    """Return the band of a mask ``[q_len, kv_len]``, such as (-1, 0) if it is causal; None if it is not a band."""
    q_len, kv_len = mask.shape
    seen = distances(q_len, kv_len, mask)[mask]
    measured = (max(0, -int(seen.min())), max(0, int(seen.max()))) if seen.numel() else (0, 0)
    for band in ((-1, 0), (-1, -1), (measured[0], 0), (-1, measured[1]), measured):
        if torch.equal(mask, in_band(q_len, kv_len, band, mask)):
            return band
    return None


def one_mask(mask: Tensor) -> Tensor | None:
    """Return the mask ``[q_len, kv_len]`` if it is equal for all batch items and heads, otherwise None."""
    if not mask.numel():
        return mask.new_ones(mask.shape[2:])
    return mask[0, 0] if bool((mask == mask[:1, :1]).all()) else None


def of_items(mask: Tensor) -> Tensor | None:
    """Return the masks ``[batch, q_len, kv_len]`` if they are equal for all heads, otherwise None."""
    if not mask.numel():
        return mask.new_ones(mask.shape[0], *mask.shape[2:])
    return mask[:, 0] if bool((mask == mask[:, :1]).all()) else None


def blocks_of(mask: Tensor) -> list[tuple[int, int, int, int]]:
    """Return the documents in a mask ``[q_len, kv_len]``, as (query start, query stop, key start, key stop).

    With equal numbers of queries and keys, a document is a minimal group of consecutive tokens that attend only to each
    other; groups without any allowed pair are omitted. Otherwise, there is one document: all queries, and the keys up
    to the last visible one.
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
    """Return the band that gives the masks ``[batch, q_len, kv_len]`` if applied within each document, or None."""
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
