"""Recognition of spoken digits in three languages, by local attention, with voices that are not in training.

    python examples/hear_digits.py

espeak-ng says 4,000 utterances of three to five digits each, in English, German and Chinese, with 35 voices.
`models.SignalEncoder` learns to write the digits down: convolutions that shorten a spectrogram, and layers of local
attention, with a loss that needs no alignment (CTC). Baselines are the same with as many more convolutions of as many
parameters instead of the attention, and a line over 0.4 seconds of the spectrogram. The test has 23 other voices, all
of them faster, and lower or higher, than any in training, in white noise. Three seeds, three minutes each; prints how
many utterances are recognized right to the last digit, and draws the attention of the frame of each digit. Interrupted
runs resume.

Attention and convolutions hear equally well here: somewhat more than half of the utterances are right, and the seeds of
either lie around the mean of the other. A linear layer recognizes almost nothing.

Needs ``pip install 'saccade-attention[all]'`` and ``apt-get install espeak-ng``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

import spoken_digits
import study
from saccade import masks, models, viz
from saccade.viz.canvas import GREY, INK, colours
from spoken_digits import BANDS, HOP, RATE, Utterances


@dataclasses.dataclass(frozen=True)
class Settings(study.Settings):
    """The settings of a run."""

    steps: int = 1200
    batch_size: int = 16
    learning_rate: float = 3e-3
    embed_dim: int = 64
    num_heads: int = 4
    num_layers: int = 3
    window: int = 24
    kernel_size: int = 7
    dilations: tuple[int, ...] = (1, 3, 9)
    dropout_p: float = 0.1
    stretch: float = 1.15
    counts: tuple[tuple[str, int], ...] = (("train", 4000), ("validation", 400), ("test", 800))


QUICK = Settings(
    steps=20, batch_size=4, warm_up=2, embed_dim=16, counts=(("train", 40), ("validation", 9), ("test", 9)), seeds=(0,)
)
NOTHING = 10  # the blank of CTC
SHORTER = 4  # rows of a spectrogram in a frame
SNR = (20, 10, 0)  # signal-to-noise ratios in dB: in the test,
SNR_HEARD = (-5.0, 30.0)  # and in training


class Convolutions(torch.nn.Module):
    """A baseline of the same size without attention: seven frames at a distance, then a projection."""

    def __init__(self, width: int, dilations: Sequence[int], dropout_p: float):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in dilations)
        self.near = torch.nn.ModuleList(
            torch.nn.Conv1d(width, width, 7, padding=3 * own, dilation=own) for own in dilations
        )
        self.each = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in dilations)
        self.dropout, self.final_norm = torch.nn.Dropout(dropout_p), torch.nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: masks.Padding | None = None) -> Tensor:
        """Return ``[batch, frames, width]`` of the same shape; padding is hidden."""
        real = is_real([x.shape[1]] * len(x) if mask is None else mask.lengths, x.shape[1])
        for norm, near, each in zip(self.norms, self.near, self.each, strict=True):
            x = x + self.dropout(each(F.gelu(near((norm(x) * real).mT).mT)))
        return self.final_norm(x)


def is_real(lengths: Sequence[int], longest: int) -> Tensor:
    """Return whether each frame is not padding: bool ``[batch, longest, 1]``."""
    return (torch.arange(longest) < torch.tensor(lengths)[:, None])[..., None]


class Listener(torch.nn.Module):
    """A model that predicts for each frame, of four rows of a spectrogram, its digit or none."""

    def __init__(self, name: str, settings: Settings):
        super().__init__()
        width, near = settings.embed_dim, masks.Window(settings.window, settings.window)
        self.encoder = self.line = None
        if name == "line":
            self.line = torch.nn.Conv1d(BANDS, NOTHING + 1, 41, SHORTER, padding=20)
            return
        self.encoder = models.SignalEncoder(
            BANDS, width, settings.num_heads, settings.num_layers, mask=near, strides=(2, 2),
            kernel_size=settings.kernel_size, feed_forward_dim=2 * width, dropout_p=settings.dropout_p,
        )  # fmt: skip
        if name == "convolutions":
            self.encoder.stack = Convolutions(width, settings.dilations, settings.dropout_p)
        self.tell = torch.nn.Linear(width, NOTHING + 1)

    def forward(self, signal: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return logits ``[batch, frames, NOTHING + 1]``."""
        if self.line is not None:
            return self.line((signal * is_real(lengths, signal.shape[1])).mT).mT
        return self.tell(self.encoder(signal, lengths=lengths))


def frames(lengths: Sequence[int]) -> list[int]:
    """Return the number of frames for a number of rows."""
    return [-(-length // SHORTER) for length in lengths]


def written(logits: Tensor) -> tuple[str, list[int]]:
    """Return the digits of ``[frames, NOTHING + 1]`` without repetitions, and the likeliest frame of each."""
    best, said, where = logits.argmax(-1).tolist(), "", []
    for frame, own in enumerate(best):
        if own == NOTHING:
            continue
        if frame == 0 or best[frame - 1] != own:
            said, where = said + str(own), [*where, frame]
        elif logits[frame, own] > logits[where[-1], own]:
            where[-1] = frame
    return said, where


def run_of(name: str, seed: int, settings: Settings, train: Utterances, out: Path) -> study.Run:
    """Return one seed, which gets other noise and other speeds in every step."""
    lengths = np.array([len(wave) for wave in train.waves])

    def loss(module: Listener, rng: np.random.Generator) -> Tensor:
        # Batches of similar lengths, for little padding.
        alike = np.argsort(lengths * rng.uniform(0.8, 1.25, len(lengths)))
        chosen = alike[rng.integers(len(alike) - settings.batch_size + 1) :][: settings.batch_size]
        louder = rng.uniform(*SNR_HEARD, len(chosen))
        signal, rows = spoken_digits.heard(train, chosen, louder, rng, settings.stretch)
        digits = [train.digits[i] for i in chosen]
        likely = module(signal, rows).log_softmax(-1).transpose(0, 1)
        said = torch.tensor([int(digit) for own in digits for digit in own])
        return F.ctc_loss(likely, said, frames(rows), list(map(len, digits)), blank=NOTHING, zero_infinity=True)

    return study.Run(name, seed, lambda: Listener(name, settings), loss, settings, out)


@torch.no_grad()
def right(module: Listener, utterances: Utterances, louder: float) -> float:
    """Return the share of entirely right utterances at a noise level, the same noise for all models."""
    rng, count = np.random.default_rng(0), 0
    for start in range(0, len(utterances.waves), 50):
        chosen = np.arange(start, min(start + 50, len(utterances.waves)))
        signal, rows = spoken_digits.heard(utterances, chosen, np.full(len(chosen), louder), rng)
        for logits, i, length in zip(module(signal, rows), chosen, frames(rows), strict=True):
            count += written(logits[:length])[0] == utterances.digits[i]
    return count / len(utterances.waves)


def row_of(who: str, runs: Sequence[study.Run], utterances: Utterances) -> dict[str, Any]:
    """Return the share of right utterances, over all noise levels and for each."""
    found = {str(run.seed): [right(run.module, utterances, louder) for louder in SNR] for run in runs}
    by_noise = dict(zip(map(str, SNR), np.mean(list(found.values()), 0).tolist(), strict=True))
    parameters = sum(own.numel() for own in runs[0].module.parameters())
    return study.summary(
        who, {seed: float(np.mean(own)) for seed, own in found.items()}, **by_noise, parameters=parameters
    )


@torch.no_grad()
def draw(module: Listener, utterances: Utterances, index: int) -> Any:
    """Draw a spectrogram with the recognized digits, and below it the attention of each digit's frame."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  imported when used
    from matplotlib.figure import Figure  # noqa: PLC0415

    rng = np.random.default_rng(0)
    signal, rows = spoken_digits.heard(utterances, np.array([index]), np.array([20.0]), rng)
    said, where = written(module(signal, rows)[0])
    if not where:  # nothing was recognized: show the attention of the middle frame
        said, where = "–", [frames(rows)[0] // 2]
    looked = module.encoder.matrices(signal)[-1].to_dense()[0].mean(0)[where].numpy()
    allowed = module.encoder.stack.layers[-1].attention.mask.to_dense(looked.shape[1])[0, 0, where].numpy()
    step = HOP / RATE
    page = Figure(figsize=(8, 4.6), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(page)
    above, below = page.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    above.imshow(
        signal[0].T.numpy(), cmap="gray_r", origin="lower", aspect="auto", extent=(0, rows[0] * step, 0, BANDS), vmin=-2
    )
    edges = spoken_digits.band_edges().numpy()
    hertz = [125, 250, 500, 1000, 2000, 4000]
    above.set_yticks(np.interp(hertz, edges[1:-1], np.arange(BANDS) + 0.5), hertz)
    above.set(ylabel="pitch, Hz", ylim=(0, BANDS + 6))
    told = f"{utterances.voices[index]} says {' '.join(utterances.digits[index])}; written, where its frame is:"
    above.set_title(told, loc="left", size=10, color=INK)
    for digit, frame in zip(said, where, strict=True):
        above.axvline((frame + 0.5) * SHORTER * step, color="#de4968", lw=1)
        above.text(
            (frame + 0.5) * SHORTER * step, BANDS + 5, f" {digit}", color="#de4968", size=12, weight="bold", va="top"
        )
        below.axvline((frame + 0.5) * SHORTER * step, color=GREY, lw=0.5)
    shown, out_of_reach = np.where(allowed, looked, np.nan), "" if allowed.all() else "; grey: out of reach"
    across = looked.shape[1] * SHORTER * step
    image = below.imshow(shown, cmap=colours(), aspect="auto", extent=(0, across, len(said), 0), vmin=0)
    below.set_yticks(np.arange(len(said)) + 0.5, list(said))
    below.set(ylabel="digit", xlabel="seconds", xlim=(0, rows[0] * step))
    below.set_title(
        f"what the last layer looks at when it writes the digit, mean of its heads{out_of_reach}",
        loc="left", size=10, color=INK,
    )  # fmt: skip
    page.colorbar(image, ax=below, pad=0.01).outline.set_visible(False)
    return page


PEERS = {
    "attention": "local attention",
    "convolutions": "convolutions instead, as many parameters",
    "line": "a line over 0.4 seconds",
}


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Train, measure and write; return the rows of the table."""
    parser = study.parser(__doc__, "out/hear-digits")
    parser.add_argument("--data", type=Path, help="a file that spoken_digits.keep wrote, instead of espeak-ng")
    parser.add_argument("--utterance", type=int, default=0, help="the one of the figure (default: %(default)s)")
    parser.add_argument("--validate", action="store_true", help="measure with the voices that settings are chosen by")
    given = parser.parse_args(arguments)
    settings = QUICK if given.quick else Settings()
    given.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    parts = spoken_digits.kept(given.data) if given.data else spoken_digits.spoken(dict(settings.counts))
    test = parts["validation" if given.validate else "test"]
    if not 0 <= given.utterance < len(test.waves):
        parser.error(f"--utterance must be at least 0 and below {len(test.waves)}; got {given.utterance}.")
    runs = {
        name: [run_of(name, seed, settings, parts["train"], given.out) for seed in settings.seeds] for name in PEERS
    }
    trained = [run for own in runs.values() for run in own]
    study.train_all(trained, console)
    rows = [row_of(PEERS[name], own, test) for name, own in runs.items()]
    figure = viz.save(draw(runs["attention"][0].module, test, given.utterance), given.out / "looks.png")
    title = f"{len(test.waves)} utterances of unseen speakers with every digit right"
    headings = {str(louder): f"noise {louder} dB down" if louder else "noise as loud" for louder in SNR}
    study.finish(given.out, title, settings, trained, rows, console=console, figures=[figure], **headings)
    return rows


if __name__ == "__main__":
    main()
