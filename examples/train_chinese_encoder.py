"""Train a small bidirectional encoder of Chinese, character by character. An hour on one core.

    python examples/train_chinese_encoder.py

reads Lu Xun's "Call to Arms", the "Romance of the Three Kingdoms", plays of the Yuan dynasty and songs of the Song
dynasty, all in the public domain and fetched from PyPI and npm, and learns to predict hidden characters (Devlin et al.
2019, section 3.1, with every seventh character hidden). Every tenth block of text is held out. Baselines are the
prediction of a character from its two neighbours, by counts in the same text, and the most frequent character. Writes
``model/`` (which ``Encoder.from_pretrained`` and transformers read), ``card.json``, and a figure of what the characters
of a sentence attend to. Interrupted runs resume.

Needs ``pip install 'saccade-attention[all]'``.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn import functional as F

import study
from open_texts import Source, blocks_of, plays, romance, songs, stories
from saccade import viz
from saccade.models import Encoder, EncoderConfig

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNK, CLS, SEP, MASK = range(5)
SHARES = (0.1, 0.35, 0.3, 0.25)
"""The share of texts drawn from each source: stories are few, but nearest to what is spoken today."""
LENGTHS = (16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class Settings(study.Settings):
    """The settings of a run."""

    embed_dim: int = 128
    num_heads: int = 4
    num_layers: int = 4
    feed_forward_dim: int = 512
    least_count: int = 3
    tokens: int = 4096  # in a batch
    steps: int = 7000
    warm_up: int = 100
    matrix_rate: float = 0.01
    learning_rate: float = 3e-3
    hidden_share: float = 0.15
    dropout_p: float = 0.0
    block_bytes: int = 3000
    seeds: tuple[int, ...] = (0,)
    texts: tuple[str, ...] = ()  # their sha256


QUICK = Settings(embed_dim=16, num_heads=2, num_layers=1, feed_forward_dim=16, tokens=256, steps=20, warm_up=2)


class Texts(NamedTuple):
    """The data for training and testing: for each source its text in one piece, and the starts of sentences."""

    tokenizer: Tokenizer
    learned: list[Tensor]
    starts: list[Tensor]
    held_out: Tensor
    digests: tuple[str, ...]
    names: list[str]


def read(sources: Sequence[Source], settings: Settings) -> Texts:
    """Split the sources, collect their characters, and number them."""
    split = [blocks_of(source, settings.block_bytes) for source in sources]
    tokenizer = tokenizer_of(["".join(learn) for learn, _ in split], settings.least_count)
    ends = torch.tensor([SEP, *(tokenizer.token_to_id(mark) or SEP for mark in "。！？”")])

    def numbered(blocks: list[str]) -> Tensor:
        paragraphs = [own for block in blocks for own in block.split("\n\n")]
        found = tokenizer.encode_batch(paragraphs, add_special_tokens=False)
        return torch.tensor([SEP] + [token for one in found for token in [*one.ids, SEP]])

    learned = [numbered(learn) for learn, _ in split]
    starts = [1 + torch.isin(own[: -max(LENGTHS)], ends).nonzero()[:, 0] for own in learned]
    digests = tuple(hashlib.sha256("\0".join(learn + out).encode()).hexdigest() for learn, out in split)
    held_out = torch.cat([numbered(out) for _, out in split])
    return Texts(tokenizer, learned, starts, held_out, digests, [source.name for source in sources])


def tokenizer_of(texts: Sequence[str], least_count: int) -> Tokenizer:
    """Build a tokenizer of characters; rare ones are [UNK]."""
    counts = collections.Counter(character for text in texts for character in text if not character.isspace())
    known = sorted(own for own, count in counts.items() if count >= least_count)
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *known])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.normalizer = normalizers.NFC()
    each = pre_tokenizers.Split(Regex(r"\S"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), each])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


class Guesser(nn.Module):
    """An encoder, and a head that predicts hidden characters; the head is not saved."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer):
        super().__init__()
        width = settings.embed_dim
        config = EncoderConfig(
            vocab_size=tokenizer.get_vocab_size(),
            max_len=max(LENGTHS),
            embed_dim=width,
            num_heads=settings.num_heads,
            num_layers=settings.num_layers,
            feed_forward_dim=settings.feed_forward_dim,
            num_token_types=1,
            dropout_p=settings.dropout_p,
            attention_dropout_p=0.0,
        )
        self.encoder = Encoder(config, tokenizer)
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, tokens: Tensor, where: Tensor) -> Tensor:
        """Return logits ``[count, characters]`` at the positions ``where`` of ``tokens``, bool ``[batch, len]``."""
        x = self.transform(self.encoder(tokens)[where])
        return F.linear(x, self.encoder.embeddings.word.weight, self.bias)


class Run(study.Run):
    """A guesser in training: Muon for the matrices within the layers, Adam for the rest."""

    def __init__(self, settings: Settings, texts: Texts, out: Path):
        self.texts = texts
        (seed,) = settings.seeds
        make = lambda: Guesser(settings, texts.tokenizer)  # noqa: E731
        super().__init__("checkpoint", seed, make, self._next_texts, settings, out)

    def make_optimizers(self) -> list[tuple[torch.optim.Optimizer, float]]:
        inner = [p for p in self.module.encoder.layers.parameters() if p.dim() == 2]
        outer = [p for p in self.module.parameters() if not any(p is own for own in inner)]
        return [
            (torch.optim.Muon(inner, weight_decay=self.settings.weight_decay), self.settings.matrix_rate),
            (torch.optim.AdamW(outer, betas=(0.9, 0.95), weight_decay=0.0), self.settings.learning_rate),
        ]

    def at_checkpoint(self, losses: Sequence[float]) -> None:
        self.notes.append([self.step, sum(losses) / len(losses)])

    def _next_texts(self, guesser: Guesser, rng: np.random.Generator) -> Tensor:
        """Return the loss on sequences of one length, each from the beginning of a sentence."""
        length = int(rng.choice(LENGTHS))
        rows = []
        for _ in range(self.settings.tokens // length):
            source = int(rng.choice(len(SHARES), p=SHARES))
            start = int(self.texts.starts[source][int(rng.integers(len(self.texts.starts[source])))])
            rows.append(self.texts.learned[source][start : start + length - 2])
        real = F.pad(F.pad(torch.stack(rows), (1, 0), value=CLS), (0, 1), value=SEP)
        where = torch.from_numpy(rng.random(real.shape) < self.settings.hidden_share) & (real >= len(SPECIAL))
        shown = real.masked_fill(where, MASK)
        # A tenth of the hidden positions shows another character and a tenth the right one, as in BERT.
        kind, other = (
            torch.from_numpy(rng.random(real.shape)),
            rng.integers(len(SPECIAL), len(guesser.bias), real.shape),
        )
        shown = torch.where(where & (kind < 0.1), torch.from_numpy(other), shown)
        shown = torch.where(where & (kind > 0.9), real, shown)
        return F.cross_entropy(guesser(shown, where), real[where])


def questions(held_out: Tensor, length: int = 64, gap: int = 8) -> tuple[Tensor, Tensor]:
    """Return held-out sequences ``[count, length]``, and the hidden positions: every eighth."""
    rows = held_out[: len(held_out) // (length - 2) * (length - 2)].view(-1, length - 2)
    real = F.pad(F.pad(rows, (1, 0), value=CLS), (0, 1), value=SEP)
    places = torch.arange(length).expand_as(real) % gap == (torch.arange(len(real)) % gap)[:, None]
    return real, places & (real >= len(SPECIAL))


@torch.no_grad()
def measure(guesser: Guesser, real: Tensor, where: Tensor) -> tuple[float, float]:
    """Return the accuracy on hidden characters, and nats per character."""
    right, nats = 0.0, 0.0
    for own, hidden in zip(real.split(64), where.split(64), strict=True):
        logits = guesser.eval()(own.masked_fill(hidden, MASK), hidden)
        right += float((logits.argmax(-1) == own[hidden]).sum())
        nats += float(F.cross_entropy(logits, own[hidden], reduction="sum"))
    return right / int(where.sum()), nats / int(where.sum())


def by_neighbours(learned: Sequence[Tensor], real: Tensor, where: Tensor, size: int) -> tuple[float, float]:
    """Return the same for p(c | left) p(right | c), from counts of pairs smoothed by those of characters.

    The weight of single characters is the best for the training text among several.
    """
    pairs, singles = np.zeros((size, size), np.float32), np.zeros(size, np.float64)
    for own in learned:
        np.add.at(pairs, (own[:-1].numpy(), own[1:].numpy()), 1.0)
        singles += np.bincount(own.numpy(), minlength=size)
    alone = (singles + 0.5) / (singles + 0.5).sum()
    rows, columns = where.nonzero(as_tuple=True)
    left, right, wanted = (own.numpy() for own in (real[rows, columns - 1], real[rows, columns + 1], real[where]))
    share = 50 / (50 + singles)  # as if 50 single characters followed each
    logits = np.empty((len(wanted), size), np.float32)
    after = (1 - share[:, None]) * pairs / np.maximum(singles, 1)[:, None]
    for number, (before, behind) in enumerate(zip(left, right, strict=True)):
        next_to_left = after[before] + share[before] * alone
        logits[number] = np.log(next_to_left) + np.log(after[:, behind] + share * alone[behind])
    found = torch.from_numpy(logits)
    answers = torch.from_numpy(wanted)
    return float((found.argmax(-1) == answers).double().mean()), float(F.cross_entropy(found, answers))


def card_of(run: Run, rows: list[dict[str, Any]], count: int) -> dict[str, Any]:
    """Return the model's card: training data, licences and accuracies."""
    texts = [
        {
            "language": "Chinese",
            "source": name,
            "licence": "public domain",
            "characters_learned": len(own),
            "sha256": digest,
        }
        for name, own, digest in zip(run.texts.names, run.texts.learned, run.texts.digests, strict=True)
    ]
    held_out = {"hidden_characters": count, "rows": rows}
    return study.card("train_chinese_encoder.py", run, run.module.encoder, texts, held_out)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Train, measure and write; return the model's card."""
    parser = study.parser(__doc__, "out/chinese-encoder")
    parser.add_argument("--sentence", default="小狗看见了一只猫", help="of the figure (default: %(default)s)")
    given = parser.parse_args(arguments)
    settings = QUICK if given.quick else Settings()
    given.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    texts = read([stories(), romance(), plays(), songs()], settings)
    run = Run(dataclasses.replace(settings, texts=texts.digests), texts, given.out)
    size = texts.tokenizer.get_vocab_size()
    console.print(f"{size:,} characters; {sum(map(len, texts.learned)):,} to learn from")
    study.train_all([run], console)

    # Measured as saved, in half precision.
    copy.deepcopy(run.module.encoder).half().save_pretrained(given.out / "model")
    run.module.encoder = encoder = Encoder.from_pretrained(given.out / "model")
    real, where = questions(texts.held_out)
    often = torch.bincount(torch.cat(texts.learned), minlength=size)[len(SPECIAL) :].argmax() + len(SPECIAL)
    found = {
        "the encoder": measure(run.module, real, where),
        "counts of pairs with the two neighbours": by_neighbours(texts.learned, real, where, size),
        "the most frequent character": (float((real[where] == often).double().mean()), None),
    }
    rows = [study.summary(who, {"0": share}, nats=nats) for who, (share, nats) in found.items()]
    card = card_of(run, rows, int(where.sum()))
    text = json.dumps(card, indent=2, ensure_ascii=False) + "\n"
    study.write_whole(given.out / "card.json", lambda beside: beside.write_text(text, encoding="utf-8"))
    figure = viz.save(encoder.show(given.sentence), given.out / "looks.png")
    title = f"accuracy on {int(where.sum()):,} hidden characters of held-out text"
    study.finish(given.out, title, run.settings, [run], rows, console=console, figures=[figure])
    return card


if __name__ == "__main__":
    main()
