"""Captions of scenes: a decoder with cross-attention to the image writes a sentence, greedily or with beams.

    python examples/caption_scenes.py

composes scenes of scikit-learn's digits (``scenes.py``); convolutions make a map of 6x6 tokens of each, and a decoder
with cross-attention to them writes "top left dark seven, bottom left light three". Baselines are the same convolutions,
whose whole map starts a recurrent network (GRU). Three seeds; prints the share of held-out scenes that get their
sentence right to the last word, with beams and greedily, against a nearest neighbour that gets the position and ink of
every digit; and draws what each word attends to. The decoder with attention writes 97 of 100 sentences right, the
recurrent network 96; beams change nothing as a scene has one right sentence. Interrupted runs resume.

Needs ``pip install 'saccade-attention[all]' scikit-learn``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

import scenes
import sheets
import study
from read_numbers import ConditionedDecoder
from saccade import masks, models, nn, positions, viz


@dataclasses.dataclass(frozen=True)
class Settings(study.Settings):
    """The settings of a run."""

    steps: int = 2000
    batch_size: int = 32
    embed_dim: int = 64
    num_heads: int = 4
    num_decoder_layers: int = 2
    channels: int = 32
    peer_dim: int = 128
    beams: int = 4
    test_scenes: int = 1000


QUICK = Settings(
    steps=6, batch_size=4, warm_up=2, embed_dim=16, channels=8, peer_dim=16, beams=2, test_scenes=8, seeds=(0,)
)


class Captioner(torch.nn.Module):
    """A Vision Transformer that encodes a scene, and a decoder that writes its caption."""

    def __init__(self, settings: Settings):
        super().__init__()
        width, heads = settings.embed_dim, settings.num_heads
        self.see = scenes.Cells(settings.channels, width, heads)
        self.embedding = torch.nn.Embedding(len(scenes.TOKENS), width)
        self.token_position = positions.Learned(scenes.LONGEST, width)
        for table in (self.embedding, self.token_position):
            torch.nn.init.normal_(table.weight, std=0.5)

        def layer() -> nn.DecoderLayer:
            own = nn.MultiHeadAttention(width, heads, mask=masks.Causal())
            across = nn.MultiHeadAttention(width, heads)
            return nn.DecoderLayer(own, nn.FeedForward(width, 2 * width), cross_attention=across)

        layers = [layer() for _ in range(settings.num_decoder_layers)]
        self.decoder = nn.DecoderStack(layers, final_norm=torch.nn.LayerNorm(width))
        self.tell = torch.nn.Linear(width, len(scenes.TOKENS))

    def embed(self, tokens: Tensor, where: range | Tensor) -> Tensor:
        """Return the embeddings of tokens with their positions."""
        return self.embedding(tokens) + self.token_position(where)

    def given(self, images: Tensor) -> ConditionedDecoder:
        """Encode scenes once; return a language model of their captions."""
        return ConditionedDecoder(self, self.see(images))


class Recurrent(torch.nn.Module):
    """A baseline without attention: a CNN's output is the first state of a GRU (Vinyals et al. 2015)."""

    def __init__(self, settings: Settings):
        super().__init__()
        width = settings.peer_dim
        features = torch.nn.Linear(36 * settings.channels, 2 * width)
        self.see = torch.nn.Sequential(scenes.Seer(settings.channels), torch.nn.Flatten(), features)
        self.embedding = torch.nn.Embedding(len(scenes.TOKENS), width)
        self.read = torch.nn.GRU(width, width, num_layers=2, batch_first=True)
        self.tell = torch.nn.Linear(width, len(scenes.TOKENS))

    def given(self, images: Tensor) -> torch.nn.Module:
        """Encode scenes once, as `Captioner.given`; the model reads the whole sentence for every word."""
        return Started(self, self.see(images).unflatten(1, (2, -1)).transpose(0, 1))


class Started(torch.nn.Module):
    """A `Recurrent` with encoded scenes: a language model without a cache."""

    def __init__(self, recurrent: Recurrent, state: Tensor):
        super().__init__()
        self.recurrent, self.state = recurrent, state

    def forward(self, tokens: Tensor, *, positions: object = None) -> Tensor:
        """Return logits ``[batch, len, words]`` of the next token."""
        state = self.state.expand(-1, len(tokens), -1)
        hidden, _ = self.recurrent.read(self.recurrent.embedding(tokens), state.contiguous())
        return self.recurrent.tell(hidden)


MODELS = {
    "look": ("a decoder that looks", Captioner),
    "gru": ("convolutions and a GRU", Recurrent),
}


def run_of(name: str, seed: int, settings: Settings, digits: scenes.Digits, out: Path) -> study.Run:
    """Return one seed of one model."""

    def loss(module: Any, rng: np.random.Generator) -> Tensor:
        drawn = scenes.drawn(digits, settings.batch_size, rng)
        tokens = scenes.padded(drawn.sentences())
        logits = module.given(drawn.images)(tokens[:, :-1].clamp(min=0))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=-1)

    return study.Run(name, seed, lambda: MODELS[name][1](settings), loss, settings, out)


@torch.no_grad()
def write(module: Any, images: Tensor, beams: int) -> list[list[int]]:
    """Return the likeliest sentence of a beam search for each scene; one beam is greedy."""
    found = []
    # Beams reorder a cache together with its image; a model without one needs one image at a time.
    for part in images.split(1 if beams > 1 and isinstance(module, Recurrent) else 250):
        start = [[scenes.START]] * len(part)
        if beams == 1:
            found += models.generate(module.given(part), start, scenes.LONGEST, stop=scenes.END)
        else:
            how = {"beams": beams, "length_penalty": 0.0, "stop": scenes.END}
            searched = models.beam_search(module.given(part), start, scenes.LONGEST, **how)
            found += [own[0].tokens for own in searched]
    return found


def are_right(written: list[list[int]], drawn: scenes.Scenes) -> np.ndarray:
    """Return whether each sentence is entirely right: bool ``[n]``."""
    return np.array([own == wanted[1:-1] for own, wanted in zip(written, drawn.sentences(), strict=True)])


def told_where(train: scenes.Digits, test: scenes.Digits, drawn: scenes.Scenes) -> np.ndarray:
    """Return whether a nearest neighbour that gets every digit cut out reads all of a scene: bool ``[n]``."""
    from sklearn.neighbors import KNeighborsClassifier  # noqa: PLC0415  a second of import that --help need not wait for

    near = KNeighborsClassifier(1).fit(train.flat(), train.labels)
    is_right = np.append(near.predict(test.flat()) == test.labels, True)
    return is_right[drawn.which.numpy()].all(1)


def summarise(who: str, by_seed: dict[str, np.ndarray], drawn: scenes.Scenes, **others: float) -> dict[str, Any]:
    """Return one row: the share of right sentences, over seeds and by number of digits."""
    counts = (drawn.things != scenes.NOTHING).sum(1).numpy()
    every = np.mean(list(by_seed.values()), 0)
    shares = {f"of {size}": float(every[counts == size].mean()) for size in (2, 3, 4) if (counts == size).any()}
    return study.summary(who, {seed: float(own.mean()) for seed, own in by_seed.items()}, **others, **shares)


@torch.no_grad()
def draw(module: Captioner, image: Tensor) -> Any:
    """Draw which cells each word attends to (mean of the heads of the last layer)."""
    words = write(module, image[None], 1)[0][: scenes.LONGEST - 1]
    tokens = torch.tensor([[scenes.START, *words]])
    given = module.given(image[None])
    across = module.decoder.cross_matrices(module.embed(tokens, range(tokens.shape[1])), given.context)
    # Row i of a matrix belongs to token i, which predicts the next word.
    weights = across[-1].to_dense()[0].mean(0).unflatten(-1, (6, 6))
    names = [scenes.TOKENS[word] for word in words] + ["<end>"]
    panels = [
        sheets.panel(image, own, name, limits=(0.0, float(weights.max())))
        for own, name in zip(weights, names, strict=True)
    ]
    title = f"What each word looks at (mean of all heads, last layer): {scenes.as_text(words)}"
    return sheets.sheet([panels[first : first + 4] for first in range(0, len(panels), 4)], title=title)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Train, measure and write; return the rows of the table."""
    parser = study.parser(__doc__, "out/caption-scenes")
    parser.add_argument("--scene", type=int, default=0, help="the test scene of the figure (default: %(default)s)")
    given = parser.parse_args(arguments)
    settings = QUICK if given.quick else Settings()
    if not 0 <= given.scene < settings.test_scenes:
        parser.error(f"--scene must be at least 0 and below {settings.test_scenes}; got {given.scene}.")
    given.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    train, test = scenes.load()
    drawn = scenes.drawn(test, settings.test_scenes, np.random.default_rng(0), held_out=True)
    runs = {name: [run_of(name, seed, settings, train, given.out) for seed in settings.seeds] for name in MODELS}
    trained = [run for own in runs.values() for run in own]
    study.train_all(trained, console)
    rows = []
    for name, own in runs.items():
        searched, greedy = (
            {str(run.seed): are_right(write(run.module, drawn.images, beams), drawn) for run in own}
            for beams in (settings.beams, 1)
        )
        rows.append(summarise(MODELS[name][0], searched, drawn, greedy=float(np.mean(list(greedy.values())))))
    who = "nearest neighbour, told where"
    rows.append(summarise(who, {"-": told_where(train, test, drawn)}, drawn, knows_more=True))
    figure = viz.save(draw(runs["look"][0].module, drawn.images[given.scene]), given.out / "looks.png")
    title = f"sentences with every word right, {settings.beams} beams, {settings.test_scenes:,} held-out scenes"
    columns = {"greedy": "greedy"} | {f"of {size}": f"{size} digits" for size in (2, 3, 4)}
    study.finish(given.out, title, settings, trained, rows, console=console, figures=[figure], **columns)
    return rows


if __name__ == "__main__":
    main()
