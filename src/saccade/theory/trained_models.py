"""Claims about trained models: sparsity, sinks, and heads that follow syntax or link related words."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from saccade.matrix import AttentionMatrix
from saccade.mechanisms import Mechanism, Softmax
from saccade.models import minilm, small_decoder
from saccade.nn import MultiHeadAttention
from saccade.support.language import Message
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, at_least, at_most
from saccade.theory.rank import trained_heads

TEXT = (
    "Return a new list that holds the items of both lists. The function reads the file line by line, and stops at the "
    "first line that is empty. If the file does not exist, an error is raised, and nothing is written. The default "
    "value is used when no value is given. "
)
"""A text for measurements on trained models, with 74 tokens of the small decoder."""

TEXTS = (
    TEXT,
    "The list is sorted before it is returned, so that the order of the items is always the same. Each key of the "
    "dictionary is a string, and each value is a number. If a key is not found, the default is returned. The class "
    "keeps a count of the objects that are created, and closes the file when the last one is removed. ",
    "The king had three sons, and the youngest was the one who went out into the wood. He met an old man who asked him "
    "for a piece of bread, and he gave it to him. Then the old man said that he should cut down the tree, and look for "
    "what lies under its roots. ",
)
"""Three texts with 74, 88 and 104 tokens of the small decoder; the last is unlike what the decoder was trained on."""


def keys_needed(weights: Tensor, share: float = 0.9) -> Tensor:
    """Return the mean fraction of visible keys that suffice to get ``share`` of a query's attention, ``[heads]``."""
    strongest = weights.sort(-1, descending=True).values.cumsum(-1)
    needed = (strongest < share).sum(-1) + 1
    return (needed / (weights > 0).sum(-1)).double().mean(-1)


def heads_on_a_long_text() -> Tensor:
    """Return the attention weights of all heads of the small decoder on 250 tokens, ``[heads, 250, 250]``."""
    model = small_decoder()
    assert model.tokenizer is not None
    tokens = torch.tensor([model.tokenizer.encode("".join(TEXTS)).ids])[:, :250]
    with torch.no_grad():
        return torch.cat([matrix.to_dense()[0] for matrix in model.matrices(tokens)])


class ShareOfKeys(Mechanism):
    """Sparse attention in which each query attends to a share of the keys that it sees.

    Args:
        softmax: the softmax over the chosen keys.
        share: the share of its visible keys that a query attends to; the number of keys is rounded up.
        at_random: whether to choose random keys instead of those with the largest weights.
    """

    def __init__(self, softmax: Softmax, share: float, at_random: bool = False):
        super().__init__()
        self.softmax, self.share, self.at_random = softmax, share, at_random

    def forward(self, query: Tensor, key: Tensor, *, mask: object = None, **positions: Any) -> AttentionMatrix:
        """Return the softmax over the chosen keys. All weights are computed, so sequences must be short."""
        weights = self.softmax(query, key, mask=mask, **positions).to_dense()
        visible = weights > 0
        rank_by = torch.rand(weights.shape, generator=torch.Generator().manual_seed(0)) if self.at_random else weights
        rank = rank_by.masked_fill(~visible, -1).argsort(-1, descending=True).argsort(-1)
        selected = rank < (visible.sum(-1, keepdim=True) * self.share).ceil()
        return self.softmax(query, key, mask=selected & visible, **positions)


def sinks_of_minilm() -> Tensor:
    """Return how much each head of all-MiniLM-L6-v2 attends to the first token, averaged over queries, ``[heads]``."""
    model = minilm()
    assert model.tokenizer is not None
    tokens = torch.tensor([model.tokenizer.encode(TEXT).ids])
    with torch.no_grad():
        return torch.cat([matrix.to_dense()[0, :, :, 0].mean(-1) for matrix in model.matrices(tokens)])


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
    conditions="the sequence is long, or the head attends to one neighbour: such heads of the encoder need 2 % of the "
    "keys for 90 % of their attention. Of the keys that it sees, the median head of the small decoder needs 42 % in "
    "the first 75 tokens of a text, and 20 % after 150; the broadest head needs four fifths at every length",
)
def trained_attention_is_sparse(
    draw: Draw,
    *,
    heads: Callable[[], dict[str, list[Tensor]]] = trained_heads,
    needed: Callable[[Tensor], Tensor] = keys_needed,
    long: Callable[[], Tensor] = heads_on_a_long_text,
) -> Measurements:
    """The attention of trained models is sparse: most of it goes to a few tokens."""
    for name, layers in heads().items():
        shares = torch.cat([needed(weights_of_layer) for weights_of_layer in layers])
        bound = 0.04 if name == "encoder" else 0.25
        yield at_most(
            Message("{name}: keys for 90 % of the attention, head that needs fewest", name=Message(name)),
            float(shares.min()),
            bound,
        )
        yield at_least(Message("{name}: median head", name=Message(name)), float(shares.median()), 0.3)
        yield at_least(Message("{name}: head that needs most", name=Message(name)), float(shares.max()), 0.7)
    weights = long()
    early, late = (float(needed(weights[:, rows]).median()) for rows in (slice(75), slice(150, 250)))
    yield at_least("decoder, a text of 250 tokens: median head, the first 75", early, 0.3)
    yield at_most("the same, the last 100", late, 0.3)
    yield at_most("the same, as a share of the first", late / early, 0.7)


@claim(
    latex=r"\mathcal{L}(\text{strongest keys})\approx\mathcal{L}(\text{all keys})",
    source="tutorials on sparse attention; for language models Tang et al. 2024, arXiv:2406.10774",
    verdict="holds if",
    conditions="the tokens are chosen for each query by its scores, and half of them remain: the small decoder then "
    "loses at most 0.03 nats per token, on three texts of about a hundred tokens. With a quarter it loses 0.2 nats, "
    "and with half of the keys drawn at random 0.3 or more",
)
def most_tokens_matter_little(
    draw: Draw,
    *,
    loss: Callable[..., float] = decoder_loss,
    choose: Callable[[Softmax, float], Mechanism] = ShareOfKeys,
    lot: Callable[[Softmax, float], Mechanism] = lambda softmax, share: ShareOfKeys(softmax, share, True),
) -> Measurements:
    """Most tokens matter little for the output, so a few are enough."""
    whole = torch.tensor([loss(text) for text in TEXTS])

    def lost(choice: Callable[[Softmax, float], Mechanism], share: float) -> Tensor:
        return torch.tensor([loss(text, lambda softmax: choice(softmax, share)) for text in TEXTS]) - whole

    yield at_most(
        "decoder: nats a token lost with the strongest half of a query's keys, worst of three texts",
        float(lost(choose, 0.5).max()),
        0.06,
    )
    yield at_least("the same with the strongest quarter", float(lost(choose, 0.25).max()), 0.1)
    yield at_least("with a random half, best of three texts", float(lost(lot, 0.5).min()), 0.2)


@claim(
    latex=r"A^{(h)}\neq A^{(h')}:\ \text{some near, some far}",
    source="tutorials; Clark et al. 2019, arXiv:1906.04341, section 3, for BERT",
    verdict="holds",
    conditions="measured on both bundled models, which have heads for the previous token and broad heads. At least "
    "three heads of each put half of their attention on tokens at most three away, where equal weights would put a "
    "tenth. Heads that start equal stay equal (each-head-learns-another-subspace)",
)
def heads_learn_different_patterns(
    draw: Draw, *, heads: Callable[[], dict[str, list[Tensor]]] = trained_heads
) -> Measurements:
    """Different heads of a trained model learn different patterns: some attend to nearby tokens, some to all."""
    for name, layers in heads().items():
        weights = torch.cat(layers).double()
        before = weights.diagonal(-1, dim1=1, dim2=2).mean(-1)
        seen = (weights > 0).sum(-1).clamp_min(2)
        breadth = (torch.special.entr(weights).sum(-1) / seen.log())[:, 1:].mean(-1)
        yield at_least(
            Message("{name}: share of the previous token, head with most", name=Message(name)), float(before.max()), 0.4
        )
        yield at_most(Message("{name}: head with least", name=Message(name)), float(before.min()), 0.1)
        yield at_least(
            Message("{name}: entropy as a share of the possible, broadest head", name=Message(name)),
            float(breadth.max()),
            0.85,
        )
        yield at_most(Message("{name}: narrowest head", name=Message(name)), float(breadth.min()), 0.5)
        positions = torch.arange(weights.shape[-1])
        near = (weights * ((positions[:, None] - positions).abs() <= 3)).sum(-1)[:, 16:].mean(-1)
        local = Message("{name}: heads with half of their attention on tokens at most 3 away", name=Message(name))
        yield at_least(local, int((near >= 0.5).sum()), 3)


@claim(
    latex=r"A_{i1}\gg 1/n",
    source="tutorials on sparse attention; Xiao et al. 2023, arXiv:2309.17453, section 3.1; that not every "
    "model has them: Gu et al. 2024, arXiv:2410.10781",
    verdict="holds if",
    conditions="the model is one that has them: the encoder all-MiniLM-L6-v2 puts unused attention on its first token, "
    "[CLS]; the bundled small decoder does not. Gu et al. find sinks in small models too, once they are trained "
    "effectively on enough data, and none where weights need not sum to 1",
)
def first_tokens_are_sinks(
    draw: Draw,
    *,
    encoder: Callable[[], Tensor] = sinks_of_minilm,
    decoder: Callable[[], dict[str, list[Tensor]]] = trained_heads,
) -> Measurements:
    """The first token of a sequence is a sink: it receives a large share of the attention, whatever the query."""
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
    """A generated sentence with its syntactic relations, given as zero-based word indices.

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
    """Generate sentences such as "the old cat, which was hungry, ate the big red fish" from one half of the words."""
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
            return torch.cat([matrix.to_dense()[:, :, 1:-1, 1:-1] for matrix in model.matrices(tokens)], 1)

    return maps


def hits(sentences: list[Parsed], maps: list[Tensor], source: str, target: str) -> Tensor:
    """Return the share of sentences where a relation's source word attends most to its target word, ``[heads]``."""
    is_hit = []
    for parsed, weights in zip(sentences, maps, strict=True):
        row = weights[:, getattr(parsed, source)].clone()
        row[:, getattr(parsed, source)] = -1.0
        is_hit.append(row.argmax(-1) == getattr(parsed, target))
    return torch.stack(is_hit).double().mean(0)


def _maps_of(attended: Maps, parsed: list[Parsed]) -> list[Tensor]:
    """Return each sentence's attention weights, ``[heads, words, words]``; sentences of equal length run at once."""
    weights: dict[int, Tensor] = {}
    for length in {len(sentence.words) for sentence in parsed}:
        indices = [index for index, sentence in enumerate(parsed) if len(sentence.words) == length]
        weights |= dict(zip(indices, attended([parsed[index].words for index in indices]), strict=True))
    return [weights[index] for index in range(len(parsed))]


@claim(
    latex=r"\arg\max_j A_{ij}=\mathrm{head}(i)",
    source="tutorials; Clark et al. 2019, arXiv:1906.04341, section 4.2, for BERT",
    verdict="holds if",
    conditions="measured on all-MiniLM-L6-v2: one head attends from the object to its verb, one from the determiner "
    "to its noun, at any distance, in more than nine sentences of ten. From a verb to a subject that other words "
    "separate from it, the example of the tutorials, the best head does so in four of ten: less reliably, but five "
    "times as often as by chance",
)
def heads_follow_syntax(draw: Draw, *, maps: Callable[[], Maps] = maps_of_minilm, count: int = 60) -> Measurements:
    """Some heads follow syntax: subjects, verbs, objects."""
    attended = maps()
    chosen, others = (sentences(count, half) for half in (0, 1))  # the halves have no noun, verb or object in common
    seen_chosen, seen_others = (_maps_of(attended, parsed) for parsed in (chosen, others))
    for what, source, target, least in (
        ("from the object to its verb", "thing", "verb", 0.85),
        ("from the determiner to its noun", "determiner", "thing", 0.8),
    ):
        best = int(hits(chosen, seen_chosen, source, target).argmax())
        share = float(hits(others, seen_others, source, target)[best])
        yield at_least(
            Message("{what}: share of sentences, head chosen by other words", what=Message(what)), share, least
        )
        away = [getattr(sentence, target) - getattr(sentence, source) for sentence in others]
        yield at_most(
            Message("{what}: the most frequent distance", what=Message(what)), max(map(away.count, away)) / count, 0.5
        )
    verb = int(hits(chosen, seen_chosen, "verb", "thing").argmax())
    reached = float(hits(others, seen_others, "verb", "thing")[verb])
    yield at_least("from the verb to its object: share of sentences, head chosen by other words", reached, 0.8)

    def apart(parsed: list[Parsed], seen: list[Tensor]) -> tuple[list[Parsed], Tensor]:
        far = [index for index, sentence in enumerate(parsed) if sentence.verb - sentence.subject > 1]
        return [parsed[index] for index in far], hits(
            [parsed[index] for index in far], [seen[index] for index in far], "verb", "subject"
        )

    (_, first), (far, second) = apart(chosen, seen_chosen), apart(others, seen_others)
    subject = float(second[int(first.argmax())])
    chance = sum(1 / (len(sentence.words) - 1) for sentence in far) / len(far)
    yield at_least(
        "from the verb to a subject apart from it, head chosen by other words, over chance", subject / chance, 3
    )
    yield at_most("the same: share of sentences", subject, 0.6)


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
    conditions="it refers to related words: measured on all-MiniLM-L6-v2, one head attends from a word to its "
    "synonym, and equally to its antonym. It links related words and does not distinguish the two",
)
def heads_link_synonyms(draw: Draw, *, maps: Callable[[], Maps] = maps_of_minilm) -> Measurements:
    """Some heads link words with the same meaning."""
    attended = maps()

    def weights_between(pairs: str) -> Tensor:
        """Return the attention weights from second words of pairs to first words, ``[second, first, heads]``."""
        split = [pair.split() for pair in pairs.split(",")]
        texts = [f"they said {a} and later they said {b} again .".split() for _, b in split for a, _ in split]
        return attended(texts)[:, :, 7, 2].unflatten(0, (len(split), len(split))).double()

    def wins(weights: Tensor) -> Tensor:
        """Return the share of other words that get less attention from a word than its partner, ``[words, heads]``."""
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
