"""Claim that transformers are universal: a layer built by hand for any function, which needs each of its parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from saccade.matrix import attention
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, at_least, at_most, equal

_LETTERS, _LENGTH = 3, 3


def sequences() -> Tensor:
    """Return all 27 sequences of three letters from an alphabet of three, int64 ``[27, 3]``."""
    return torch.tensor(list(itertools.product(range(_LETTERS), repeat=_LENGTH)))


def built(tokens: Tensor, wanted: Tensor, attend: Callable[..., Tensor] = attention) -> Tensor:
    """Run a transformer layer built by hand that maps each sequence to arbitrary targets, ``[27, 3, width]``.

    Tokens are one-hot letters beside one-hot positions. Head h always attends to position h, so every position receives
    the full sequence. For each sequence and position, one hidden unit is 1 there and 0 elsewhere: it is a ReLU of the
    number of matches. The output layer contains the targets.
    """
    count, length = tokens.shape
    letters = torch.nn.functional.one_hot(tokens, _LETTERS).double()
    places = torch.eye(length, dtype=torch.float64)
    query = (50 * places)[None, :, None].expand(count, length, length, length)  # [batch, heads, len, place]
    key = places.expand(count, length, length, length)
    heads = attend(query, key, letters[:, None].expand(count, length, length, _LETTERS), scale=1.0)
    gathered = heads.transpose(1, 2).flatten(2)  # [batch, len, heads * letters]
    matches = gathered @ letters.flatten(1).T
    units = torch.relu(matches[:, :, None] + places[None, :, :, None] - length)  # [batch, len, place, sequence]
    return torch.einsum("blps,spc->blc", units, wanted)


def unexplained_share(wanted: Tensor, *seen: Tensor) -> float:
    """Return the share of the sum of squares of ``wanted`` that no function of ``seen`` can explain."""
    groups = torch.unique(torch.stack([one.flatten() for one in seen], 1), dim=0, return_inverse=True)[1]
    rows = wanted.flatten(0, 1)
    counts = torch.bincount(groups).to(rows)[:, None]
    means = torch.zeros(len(counts), rows.shape[1], dtype=rows.dtype).index_add(0, groups, rows) / counts
    return float((rows - means[groups]).square().sum() / rows.square().sum())


@claim(
    latex=r"\forall f\ \exists\,\text{Transformer}:\ \lVert T(X)-f(X)\rVert\le\varepsilon\ \text{for all}\ X",
    source="Yun et al. 2020, arXiv:1912.10077, theorems 2 and 3, for continuous functions on compact sets",
    verdict="holds if",
    conditions="its size is not limited (here one hidden unit for each sequence and position, n mⁿ of them); there are "
    "positions, since otherwise the function must treat permuted sequences alike, and feed-forward layers, since "
    "attention alone stays in the hull of its values. The claim says that weights exist, not that training finds them",
)
def transformers_are_universal(
    draw: Draw,
    *,
    layer: Callable[[Tensor, Tensor], Tensor] = built,
    left: Callable[..., float] = unexplained_share,
) -> Measurements:
    """A transformer can approximate every function from sequences to sequences."""
    tokens = sequences()
    for name, wanted in (
        ("random numbers", draw.normal(27, _LENGTH, 2)),
        ("the reversed sequence", tokens.flip(1)[..., None].double()),
        ("the parity of the sum", (tokens.sum(1) % 2)[:, None, None].expand(27, _LENGTH, 1).double()),
    ):
        error = float((layer(tokens, wanted) - wanted).abs().max())
        yield at_most(f"all 27 sequences of 3 letters, {name}: largest error", error, 1e-9)
    wanted = draw.normal(27, _LENGTH, 2)
    places = torch.arange(_LENGTH).expand(27, _LENGTH)
    yield at_least("without attention, whatever else: share that is left", left(wanted, tokens, places), 0.5)
    bag = torch.nn.functional.one_hot(tokens, _LETTERS).sum(1)  # the count of each letter
    unordered = (tokens, *(bag[:, letter : letter + 1].expand(27, _LENGTH) for letter in range(_LETTERS)))
    yield at_least("without positions, whatever else: share that is left", left(wanted, *unordered), 0.5)
    yield equal("with both: share that is left", left(wanted, torch.arange(27)[:, None].expand(27, 3), places), 0.0)
