"""Denoise two photographs by non-local means as attention between patches, in about half a minute.

    python examples/denoise_photographs.py

adds noise to crops of scikit-learn's two sample photographs, denoises them, prints the peak signal-to-noise ratios, and
writes ``out/denoise/*.png``: each photograph as it was, noisy, and denoised, side by side.

Needs ``pip install 'saccade-attention[viz]' scikit-learn rich``.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_sample_images
from torch import Tensor

from saccade import vision
from saccade.viz.fonts import covering_families

CROPS = {"china": (slice(20, 276), slice(150, 470)), "flower": (slice(100, 356), slice(130, 450))}
NOISE = 0.1
TITLES = {
    "en": ("as it was", "noisy, {:.1f} dB", "denoised, {:.1f} dB", "with sigma, {:.1f} dB"),
    "zh": ("原图", "加噪声，{:.1f} dB", "去噪，{:.1f} dB", "已知 sigma，{:.1f} dB"),
}


def photographs() -> dict[str, Tensor]:
    """Return crops of 256 x 320 pixels, ``[3, H, W]`` in 0..1, by name."""
    images = load_sample_images().images
    pairs = zip(CROPS.items(), images, strict=True)
    return {name: torch.from_numpy(image[crop].copy()).permute(2, 0, 1) / 255 for (name, crop), image in pairs}


def quality(clean: Tensor, other: Tensor) -> float:
    """Return the peak signal-to-noise ratio in dB, for images in 0..1."""
    error = float((clean - other).square().mean())
    return -10 * math.log10(error) if error else math.inf


def draw(pictures: dict[str, Tensor], path: Path) -> None:
    """Draw images side by side, each with its name."""
    height, width = next(iter(pictures.values())).shape[1:]
    across = 2.6  # inches of a picture
    figure, axes = plt.subplots(1, len(pictures), figsize=(across * len(pictures), across * height / width + 0.3))
    figure.subplots_adjust(left=0, right=1, bottom=0, top=1 - 0.3 / figure.get_figheight(), wspace=0.02)
    for axis, (name, picture) in zip(axes, pictures.items(), strict=True):
        axis.imshow(picture.clamp(0, 1).permute(1, 2, 0).numpy(), aspect="auto")
        axis.set_title(name, loc="left", size=12, pad=5, family=covering_families(name)[0])
        axis.set_axis_off()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """Denoise, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/denoise"), help="folder for the pictures")
    parser.add_argument("--language", choices=list(TITLES), default="en", help="of the pictures (default: %(default)s)")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    table = Table("photograph", "noisy", "denoised", "with sigma", "seconds", title="PSNR in dB")
    for name, clean in photographs().items():
        noisy = clean + NOISE * torch.randn(clean.shape, generator=generator)
        start = time.perf_counter()
        plain = vision.non_local_means(noisy, h=NOISE)
        taken = time.perf_counter() - start
        robust = vision.non_local_means(noisy, h=0.6 * NOISE, sigma=NOISE)
        table.add_row(name, *(f"{quality(clean, x):.2f}" for x in (noisy, plain, robust)), f"{taken:.1f}")
        titles = zip(TITLES[given.language], (clean, noisy, plain, robust), strict=True)
        draw({title.format(quality(clean, x)): x for title, x in titles}, given.out / f"{name}.png")
    Console().print(table)
    print(f"pictures in {given.out}")


if __name__ == "__main__":
    main()
