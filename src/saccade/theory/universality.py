"""The claim that transformers are universal: a hand-built layer computes any function, and needs each of its parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from saccade.matrix import attention
from saccade.support.language import Message
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, at_least, at_most, equal

_LETTERS, _LENGTH = 3, 3


def sequences() -> Tensor:
    """Return all 27 sequences of three letters from an alphabet of three, int64 ``[27, 3]``."""
    return torch.tensor(list(itertools.product(range(_LETTERS), repeat=_LENGTH)))


def relu_by_attention(x: Tensor, attend: Callable[..., Tensor] = attention) -> Tensor:
    """Compute the relu of integers with a head of two keys, 0 and x, each of which is also its value."""
    value = torch.stack([torch.zeros_like(x), x], -1).flatten(0, -2)[None, :, :, None]  # [1, numbers, 2, 1]
    query = torch.full_like(value[:, :, :1], 100.0)
    return attend(query, value, value, scale=1.0)[0, :, 0, 0].view(x.shape)


def built(
    tokens: Tensor,
    wanted: Tensor,
    attend: Callable[..., Tensor] = attention,
    activation: Callable[[Tensor], Tensor] = torch.relu,
) -> Tensor:
    """Run a hand-built transformer layer that maps each sequence to arbitrary targets, ``[27, 3, width]``.

    A token consists of a one-hot letter and a one-hot position. Head h always attends to position h, so every position
    receives the full sequence. For each sequence and position, one hidden unit is 1 there and 0 elsewhere: it is a ReLU
    of the number of matches. The output layer contains the targets.
    """
    count, length = tokens.shape
    one_hot = torch.nn.functional.one_hot(tokens, _LETTERS).double()
    positions = torch.eye(length, dtype=torch.float64)
    query = (50 * positions)[None, :, None].expand(count, length, length, length)  # [batch, heads, len, position]
    key = positions.expand(count, length, length, length)
    heads = attend(query, key, one_hot[:, None].expand(count, length, length, _LETTERS), scale=1.0)
    gathered = heads.transpose(1, 2).flatten(2)  # [batch, len, heads * alphabet]
    matches = gathered @ one_hot.flatten(1).T
    units = activation(matches[:, :, None] + positions[None, :, :, None] - length)  # [batch, len, position, sequence]
    return torch.einsum("blps,spc->blc", units, wanted)


def parity_by_counting(bits: Tensor, attend: Callable[..., Tensor] = attention) -> Tensor:
    """Return the parity of each row of bits ``[rows, n]``, by a head with equal weights and a layer of n hidden units.

    The output of the head is the number of ones divided by n. The hidden units are relus that sum to a zigzag function.
    """
    n = bits.shape[1]
    value = bits[:, None, :, None]
    counted = n * attend(torch.zeros_like(value[:, :, :1]), torch.zeros_like(value), value)[:, 0, 0, 0]
    steps = torch.arange(n, dtype=bits.dtype)
    slopes = torch.where(steps == 0, 1.0, 2 * (-1.0) ** steps)
    return torch.relu(counted[:, None] - steps) @ slopes.to(bits)


def unexplained_share(wanted: Tensor, *seen: Tensor) -> float:
    """Return the share of the sum of squares of ``wanted`` that no function of ``seen`` can explain."""
    groups = torch.unique(torch.stack([column.flatten() for column in seen], 1), dim=0, return_inverse=True)[1]
    rows = wanted.flatten(0, 1)
    counts = torch.bincount(groups).to(rows)[:, None]
    means = torch.zeros(len(counts), rows.shape[1], dtype=rows.dtype).index_add(0, groups, rows) / counts
    return float((rows - means[groups]).square().sum() / rows.square().sum())


@claim(
    latex=r"\forall f\ \exists\,\text{Transformer}:\ \Bigl(\int\lVert T(X)-f(X)\rVert_p^p\,dX\Bigr)^{1/p}"
    r"\le\varepsilon",
    source="Yun et al. 2020, arXiv:1912.10077, theorems 2 and 3, for continuous functions on compact sets",
    verdict="holds if",
    conditions="the length is fixed; the size is not limited (here one hidden unit for each sequence and position, n "
    "mⁿ of them); positions are encoded, since otherwise the function must treat permuted sequences alike; and "
    "something computes a relu: a feed-forward layer, or heads with two keys (Huben and Morris 2023, "
    "arXiv:2309.08593). The theorem bounds an L^p distance, not the error at every X; on finitely many sequences it "
    "is 0. It says that weights exist, not that training finds them",
)
def transformers_are_universal(
    draw: Draw,
    *,
    layer: Callable[..., Tensor] = built,
    by_attention: Callable[[Tensor], Tensor] = relu_by_attention,
    identity: Callable[[Tensor], Tensor] = torch.clone,
    left: Callable[..., float] = unexplained_share,
    parity: Callable[[Tensor], Tensor] = parity_by_counting,
) -> Measurements:
    """A transformer can approximate every function from sequences to sequences."""
    tokens = sequences()
    for name, wanted in (
        ("random numbers", draw.normal(27, _LENGTH, 2)),
        ("the reversed sequence", tokens.flip(1)[..., None].double()),
        ("the parity of the sum", (tokens.sum(1) % 2)[:, None, None].expand(27, _LENGTH, 1).double()),
    ):
        error = float((layer(tokens, wanted) - wanted).abs().max())
        yield at_most(Message("all 27 sequences of 3 letters, {name}: largest error", name=Message(name)), error, 1e-9)
    wanted = draw.normal(27, _LENGTH, 2)
    error = float((layer(tokens, wanted, activation=by_attention) - wanted).abs().max())
    yield at_most("a head with two keys in place of the relu, random numbers: largest error", error, 1e-9)
    error = float((layer(tokens, wanted, activation=identity) - wanted).abs().max())
    yield at_least("no relu, random numbers: largest error", error, 8.0)
    positions = torch.arange(_LENGTH).expand(27, _LENGTH)
    yield at_least("without attention, whatever else: share that is left", left(wanted, tokens, positions), 0.5)
    bag = torch.nn.functional.one_hot(tokens, _LETTERS).sum(1)  # the count of each letter
    unordered = (tokens, *(bag[:, letter : letter + 1].expand(27, _LENGTH) for letter in range(_LETTERS)))
    yield at_least("without positions, whatever else: share that is left", left(wanted, *unordered), 0.5)
    yield equal("with both: share that is left", left(wanted, torch.arange(27)[:, None].expand(27, 3), positions), 0.0)
    answers = parity(torch.tensor(list(itertools.product((0.0, 1.0), repeat=8)), dtype=torch.float64))
    expected = torch.tensor([sum(row) % 2 for row in itertools.product((0, 1), repeat=8)], dtype=torch.float64)
    yield at_most(
        "parity of 8 bits, equal weights and 8 hidden units: largest error of 256 sequences",
        float((answers - expected).abs().max()),
        1e-9,
    )
