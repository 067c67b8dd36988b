"""Relations in the heads of a trained encoder: words of a sentence, and words of similar meaning."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.models import minilm
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, at_least, at_most

Maps = Callable[[list[list[str]]], Tensor]
"""What heads attend to in sentences of equal length, ``[sentences, heads of all layers, words, words]``."""

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
    """A sentence that was built from its parse; words count from 0.

    Attributes:
        words: the sentence.
        subject: index of the noun of the subject.
        verb, determiner, thing: indices of the verb, and of determiner and noun of the object.
    """

    words: list[str]
    subject: int
    verb: int
    determiner: int
    thing: int


def sentences(count: int, half: int) -> list[Parsed]:
    """Build sentences like "the old cat, which was very hungry, ate the big red fish", from one half of the words."""
    draw = random.Random(half)
    found = []
    for _ in range(count):
        noun, verb, thing = (draw.choice(words.split()[half::2]) for words in (_NOUNS, _VERBS, _THINGS))
        before, inside = (draw.choice(_ADJECTIVES).split() for _ in range(2))
        left = ["the", *before, noun]
        middle = [*left, *draw.choice(_BETWEEN).split()]
        words = [*middle, verb, "the", *inside, thing, "."]
        found.append(Parsed(words, len(left) - 1, len(middle), len(middle) + 1, len(words) - 2))
    return found


def maps_of_minilm() -> Maps:
    """Return the weights of a trained English encoder; every word must be one token."""
    model = minilm()
    assert model.tokenizer is not None
    known = model.tokenizer.token_to_id

    def maps(texts: list[list[str]]) -> Tensor:
        tokens = torch.tensor([[known("[CLS]"), *map(known, words), known("[SEP]")] for words in texts])
        with torch.no_grad():
            return torch.cat([one.to_dense()[:, :, 1:-1, 1:-1] for one in model.matrices(tokens)], 1)

    return maps


def hits(own: list[Parsed], seen: list[Tensor], source: str, target: str) -> Tensor:
    """Return the share of sentences in which one word attends most to the other, ``[heads]``."""
    found = []
    for parsed, weights in zip(own, seen, strict=True):
        row = weights[:, getattr(parsed, source)].clone()
        row[:, getattr(parsed, source)] = -1.0
        found.append(row.argmax(-1) == getattr(parsed, target))
    return torch.stack(found).double().mean(0)


@claim(
    "trained",
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
    chosen, others = (sentences(count, half) for half in (0, 1))  # the halves share no noun, verb or object
    seen_chosen, seen_others = ([attended([one.words])[0] for one in own] for own in (chosen, others))
    for what, source, target, least in (
        ("from the object to its verb", "thing", "verb", 0.85),
        ("from the determiner to its noun", "determiner", "thing", 0.8),
    ):
        best = int(hits(chosen, seen_chosen, source, target).argmax())
        found = float(hits(others, seen_others, source, target)[best])
        yield at_least(f"{what}: share of sentences, head chosen by other words", found, least)
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
    "trained",
    latex=r"A_{ij}>A_{ij'},\quad j\ \text{synonym of}\ i,\ j'\ \text{not}",
    source="tutorials; no reference is given, and none is known to us",
    verdict="holds if",
    conditions="related words are meant: measured on all-MiniLM-L6-v2, one head attends from a word to its synonym, "
    "and equally to its antonym. It links related words and does not distinguish the two",
)
def heads_link_synonyms(draw: Draw, *, maps: Callable[[], Maps] = maps_of_minilm) -> Measurements:
    """Some heads relate words of the same meaning."""
    attended = maps()

    def of(pairs: str) -> Tensor:
        """Return the weight from the second word of each pair to each first word, ``[second, first, heads]``."""
        split = [pair.split() for pair in pairs.split(",")]
        texts = [f"they said {a} and later they said {b} again .".split() for _, b in split for a, _ in split]
        return attended(texts)[:, :, 7, 2].unflatten(0, (len(split), len(split))).double()

    def wins(given: Tensor) -> Tensor:
        """Return how often the partner of a word gets more weight than another word, ``[words, heads]``."""
        own = given.diagonal().T[:, None]
        return (own > given).double().sum(1) / (len(given) - 1)

    like, unlike = of(_SYNONYMS), of(_OPPOSITES)
    best = int(wins(like)[::2].mean(0).argmax())
    linked, opposed = float(wins(like)[1::2, best].mean()), float(wins(unlike)[:, best].mean())
    yield at_least("a synonym gets more than an unrelated word, head chosen by other pairs", linked, 0.95)
    times = like.diagonal()[best, 1::2].mean() / like[1::2, :, best].mean()
    yield at_least("how many times what a word gets on average", float(times), 5.0)
    yield at_least("an opposite gets more than a strange word, the same head", opposed, 0.95)
    yield at_most("a synonym gets more, median head", float(wins(like).mean(0).median()), 0.85)
