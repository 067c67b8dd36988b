"""Sparsity of attention in trained models, and the part of it that their output needs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from saccade.mechanisms import Mechanism, Softmax, TopK
from saccade.models import minilm, small_decoder
from saccade.nn import MultiHeadAttention
from saccade.scorers import DotProducts
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, at_least, at_most
from saccade.theory.rank import trained_heads

TEXT = (
    "Return a new list that holds the items of both lists. The function reads the file line by line, and stops at the "
    "first line that is empty. If the file does not exist, an error is raised, and nothing is written. The default "
    "value is used when no value is given. "
)
"""74 tokens of the small decoder."""


def keys_needed(weights: Tensor, share: float = 0.9) -> Tensor:
    """Return the part of the visible keys that holds this share of attention, mean over queries ``[heads]``."""
    strongest = weights.sort(-1, descending=True).values.cumsum(-1)
    needed = (strongest < share).sum(-1) + 1
    return (needed / (weights > 0).sum(-1)).double().mean(-1)


def strongest(mechanism: Softmax, keys: int) -> Mechanism:
    """Let each query read only the keys with the largest scores."""
    return TopK(DotProducts(), keys, softmax=mechanism)


def by_chance(mechanism: Softmax, keys: int) -> Mechanism:
    """Let each query read only a number of random keys."""

    def scorer(query: Tensor, key: Tensor, rows: range) -> Tensor:
        drawn = torch.Generator().manual_seed(rows.start)
        return torch.rand(query.shape[0], query.shape[1], len(rows), key.shape[2], generator=drawn)

    return TopK(scorer, keys, softmax=mechanism)


def sinks_of_minilm() -> Tensor:
    """Return the weight on the first token for each head of a trained encoder, mean over queries ``[heads]``."""
    model = minilm()
    assert model.tokenizer is not None
    tokens = torch.tensor([model.tokenizer.encode(TEXT).ids])
    with torch.no_grad():
        return torch.cat([one.to_dense()[0, :, :, 0].mean(-1) for one in model.matrices(tokens)])


def decoder_loss(text: str, change: Callable[[Softmax], Mechanism] = lambda own: own) -> float:
    """Return the loss of the small decoder in nats per token, with another mechanism as its attention."""
    model = small_decoder()
    assert model.tokenizer is not None
    for layer in model.modules():
        if isinstance(layer, MultiHeadAttention):
            assert isinstance(layer.mechanism, Softmax)
            layer.mechanism = change(layer.mechanism)
    tokens = torch.tensor([model.tokenizer.encode(text).ids])
    with torch.no_grad():
        return float(cross_entropy(model(tokens)[0, :-1], tokens[0, 1:]))


@claim(
    "trained",
    latex=r"\min\Bigl\{|S|:\textstyle\sum_{j\in S}A_{ij}\ge 0.9\Bigr\}\ll n",
    source="tutorials on sparse attention; Child et al. 2019, arXiv:1904.10509, section 4.1, by looking at layers",
    verdict="holds if",
    conditions="it refers to some heads: those that attend to one neighbour need two keys in a hundred for 90 % of "
    "their attention. The median head of the bundled models needs half of the keys that it sees, the "
    "broadest four fifths",
)
def trained_attention_is_sparse(
    draw: Draw,
    *,
    heads: Callable[[], dict[str, list[Tensor]]] = trained_heads,
    needed: Callable[[Tensor], Tensor] = keys_needed,
) -> Measurements:
    """The attention of trained models is sparse: most of it goes to a few tokens."""
    for name, layers in heads().items():
        shares = torch.cat([needed(one) for one in layers])
        yield at_most(f"{name}: keys for 90 % of the attention, head that needs fewest", float(shares.min()), 0.25)
        yield at_least(f"{name}: median head", float(shares.median()), 0.3)
        yield at_least(f"{name}: head that needs most", float(shares.max()), 0.7)


@claim(
    "trained",
    latex=r"\mathcal{L}(\text{strongest keys})\approx\mathcal{L}(\text{all keys})",
    source="tutorials on sparse attention; for language models Tang et al. 2024, arXiv:2406.10774",
    verdict="holds if",
    conditions="the tokens are chosen for each query, by its own scores: a quarter of the keys then does nearly "
    "what all do. The same number drawn at random does not; which tokens matter differs from query to "
    "query and from head to head",
)
def most_tokens_matter_little(
    draw: Draw,
    *,
    loss: Callable[..., float] = decoder_loss,
    choose: Callable[[Softmax, int], Mechanism] = strongest,
    lot: Callable[[Softmax, int], Mechanism] = by_chance,
) -> Measurements:
    """Most tokens matter little for the output, so that a few are enough."""
    whole, keys = loss(TEXT), 18  # a quarter of 74 tokens
    quarter = loss(TEXT, lambda own: choose(own, keys)) - whole
    drawn = loss(TEXT, lambda own: lot(own, keys)) - whole
    yield at_most("decoder: nats a token lost with the strongest quarter of the keys", quarter, 0.1)
    yield at_least("decoder: nats a token lost with a random quarter of the keys", drawn, 0.25)


@claim(
    "trained",
    latex=r"A^{(h)}\neq A^{(h')}:\ \text{some near, some far}",
    source="tutorials; Clark et al. 2019, arXiv:1906.04341, section 3, for BERT",
    verdict="holds",
    conditions="measured on both bundled models: heads for the previous token, and broad ones",
)
def heads_learn_different_patterns(
    draw: Draw, *, heads: Callable[[], dict[str, list[Tensor]]] = trained_heads
) -> Measurements:
    """Different heads of a trained model learn different patterns: some look near, some everywhere."""
    for name, layers in heads().items():
        weights = torch.cat(layers).double()
        before = weights.diagonal(-1, dim1=1, dim2=2).mean(-1)
        seen = (weights > 0).sum(-1).clamp_min(2)
        breadth = (torch.special.entr(weights).sum(-1) / seen.log())[:, 1:].mean(-1)
        yield at_least(f"{name}: share of the previous token, head with most", float(before.max()), 0.4)
        yield at_most(f"{name}: head with least", float(before.min()), 0.1)
        yield at_least(f"{name}: entropy as a share of the possible, broadest head", float(breadth.max()), 0.85)
        yield at_most(f"{name}: narrowest head", float(breadth.min()), 0.5)


@claim(
    "trained",
    latex=r"A_{i1}\gg 1/n",
    source="tutorials on sparse attention; Xiao et al. 2023, arXiv:2309.17453, section 3.1; that not every "
    "model has them: Gu et al. 2024, arXiv:2410.10781",
    verdict="holds if",
    conditions="the model was trained long and is large enough: the encoder all-MiniLM-L6-v2 puts unused attention "
    "on its first token, [CLS]; the bundled small decoder does not",
)
def first_tokens_are_sinks(
    draw: Draw,
    *,
    encoder: Callable[[], Tensor] = sinks_of_minilm,
    decoder: Callable[[], dict[str, list[Tensor]]] = trained_heads,
) -> Measurements:
    """The first token of a sequence is a sink: it gets much attention, whatever the query."""
    shares = encoder()
    yield at_least("all-MiniLM-L6-v2: share given to the first token, head with most", float(shares.max()), 0.5)
    yield at_least("all-MiniLM-L6-v2: heads that give it 0.3 at least", float((shares >= 0.3).sum()), 10)
    own = torch.cat(decoder()["decoder"])[:, 1:, 0].mean(-1)
    yield at_most("small decoder: head with most", float(own.max()), 0.15)
