"""Digits said one after another, by eSpeak's voices; and what of a sound an ear hears: how loud it is at each pitch.

espeak-ng has the licence GPL-3; what it says is kept on this machine, and never shipped.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

import fetching
import study

RATE = 11025  # samples a second; espeak-ng's own are twice as many
LANGUAGES = ("en-us", "de", "cmn")


class Speakers(NamedTuple):
    """Who speaks in one part of the data, and how: espeak-ng's variants, speeds and pitches ``(lowest, highest)``."""

    variants: tuple[str, ...]
    speeds: tuple[tuple[int, int], ...]
    pitches: tuple[tuple[int, int], ...]


# Variants of one speaker, such as iven and iven2, are all on one side. Robots and whispers are on none.
SPEAKERS = {
    "train": Speakers(
        (
            *("m1", "m2", "m4", "m6", "f1", "f2", "f4", "adam", "Alex", "Andrea", "Andy", "anika", "belinda", "boris"),
            *("caleb", "david", "Diogo", "edward", "gustave", "Henrique", "iven", "iven3", "Jacky", "kaukovalta"),
            *("Lee", "linda", "Marco", "michel", "norbert", "pablo", "paul", "quincy", "robert", "steph", "travis"),
        ),
        ((120, 200),),
        ((30, 70),),
    ),
    # To choose settings by.
    "validation": Speakers(("m7", "f5", "Alicia", "antonio", "Hugo", "sandro"), ((201, 230),), ((10, 29), (71, 90))),
    # To measure with, once.
    "test": Speakers(
        (
            *("m3", "m5", "m8", "f3", "Annie", "aunty", "benjamin", "Denis", "ed", "Gene", "grandpa", "john"),
            *("marcelo", "Mario", "max", "Michael", "Mike", "miguel", "pedro", "rob", "shelby", "victor", "zac"),
        ),
        ((201, 230),),
        ((10, 29), (71, 90)),
    ),
}
"""Nobody who is heard in testing was heard in training, in any language, nor anybody as fast, as high or as low."""


class Utterances(NamedTuple):
    """Sounds, ``int16 [samples]`` each, what is said in them, and by whom."""

    waves: list[Tensor]
    digits: list[str]
    voices: list[str]


class Request(NamedTuple):
    """What espeak-ng is asked to say."""

    digits: str
    voice: str
    speed: int
    pitch: int


def requests(part: str, count: int) -> list[Request]:
    """Three to five digits, in any language by anyone of a part, at any of its speeds and pitches."""
    rng, speakers = np.random.default_rng([*part.encode()]), SPEAKERS[part]
    wanted = []
    for _ in range(count):
        digits = "".join(map(str, rng.integers(10, size=rng.integers(3, 6))))
        voice = f"{rng.choice(LANGUAGES)}+{rng.choice(speakers.variants)}"
        speed, pitch = (
            int(rng.integers(low, high + 1))
            for low, high in (ranges[rng.integers(len(ranges))] for ranges in (speakers.speeds, speakers.pitches))
        )
        wanted.append(Request(digits, voice, speed, pitch))
    return wanted


def spoken(counts: dict[str, int], folder: Path = fetching.FOLDER) -> dict[str, Utterances]:
    """So many utterances of each part, said by espeak-ng where they are not kept in the folder yet.

    Raises:
        SystemExit: espeak-ng is not installed, or has not all of the voices.
    """
    wanted = {part: requests(part, count) for part, count in counts.items()}
    key = hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:16]
    path = folder / f"spoken-digits-{key}.safetensors"
    if not path.exists():
        _check_voices()
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor() as pool:
            said = {
                part: Utterances(list(pool.map(say, own)), [r.digits for r in own], [r.voice for r in own])
                for part, own in wanted.items()
            }
        keep(path, said)
    return kept(path)


def _check_voices() -> None:
    if shutil.which("espeak-ng") is None:
        raise SystemExit("espeak-ng says the digits: apt-get install espeak-ng (on macOS: brew install espeak-ng)")
    listed = subprocess.run(["espeak-ng", "--voices=variant"], capture_output=True, text=True, check=True).stdout
    known = {line.rpartition("!v/")[2].strip() for line in listed.splitlines()}
    missing = {name for speakers in SPEAKERS.values() for name in speakers.variants} - known
    if missing:
        raise SystemExit(f"this espeak-ng lacks the voices {', '.join(sorted(missing))}; version 1.51 has them")


def say(request: Request) -> Tensor:
    """What espeak-ng says, ``int16 [samples]``; the same each time."""
    words = " ".join(request.digits)
    how = ["-v", request.voice, "-s", str(request.speed), "-p", str(request.pitch), "--stdout"]
    sound = subprocess.run(["espeak-ng", *how, words], capture_output=True, check=True).stdout
    with wave.open(io.BytesIO(sound)) as file:
        samples = np.frombuffer(sound[44:], np.int16)  # to a pipe, its header does not know the length
        return at_rate(torch.from_numpy(samples.copy()), file.getframerate())


def at_rate(samples: Tensor, rate: int) -> Tensor:
    """Sound of another rate, without the frequencies that `RATE` cannot hold."""
    count = round(len(samples) * RATE / rate)
    spectrum = torch.fft.rfft(samples.double())[: count // 2 + 1]
    return (torch.fft.irfft(spectrum, count) * count / len(samples)).round().clamp(-32768, 32767).short()


def keep(path: Path, parts: dict[str, Utterances]) -> None:
    """Write all parts to one file."""
    tensors = {f"{part}.{i}": wave for part, own in parts.items() for i, wave in enumerate(own.waves)}
    told = {part: json.dumps([own.digits, own.voices]) for part, own in parts.items()}
    study.write_whole(path, lambda beside: save_file(tensors, beside, metadata=told))


def kept(path: Path) -> dict[str, Utterances]:
    """Read what `keep` wrote."""
    from safetensors import safe_open  # noqa: PLC0415

    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        told = {part: json.loads(own) for part, own in file.metadata().items()}
    return {
        part: Utterances([tensors[f"{part}.{i}"] for i in range(len(digits))], digits, voices)
        for part, (digits, voices) in told.items()
    }


# --- what an ear hears ------------------------------------------------------------------------------------------------

WINDOW, HOP, BANDS = 256, 110, 40  # samples, samples, rows of a spectrogram: 23 ms every 10 ms
LOWEST, HIGHEST = 60.0, 5500.0  # Hz


def mel(hertz: Tensor | float) -> Tensor:
    """How high a frequency sounds; equal steps sound equal (O'Shaughnessy 1987)."""
    return 2595 * torch.log10(1 + torch.as_tensor(hertz, dtype=torch.float64) / 700)


def band_edges() -> Tensor:
    """Where each band begins, the ones after it peak, and the last ends, in Hz: ``[BANDS + 2]``, equally far in mel."""
    steps = torch.linspace(float(mel(LOWEST)), float(mel(HIGHEST)), BANDS + 2, dtype=torch.float64)
    return 700 * (10 ** (steps / 2595) - 1)


def filters() -> Tensor:
    """How much each band hears of each frequency of a window, in triangles: ``[WINDOW // 2 + 1, BANDS]``."""
    edges, bins = band_edges(), torch.arange(WINDOW // 2 + 1, dtype=torch.float64)[:, None] * RATE / WINDOW
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return torch.minimum(rising, falling).clamp(min=0).float()


def spectrogram(waves: Tensor) -> Tensor:
    """The logarithm of the power in each band: ``[batch, samples]`` to ``[batch, samples // HOP + 1, BANDS]``."""
    found = torch.stft(waves, WINDOW, HOP, window=torch.hann_window(WINDOW), return_complex=True, pad_mode="constant")
    power = found.real.square() + found.imag.square()
    return (power.mT @ filters()).clamp(min=1e-6).log()


def heard(
    utterances: Utterances, chosen: np.ndarray, decibels: np.ndarray, rng: np.random.Generator, stretch: float = 1.0
) -> tuple[Tensor, list[int]]:
    """Spectrograms of some utterances, in white noise that much fainter than they are.

    Args:
        utterances: all.
        chosen: which.
        decibels: how much louder each is than its noise.
        rng: of the noise, and of how fast each is played.
        stretch: each is played up to so many times as fast or as slow, and so as high or as low.

    Returns:
        ``[batch, len, BANDS]``, and how many of its rows each has.
    """
    played = [utterances.waves[i].float() for i in chosen]
    if stretch != 1.0:
        factors = stretch ** rng.uniform(-1, 1, len(chosen))
        played = [
            F.interpolate(own[None, None], scale_factor=f, mode="linear")[0, 0]
            for own, f in zip(played, factors, strict=True)
        ]
    lengths = [len(own) for own in played]
    waves = torch.zeros(len(chosen), max(lengths))
    for row, own in zip(waves, played, strict=True):
        row[: len(own)] = own / own.square().mean().sqrt().clamp(min=1)
    noise = torch.randn(waves.shape, generator=torch.Generator().manual_seed(int(rng.integers(2**31))))
    found = spectrogram(waves + noise * torch.from_numpy(10 ** (-decibels / 20)).float()[:, None])
    frames = [length // HOP + 1 for length in lengths]
    # How loud a whole utterance is says nothing.
    real = (torch.arange(found.shape[1]) < torch.tensor(frames)[:, None])[..., None]
    mean = (found * real).sum((1, 2)) / (real.sum((1, 2)) * BANDS)
    return found - mean[:, None, None], frames
