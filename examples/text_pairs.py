"""Tools for sequence-to-sequence text: one tokenizer for both, batches, the loss, and generation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.caches import padded_positions
from saccade.models import EncoderDecoder, EncoderDecoderConfig, generate

START, END = 0, 1
IGNORED = -100


def tokenizer_of(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which represents every text without loss."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<start>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Pairs(NamedTuple):
    """Sources and targets as tokens without start and end."""

    sources: list[list[int]]
    targets: list[list[int]]


def pairs_of(
    tokenizer: Tokenizer, sources: Sequence[str], targets: Sequence[str], read: int, write: int | None = None
) -> Pairs:
    """Tokenize texts, at most ``read`` tokens of each source; drop pairs with a target longer than ``write``."""
    read_ones = [own.ids[:read] for own in tokenizer.encode_batch(list(sources))]
    written = [own.ids for own in tokenizer.encode_batch(list(targets))]
    kept = [i for i, own in enumerate(written) if write is None or len(own) <= write]
    return Pairs([read_ones[i] for i in kept], [written[i] for i in kept])


def transformer(settings: Any, tokenizer: Tokenizer, max_len: int) -> EncoderDecoder:
    """Build a pre-norm encoder-decoder with equal numbers of encoder and decoder layers."""
    config = EncoderDecoderConfig(
        vocab_size=tokenizer.get_vocab_size(),
        max_len=max_len,
        embed_dim=settings.embed_dim,
        num_heads=settings.num_heads,
        num_encoder_layers=settings.num_layers,
        num_decoder_layers=settings.num_layers,
        feed_forward_dim=settings.feed_forward_dim,
        norm_first=True,
        dropout_p=settings.dropout_p,
        end_tokens=(END,),
    )
    return EncoderDecoder(config, tokenizer)


def padded(rows: Sequence[Sequence[int]], fill: int = END) -> Tensor:
    """Return rows of different lengths as one tensor ``[batch, longest]``."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])


def loss(model: nn.Module, pairs: Pairs, rng: np.random.Generator, size: int) -> Tensor:
    """Return the cross entropy of ``size`` random pairs."""
    chosen = rng.integers(len(pairs.sources), size=size)
    sources = [pairs.sources[i] for i in chosen]
    targets = [[START, *pairs.targets[i], END] for i in chosen]
    places = padded_positions([len(own) for own in sources])
    tokens = padded([own[:-1] for own in targets])
    wanted = padded([own[1:] for own in targets], IGNORED)
    logits = model(padded(sources), tokens, source_positions=places)
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, label_smoothing=0.1)


@torch.no_grad()
def write(model: nn.Module, sources: Sequence[Sequence[int]], most: int) -> list[list[int]]:
    """Return the likeliest tokens, chosen greedily, up to the end or ``most`` of them."""
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    found: dict[int, list[int]] = {}
    for first in range(0, len(order), 64):
        own = order[first : first + 64]
        rows = [sources[i] for i in own]
        given = model.eval().given(padded(rows), source_positions=padded_positions([len(row) for row in rows]))
        found |= zip(own, generate(given, [[START]] * len(own), most, stop=END), strict=True)
    return [found[i] for i in range(len(sources))]
