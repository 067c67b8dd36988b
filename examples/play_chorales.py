"""Music: a decoder with relative attention predicts the notes of Bach's chorales, and continues them.

    python examples/play_chorales.py

407 chorales of four voices are fetched from PyPI, on a grid of eighths: in every step soprano, alto, tenor and bass
start a note, go on, or rest, one after the other. Layers of causal attention with a vector for each distance
(`positions.ShawKeys`), as in the Music Transformer, learn to predict the next one, in all keys. Baselines are the same
without distances, a GRU with as many parameters, and Markov chains over the same pitches. No melody of the test is in
the training data, in any key, under any number. Three seeds, three minutes each; prints how many bits a note takes,
writes a MIDI file with a continuation of a test chorale after two bars, and draws what a note attends to, and how far
back each head looks. Interrupted runs resume.

Needs ``pip install 'saccade-attention[all]'``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

import chorales
import markov
import study
from chorales import BAR, BEATS, HIGH, LOW, ON, REST, SYMBOLS, VOICES, Chorale, as_text
from midi import as_midi
from piano_roll import draw
from saccade import caches, masks, mechanisms, models, nn, positions, viz


@dataclasses.dataclass(frozen=True)
class Settings(study.Settings):
    """The settings of a run."""

    steps: int = 1500
    batch_size: int = 8
    learning_rate: float = 4e-3
    bars: int = 2
    embed_dim: int = 96
    num_heads: int = 4
    num_layers: int = 2
    gru_dim: int = 114
    dropout_p: float = 0.1
    keys: tuple[int, ...] = tuple(range(-5, 7))
    test: int = 60
    validation: int = 30


QUICK = Settings(steps=10, batch_size=4, warm_up=2, bars=1, embed_dim=16, num_layers=1, gru_dim=24, seeds=(0,))
LEAP = 24  # semitones, the largest interval with its own number


class Player(torch.nn.Module):
    """A model that predicts the next symbol of each voice: an interval, a pitch, or a continuation."""

    def __init__(self, name: str, settings: Settings):
        super().__init__()
        self.settings, width = settings, settings.embed_dim
        sizes = (HIGH - LOW + 2, 2, BEATS * len(VOICES), HIGH - LOW + 2)
        self.embeddings = torch.nn.ModuleList(torch.nn.Embedding(size, width) for size in sizes)
        for embedding in self.embeddings:
            torch.nn.init.normal_(embedding.weight, std=0.5)
        self.body = GRU(settings) if name == "gru" else self._stack(has_distances=name == "relative")
        self.pitch, self.leap = torch.nn.Linear(width, SYMBOLS), torch.nn.Linear(width, 2 * LEAP + 1)
        # Interval from a voice's last pitch to a possible one, clipped to the largest.
        leaps = (torch.arange(1, sizes[0]) - torch.arange(sizes[0])[:, None]).clamp(-LEAP, LEAP) + LEAP
        self.register_buffer("leaps", leaps, persistent=False)

    def _stack(self, *, has_distances: bool) -> nn.DecoderStack:
        """Build layers of attention to the last bars, with relative position vectors or without."""
        width, heads, reach = self.settings.embed_dim, self.settings.num_heads, self.settings.bars * BAR

        def layer() -> nn.DecoderLayer:
            bias = positions.ShawKeys(width // heads, (reach - 1, 0), heads) if has_distances else None
            mask, mechanism = masks.sliding_window(reach), mechanisms.Softmax(bias=bias)
            attention = nn.MultiHeadAttention(width, heads, mask=mask, mechanism=mechanism)
            return nn.DecoderLayer(attention, nn.FeedForward(width, 2 * width), dropout_p=self.settings.dropout_p)

        layers = [layer() for _ in range(self.settings.num_layers)]
        return nn.DecoderStack(layers, final_norm=torch.nn.LayerNorm(width))

    def embed(self, known: Tensor) -> Tensor:
        """Return ``[batch, len, embed_dim]`` of ``[batch, len, 4]``."""
        return sum(own(known[..., column]) for column, own in enumerate(self.embeddings))

    def forward(self, known: Tensor, cache: caches.Cache | None = None) -> Tensor:
        """Return logits ``[batch, len, SYMBOLS]`` of the next symbol; with a cache, ``known`` holds the new ones."""
        x = self.embed(known)
        x = self.body(x) if cache is None else self.body(x, cache=cache)
        logits, leaps = self.pitch(x), self.leap(x).gather(-1, self.leaps[known[..., 3]])
        # After a rest there is no interval.
        return logits + F.pad(leaps * (known[..., 3:] > 0), (0, SYMBOLS - leaps.shape[-1]))


class GRU(torch.nn.Module):
    """A baseline of two recurrent layers with about the same number of parameters."""

    def __init__(self, settings: Settings):
        super().__init__()
        width, inner = settings.embed_dim, settings.gru_dim
        self.layers = torch.nn.GRU(width, inner, 2, batch_first=True, dropout=settings.dropout_p)
        self.out = torch.nn.Sequential(torch.nn.Dropout(settings.dropout_p), torch.nn.Linear(inner, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[batch, len, embed_dim]`` of the same shape."""
        return self.out(self.layers(x)[0])


def run_of(name: str, seed: int, settings: Settings, train: Sequence[Chorale], out: Path) -> study.Run:
    """Return one seed, which gets other bars in other keys in every step."""
    texts = [[as_text(chorale, key) for key in settings.keys] for chorale in train]
    shares = np.array([len(chorale) for chorale in train], float)
    length = settings.bars * BAR

    def loss(module: Player, rng: np.random.Generator) -> Tensor:
        known = torch.zeros(settings.batch_size, length, 4, dtype=torch.int64)
        symbols = torch.full((settings.batch_size, length), -1)
        for row, i in enumerate(rng.choice(len(texts), settings.batch_size, p=shares / shares.sum())):
            text = texts[i][rng.integers(len(settings.keys))]
            start = len(VOICES) * int(rng.integers(max(len(text.symbols) - length, 0) // len(VOICES) + 1))
            own = slice(start, start + length)
            known[row, : len(text.known[own])], symbols[row, : len(text.symbols[own])] = (
                text.known[own],
                text.symbols[own],
            )
        return F.cross_entropy(module(known).flatten(0, 1), symbols.flatten(), ignore_index=-1)

    return study.Run(name, seed, lambda: Player(name, settings), loss, settings, out)


@torch.no_grad()
def bits(module: Player, chorale: Chorale) -> np.ndarray:
    """Return the bits of each symbol of a chorale after all earlier ones: ``[steps, 4]``."""
    text = as_text(chorale)
    found = F.cross_entropy(module.eval()(text.known[None])[0], text.symbols, reduction="none") / math.log(2)
    return found.reshape(-1, len(VOICES)).numpy()


def row_of(who: str, by_seed: dict[str, list[np.ndarray]], heard: Sequence[Chorale], **others: Any) -> dict[str, Any]:
    """Return bits per note over seeds, and per voice."""
    started = sum(((chorale.starts & (chorale.pitch > 0)).sum(0) for chorale in heard), np.zeros(4))
    taken = {seed: sum(own.sum(0) for own in found) for seed, found in by_seed.items()}
    voices = dict(zip(VOICES, np.mean([own / started for own in taken.values()], 0).tolist(), strict=True))
    return study.summary(
        who, {seed: float(own.sum() / started.sum()) for seed, own in taken.items()}, **voices, **others
    )


# --- what it plays, and what it looks at -----------------------------------------------------------------------------


@torch.no_grad()
def goes_on(module: Player, start: Chorale, steps: int, sampler: models.Sampler, seed: int = 0) -> Chorale:
    """Continue a chorale by sampled symbols, with a cache."""
    bar = int(start.beat.max()) + 1
    beat = np.r_[start.beat, (start.beat[-1] + 1 + np.arange(steps)) % bar]
    pitch, starts = (np.r_[own, np.zeros((steps, len(VOICES)), own.dtype)] for own in (start.pitch, start.starts))
    whole, cache = Chorale("", pitch, starts, beat), module.eval().body.new_cache()
    generator, read = torch.Generator().manual_seed(seed), 0
    for index in range(start.pitch.size, pitch.size):
        logits = module(as_text(whole).known[None, read : index + 1], cache)[:, -1]
        symbol, read = int(sampler.draw(logits, generator)[0]), index + 1
        step, voice = divmod(index, len(VOICES))
        starts[step, voice] = symbol != ON
        pitch[step, voice] = 0 if symbol == REST else pitch[step - 1, voice] if symbol == ON else symbol + LOW
    return whole


def until(chorale: Chorale, steps: int) -> Chorale:
    """Return the beginning of a chorale."""
    return Chorale("", chorale.pitch[:steps], chorale.starts[:steps], chorale.beat[:steps])


@torch.no_grad()
def looks(module: Player, chorale: Chorale, step: int, voice: int) -> dict[str, np.ndarray]:
    """Return the attention of a symbol to all earlier ones, ``[symbols]``, by kind of weights."""
    index = step * len(VOICES) + voice
    matrices = module.body.matrices(module.embed(as_text(chorale).known[None, : index + 1]))
    # Position i of a text holds the symbol before it.
    found = torch.stack([matrix.to_dense()[0, :, index, 1:] for matrix in matrices]).numpy()
    entropy = -(found * np.log(np.maximum(found, 1e-30))).sum(-1)
    layer, head = np.unravel_index(entropy.argmin(), entropy.shape)
    return {
        f"mean of all heads, layer {len(found)}": found[-1].mean(0),
        f"the sharpest: head {head + 1}, layer {layer + 1}": found[layer, head],
    }


@torch.no_grad()
def distances(module: Player, chorale: Chorale, most: int = 16) -> Tensor:
    """Return the mean attention of each head by distance in symbols: ``[layers * heads, most]``."""
    matrices = module.body.matrices(module.embed(as_text(chorale).known[None]))
    heads = torch.cat([matrix.to_dense()[0] for matrix in matrices])
    return torch.stack([heads.diagonal(-back, 1, 2)[:, most - back :].mean(1) for back in range(most)], 1)


PEERS = {
    "relative": "attention that knows distances",
    "bag": "the same without distances",
    "gru": "a GRU",
}


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Train, measure and write; return the rows of the table."""
    parser = study.parser(__doc__, "out/chorales")
    parser.add_argument("--data", type=Path, help="an archive with .mxl files in corpus/bach, such as music21's wheel")
    given = parser.parse_args(arguments)
    settings = QUICK if given.quick else Settings()
    given.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    parts = chorales.split(chorales.load(given.data), settings.test, settings.validation)
    test = parts["test"]
    runs = {
        name: [run_of(name, seed, settings, parts["train"], given.out) for seed in settings.seeds] for name in PEERS
    }
    trained = [run for own in runs.values() for run in own]
    study.train_all(trained, console)

    rows = []
    for name, own in runs.items():
        found = {str(run.seed): [bits(run.module, chorale) for chorale in test] for run in own}
        parameters = sum(part.numel() for part in own[0].module.parameters())
        rows.append(row_of(PEERS[name], found, test, parameters=parameters))
    for name, back in markov.CONTEXTS.items():
        order, found = markov.best(parts, settings.keys, back)
        rows.append(row_of(f"Markov chain of order {order}, {name}", {"-": [found.reshape(-1, len(VOICES))]}, test))
    player, shown = runs["relative"][0].module, max(test, key=lambda own: own.num_notes / len(own))
    begun = until(shown, 16 + int((shown.beat == 0).argmax()))
    played = goes_on(player, begun, 64, models.Sampler(temperature=0.8))
    midi, data = given.out / "goes-on.mid", as_midi(played.pitch, played.starts)
    study.write_whole(midi, lambda beside: beside.write_bytes(data))
    # A bass note in the middle of a bar, some bars in.
    steps = np.flatnonzero(shown.starts[:, 3] & (shown.pitch[:, 3] > 0) & (shown.beat == 4))
    note = int(steps[min(2, len(steps) - 1)]), VOICES.index("Bass")
    figure = viz.save(draw(shown, *note, looks(player, shown, *note)), given.out / "looks.png")
    by_distance = distances(player, shown)
    heads = [f"layer {1 + i // settings.num_heads}, head {1 + i % settings.num_heads}" for i in range(len(by_distance))]
    told = f"{shown.name}: how far back heads look, on average; 4, 8, 12: what the same voice did"
    how = {"x_labels": list(map(str, range(1, 1 + by_distance.shape[1]))), "y_labels": heads, "title": told}
    how |= {"x_name": "symbols before; four are an eighth", "y_name": ""}
    profile = viz.save(viz.heatmap(by_distance, **how), given.out / "distances.png")
    title = f"bits per note of {len(test)} chorales with unseen melodies, and of each voice"
    headings = {voice: voice.lower() for voice in VOICES}
    study.finish(
        given.out, title, settings, trained, rows, console=console, form="{:.2f}", lower_is_better=True,
        figures=[figure, profile], **headings,
    )  # fmt: skip
    console.print(f"wrote {midi}: {shown.name}, and how it goes on after two bars")
    return rows


if __name__ == "__main__":
    main()
