"""Claims about trained models: sparsity, sinks, and heads that follow syntax or link related words."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

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
"""A text for measurements on trained models, with 74 tokens of the small decoder."""


def keys_needed(weights: Tensor, share: float = 0.9) -> Tensor:
    """Return the mean fraction of visible keys that receive ``share`` of the attention of a query, ``[heads]``."""
    strongest = weights.sort(-1, descending=True).values.cumsum(-1)
    needed = (strongest < share).sum(-1) + 1
    return (needed / (weights > 0).sum(-1)).double().mean(-1)


def strongest(mechanism: Softmax, keys: int) -> Mechanism:
    """Build sparse attention: each query attends only to the ``keys`` keys with the largest scores."""
    return TopK(DotProducts(), keys, softmax=mechanism)


def random_keys(mechanism: Softmax, keys: int) -> Mechanism:
    """Build sparse attention: each query attends only to ``keys`` random keys."""

    def scorer(query: Tensor, key: Tensor, rows: range) -> Tensor:
        generator = torch.Generator().manual_seed(rows.start)
        return torch.rand(query.shape[0], query.shape[1], len(rows), key.shape[2], generator=generator)

    return TopK(scorer, keys, softmax=mechanism)


def sinks_of_minilm() -> Tensor:
    """Return how much each head of all-MiniLM-L6-v2 attends to the first token, averaged over queries, ``[heads]``."""
    model = minilm()
    assert model.tokenizer is not None
    tokens = torch.tensor([model.tokenizer.encode(TEXT).ids])
    with torch.no_grad():
        return torch.cat([one.to_dense()[0, :, :, 0].mean(-1) for one in model.matrices(tokens)])


def decoder_loss(text: str, change: Callable[[Softmax], Mechanism] = lambda mechanism: mechanism) -> float:
    """Return the loss of the trained small decoder in nats per token, after ``change`` has replaced its attention."""
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
    latex=r"\mathcal{L}(\text{strongest keys})\approx\mathcal{L}(\text{all keys})",
    source="tutorials on sparse attention; for language models Tang et al. 2024, arXiv:2406.10774",
    verdict="holds if",
    conditions="the tokens are chosen for each query by its scores: a quarter of the keys is then nearly as good as "
    "all. The same number drawn at random is not; which tokens matter differs between queries and heads",
)
def most_tokens_matter_little(
    draw: Draw,
    *,
    loss: Callable[..., float] = decoder_loss,
    choose: Callable[[Softmax, int], Mechanism] = strongest,
    lot: Callable[[Softmax, int], Mechanism] = random_keys,
) -> Measurements:
    """Most tokens matter little for the output, so that a few are enough."""
    whole, keys = loss(TEXT), 18  # a quarter of 74 tokens
    quarter = loss(TEXT, lambda softmax: choose(softmax, keys)) - whole
    drawn = loss(TEXT, lambda softmax: lot(softmax, keys)) - whole
    yield at_most("decoder: nats a token lost with the strongest quarter of the keys", quarter, 0.1)
    yield at_least("decoder: nats a token lost with a random quarter of the keys", drawn, 0.25)


@claim(
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
    shares = torch.cat(decoder()["decoder"])[:, 1:, 0].mean(-1)
    yield at_most("small decoder: head with most", float(shares.max()), 0.15)


Maps = Callable[[list[list[str]]], Tensor]
"""A function that returns the attention weights of all heads for sentences of equal length.

The weights are ``[sentences, heads, words, words]``.
"""

_NOUNS = "cat dog girl boy king woman doctor teacher farmer horse bird lion driver soldier student writer"
_THINGS = "fish book car house letter apple stone ball bread song picture table"
_VERBS = "ate saw found took moved bought lost kept sold left"
_ADJECTIVES = ("", "old", "big red", "very small", "new and heavy", "long")
_BETWEEN = (
    "",
    ", which was very hungry ,",
    ", who was tired ,",
    "of the old man",
    "near the river",
    "that lived in the small town",
    ", after the long and cold night ,",
    "with the red hat",
    "who had met the old queen",
)


class Parsed(NamedTuple):
    """A generated sentence with its syntactic relations, as indices of words from 0.

    Attributes:
        words: the words of the sentence.
        subject: index of the subject's noun.
        verb, determiner, thing: indices of the verb, the object's determiner and the object's noun.
    """

    words: list[str]
    subject: int
    verb: int
    determiner: int
    thing: int


def sentences(count: int, half: int) -> list[Parsed]:
    """Generate sentences like "the old cat, which was very hungry, ate the big red fish", using half of the words."""
    draw = random.Random(half)
    parsed = []
    for _ in range(count):
        noun, verb, thing = (draw.choice(words.split()[half::2]) for words in (_NOUNS, _VERBS, _THINGS))
        before, inside = (draw.choice(_ADJECTIVES).split() for _ in range(2))
        left = ["the", *before, noun]
        middle = [*left, *draw.choice(_BETWEEN).split()]
        words = [*middle, verb, "the", *inside, thing, "."]
        parsed.append(Parsed(words, len(left) - 1, len(middle), len(middle) + 1, len(words) - 2))
    return parsed


def maps_of_minilm() -> Maps:
    """Return a function from sentences to the attention weights of a trained English encoder.

    Every word must be a single token.
    """
    model = minilm()
    assert model.tokenizer is not None
    known = model.tokenizer.token_to_id

    def maps(texts: list[list[str]]) -> Tensor:
        tokens = torch.tensor([[known("[CLS]"), *map(known, words), known("[SEP]")] for words in texts])
        with torch.no_grad():
            return torch.cat([one.to_dense()[:, :, 1:-1, 1:-1] for one in model.matrices(tokens)], 1)

    return maps


def hits(sentences: list[Parsed], maps: list[Tensor], source: str, target: str) -> Tensor:
    """Return the share of sentences where a relation's source word attends most to its target word, ``[heads]``."""
    is_hit = []
    for parsed, weights in zip(sentences, maps, strict=True):
        row = weights[:, getattr(parsed, source)].clone()
        row[:, getattr(parsed, source)] = -1.0
        is_hit.append(row.argmax(-1) == getattr(parsed, target))
    return torch.stack(is_hit).double().mean(0)


@claim(
    latex=r"\arg\max_j A_{ij}=\mathrm{head}(i)",
    source="tutorials; Clark et al. 2019, arXiv:1906.04341, section 4.2, for BERT",
    verdict="holds if",
    conditions="measured on all-MiniLM-L6-v2: one head attends from the object to its verb, one from the determiner "
    "to its noun, at any distance. None attends from the verb to a subject separated by other words, the example of "
    "the tutorials",
)
def heads_follow_syntax(draw: Draw, *, maps: Callable[[], Maps] = maps_of_minilm, count: int = 60) -> Measurements:
    """Some heads follow syntax: subjects, verbs, objects."""
    attended = maps()
    chosen, others = (sentences(count, half) for half in (0, 1))  # the halves have no noun, verb or object in common
    seen_chosen, seen_others = ([attended([one.words])[0] for one in own] for own in (chosen, others))
    for what, source, target, least in (
        ("from the object to its verb", "thing", "verb", 0.85),
        ("from the determiner to its noun", "determiner", "thing", 0.8),
    ):
        best = int(hits(chosen, seen_chosen, source, target).argmax())
        share = float(hits(others, seen_others, source, target)[best])
        yield at_least(f"{what}: share of sentences, head chosen by other words", share, least)
        away = [getattr(one, target) - getattr(one, source) for one in others]
        yield at_most(f"{what}: the most frequent distance", max(map(away.count, away)) / count, 0.5)
    subject = hits([*chosen, *others], [*seen_chosen, *seen_others], "verb", "subject")
    yield at_most("from the verb to its subject: best head of all", float(subject.max()), 0.6)


_SYNONYMS = (
    "big large,happy glad,sick ill,angry mad,forest woods,smart clever,boat ship,stone rock,car automobile,"
    "error mistake,gift present,street road"
)
_OPPOSITES = (
    "big small,happy sad,fast slow,rich poor,hard easy,cold hot,buy sell,strong weak,old young,wet dry,day night,"
    "full empty"
)


@claim(
    latex=r"A_{ij}>A_{ij'},\quad j\ \text{synonym of}\ i,\ j'\ \text{not}",
    source="tutorials; no reference is given, and none is known to us",
    verdict="holds if",
    conditions="related words are meant: measured on all-MiniLM-L6-v2, one head attends from a word to its synonym, "
    "and equally to its antonym. It links related words and does not distinguish the two",
)
def heads_link_synonyms(draw: Draw, *, maps: Callable[[], Maps] = maps_of_minilm) -> Measurements:
    """Some heads relate words of the same meaning."""
    attended = maps()

    def weights_between(pairs: str) -> Tensor:
        """Return the attention weights from second words of pairs to first words, ``[second, first, heads]``."""
        split = [pair.split() for pair in pairs.split(",")]
        texts = [f"they said {a} and later they said {b} again .".split() for _, b in split for a, _ in split]
        return attended(texts)[:, :, 7, 2].unflatten(0, (len(split), len(split))).double()

    def wins(weights: Tensor) -> Tensor:
        """Return how often each word attends more to its partner than to other words, ``[words, heads]``."""
        partner = weights.diagonal().T[:, None]
        return (partner > weights).double().sum(1) / (len(weights) - 1)

    like, unlike = weights_between(_SYNONYMS), weights_between(_OPPOSITES)
    best = int(wins(like)[::2].mean(0).argmax())
    linked, opposed = float(wins(like)[1::2, best].mean()), float(wins(unlike)[:, best].mean())
    yield at_least("a synonym gets more than an unrelated word, head chosen by other pairs", linked, 0.95)
    times = like.diagonal()[best, 1::2].mean() / like[1::2, :, best].mean()
    yield at_least("weight of a synonym, as a multiple of a word's mean weight", float(times), 5.0)
    yield at_least("an antonym gets more than an unrelated word, the same head", opposed, 0.95)
    yield at_most("a synonym gets more, median head", float(wins(like).mean(0).median()), 0.85)
