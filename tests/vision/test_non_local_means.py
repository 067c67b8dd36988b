"""Non-local means is what its definition says, and denoises photographs as scikit-image does."""

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from skimage.metrics import peak_signal_noise_ratio
from skimage.restoration import denoise_nl_means
from sklearn.datasets import load_sample_images
from torch import Tensor

from saccade import vision

Picture = NDArray[np.float64]
NOISE = 0.1


def _defined(image: Picture, patch: int, radius: int, h: float, sigma: float = 0.0, cutoff: float = np.inf) -> Picture:
    """[channels, H, W], pair by pair, in float64.

    As soon as the rows of a patch differ by more than ``cutoff``, but for the last one, its weight is 0.
    """
    _, height, width = image.shape
    half = patch // 2
    offsets = np.mgrid[-half : half + 1, -half : half + 1]
    bell = np.exp(-(offsets**2).sum(0) / (2 * max((patch - 1) / 4, 1e-9) ** 2))
    bell /= bell.sum()
    padded = np.pad(image, ((0, 0), (half, half), (half, half)), mode="reflect")
    total, weighted = np.zeros((height, width)), np.zeros_like(image)
    for y in range(height):
        for x in range(width):
            own = padded[:, y : y + patch, x : x + patch]
            for v in range(max(0, y - radius), min(height, y + radius + 1)):
                for u in range(max(0, x - radius), min(width, x + radius + 1)):
                    other = padded[:, v : v + patch, u : u + patch]
                    rows = (bell * (((own - other) ** 2).mean(0) - 2 * sigma**2)).sum(1).cumsum() / h**2
                    weight = np.exp(-max(rows[-1], 0.0)) if (rows[:-1] <= cutoff).all() else 0.0
                    total[y, x] += weight
                    weighted[:, y, x] += weight * image[:, v, u]
    return weighted / total


def _photographs() -> list[tuple[Picture, Picture]]:
    """Two crops, clean and noisy, [3, 48, 56]."""
    rng = np.random.default_rng(0)
    clean = [image[100:148, 250:306].transpose(2, 0, 1) / 255.0 for image in load_sample_images().images]
    return [(image, image + NOISE * rng.standard_normal(image.shape)) for image in clean]


@pytest.mark.parametrize("sigma", [0.0, 0.15])
@pytest.mark.parametrize("channels, patch, radius", [(1, 3, 2), (3, 5, 3), (2, 1, 2), (1, 3, 20), (1, 3, 0)])
def test_the_definition(channels: int, patch: int, radius: int, sigma: float) -> None:
    image = np.random.default_rng(channels).random((channels, 9, 11))
    expected = torch.from_numpy(_defined(image, patch, radius, 0.3, sigma))
    out = vision.non_local_means(torch.from_numpy(image), patch, radius, h=0.3, sigma=sigma)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=1e-10)


def test_bands_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    image = torch.rand(2, 3, 23, 17, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = vision.non_local_means(image, 3, 4, h=0.2)
    monkeypatch.setattr(import_module("saccade.vision.non_local_means"), "_BAND", 5)
    torch.testing.assert_close(vision.non_local_means(image, 3, 4, h=0.2), whole)


def test_layouts_are_alike() -> None:
    image = torch.rand(2, 3, 12, 10)
    together = vision.non_local_means(image, 3, 3, h=0.3)
    assert together.shape == image.shape
    for own, alone in zip(together, image, strict=True):
        torch.testing.assert_close(vision.non_local_means(alone, 3, 3, h=0.3), own)
    torch.testing.assert_close(
        vision.non_local_means(image[0, 0], 3, 3, h=0.3), vision.non_local_means(image[0, :1], 3, 3, h=0.3)[0]
    )
    assert vision.non_local_means(image[:0]).shape == (0, 3, 12, 10)


def test_float32_is_precise_far_from_0() -> None:
    image = 0.5 * torch.rand(1, 24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = vision.non_local_means(image, h=0.05)
    out = vision.non_local_means((image + 100).float(), h=0.05) - 100
    torch.testing.assert_close(out.double(), expected, atol=2e-4, rtol=0)


def test_gradients() -> None:
    image = torch.rand(1, 6, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: vision.non_local_means(x, 3, 2, h=0.4), image)
    assert torch.autograd.gradcheck(lambda x: vision.non_local_means(x, 3, 2, h=0.4, sigma=0.05), image)


def _quality(clean: Picture, other: Picture | Tensor) -> float:
    return float(peak_signal_noise_ratio(clean, np.asarray(other), data_range=1.0))


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("grey", [True, False])
def test_photographs_are_denoised_as_by_scikit_image(number: int, grey: bool) -> None:
    clean, noisy = (image.mean(0) if grey else image for image in _photographs()[number])
    options: Any = {"h": 0.6 * NOISE, "sigma": NOISE}
    theirs = denoise_nl_means(
        noisy, 7, 10, fast_mode=False, channel_axis=None if grey else 0, preserve_range=True, **options
    )
    ours = vision.non_local_means(torch.from_numpy(noisy).float(), 7, 10, **options)
    assert abs(_quality(clean, ours) - _quality(clean, theirs)) < 0.1
    assert _quality(clean, ours) > _quality(clean, noisy) + 1.0


def test_scikit_image_differs_by_its_cutoff_alone() -> None:
    noisy = _photographs()[0][1][:, :14, :12]
    theirs = denoise_nl_means(noisy, 5, 4, h=0.08, fast_mode=False, channel_axis=0, preserve_range=True)
    np.testing.assert_allclose(_defined(noisy, 5, 4, 0.08, cutoff=5.0), theirs, atol=0.005)
    every = _defined(noisy, 5, 4, 0.08)
    ours = vision.non_local_means(torch.from_numpy(noisy), 5, 4, h=0.08)
    np.testing.assert_allclose(ours, every, atol=1e-9)
    assert np.abs(every - theirs).max() > 0.01


@pytest.mark.parametrize(
    "image, options, error, match",
    [
        (np.zeros((9, 9)), {}, TypeError, r"non_local_means: image must be a tensor; got ndarray\."),
        (torch.zeros(9, 9, dtype=torch.uint8), {}, TypeError, r"image must be float32 or float64; got uint8"),
        (torch.zeros(9), {}, ValueError, r"image must have shape \[H, W\], \[channels, H, W\]"),
        (torch.full((9, 9), torch.nan), {}, ValueError, r"image must be finite; got NaN or inf"),
        (
            torch.zeros(9, 3),
            {},
            ValueError,
            r"image must have more than 3 rows and columns for patch_size 7; got 9 x 3",
        ),
        (torch.zeros(9, 9), {"patch_size": 4}, ValueError, r"patch_size must be odd, .*; got 4\."),
        (torch.zeros(9, 9), {"patch_size": 0}, ValueError, r"patch_size must be an int of at least 1; got 0\."),
        (torch.zeros(9, 9), {"search_radius": -1}, ValueError, r"search_radius must be an int of at least 0; got -1\."),
        (
            torch.zeros(9, 9),
            {"search_radius": 2.0},
            ValueError,
            r"search_radius must be an int of at least 0; got 2\.0",
        ),
        (torch.zeros(9, 9), {"h": 0.0}, ValueError, r"h must be a finite number above 0; got 0\.0\."),
        (torch.zeros(9, 9), {"h": True}, ValueError, r"h must be a finite number above 0; got True\."),
        (torch.zeros(9, 9), {"sigma": -0.1}, ValueError, r"sigma must be a finite number of at least 0; got -0\.1\."),
        (
            torch.zeros(9, 9),
            {"sigma": float("nan")},
            ValueError,
            r"sigma must be a finite number of at least 0; got nan",
        ),
    ],
)
def test_wrong_arguments_are_refused(image: Any, options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        vision.non_local_means(image, **options)
