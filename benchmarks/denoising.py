"""Time, memory and quality of non-local means as attention beside scikit-image's."""

import functools
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from skimage.metrics import peak_signal_noise_ratio
from skimage.restoration import denoise_nl_means
from sklearn.datasets import load_sample_images

from benchmarks.measuring import Call, Referee, compare
from benchmarks.memory import Job, extra_bytes
from benchmarks.reporting import Row, ratio_row
from saccade import vision

SIDE, NOISE, PATCH, RADIUS = 192, 0.1, 7, 10
TITLE = f"non-local means of a colour photograph, {SIDE} x {SIDE}, patches of {PATCH}, search radius {RADIUS}"
TITLE_ZH = f"彩色照片的非局部均值，{SIDE} × {SIDE}，图块 {PATCH}，搜索半径 {RADIUS}"
TARGET = 1.0


def photographs(side: int = SIDE) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return two crops of photographs with added noise, (clean, noisy), ``[3, side, side]``."""
    rng = np.random.default_rng(0)
    clean = [
        image[60 : 60 + side, 200 : 200 + side].transpose(2, 0, 1) / 255.0 for image in load_sample_images().images
    ]
    return [(image, image + NOISE * rng.standard_normal(image.shape)) for image in clean]


def ours(noisy: NDArray[np.float64]) -> NDArray[np.float32]:
    """Run this library."""
    return vision.non_local_means(torch.from_numpy(noisy).float(), PATCH, RADIUS, h=NOISE).numpy()


def theirs(noisy: NDArray[np.float64]) -> NDArray[np.float64]:
    """Run scikit-image in its exact mode."""
    return denoise_nl_means(
        noisy.astype(np.float32), PATCH, RADIUS, h=NOISE, fast_mode=False, channel_axis=0, preserve_range=True
    )


def memory_of(side: str, pixels: int = SIDE) -> Call:
    """Return the denoising of one image for `extra_bytes`, after a first run."""
    call = {"ours": ours, "theirs": theirs}[side]
    call(photographs(24)[0][1])
    return functools.partial(call, photographs(pixels)[0][1])


def _quality(number: int, clean: NDArray[np.float64], noisy: NDArray[np.float64]) -> Row:
    before, own, other = (
        float(peak_signal_noise_ratio(clean, picture, data_range=1.0))
        for picture in (noisy, ours(noisy), theirs(noisy))
    )
    text = f"{before:.2f} dB noisy, {own:.2f} denoised, {other:.2f} by scikit-image"
    figures = {"noisy_db": before, "ours_db": own, "theirs_db": other}
    return Row(f"photograph {number}: PSNR", text, "within 0.1 dB", abs(own - other) < 0.1, figures)


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    pictures = photographs()
    for number, (clean, noisy) in enumerate(pictures):
        yield _quality(number, clean, noisy)
    noisy = pictures[0][1]
    pair = compare(functools.partial(ours, noisy), functools.partial(theirs, noisy), rounds=3, referee=referee)
    yield ratio_row("time", pair, peer="scikit-image", target=TARGET)
    own, other = extra_bytes([Job("benchmarks.denoising:memory_of", [side]) for side in ("ours", "theirs")])
    yield Row(
        "memory",
        f"{own / 2**20:.0f} MiB, scikit-image {other / 2**20:.0f} MiB",
        figures={"ours_bytes": own, "theirs_bytes": other},
    )
