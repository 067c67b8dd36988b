"""Non-local means: a classical image denoiser, which is a form of attention between patches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.masks import Neighborhood
from saccade.matrix import attention
from saccade.scores import Gaussian
from saccade.scores.base import Prepared, Score
from saccade.support.errors import describe, type_error, value_error
from saccade.support.numerics import widest_dtype
from saccade.support.validation import check_int, check_number, check_type
from saccade.vision.feature_map import as_map, as_tokens

_BAND = 32  # rows per band: enough that the surrounding rows do not dominate the cost


def non_local_means(
    image: Tensor, patch_size: int = 7, search_radius: int = 10, *, h: float = 0.1, sigma: float = 0.0
) -> Tensor:
    r"""Denoise an image: replace each pixel by the mean of nearby pixels, weighted by the similarity of their patches.

    .. math:: \hat{x}_i = \sum_j \frac{w_{ij}}{\sum_k w_{ik}} x_j, \qquad
              w_{ij} = \exp\left(-\frac{\max(d_{ij}^2 - 2 \sigma^2, 0)}{h^2}\right)

    where j runs over the pixels at most ``search_radius`` rows and columns away, and :math:`d_{ij}^2` is the mean
    squared difference of the patches around i and j over all channels, weighted by a Gaussian around the patch's centre
    (its standard deviation is ``(patch_size - 1) / 4``). This is attention with the score `saccade.scores.Gaussian`
    between patches and the mask `saccade.masks.Neighborhood` over pixels; the values are the pixels. Beyond the
    border, the image is mirrored without repeating the border pixels.

    The parameters have the same meaning as in ``skimage.restoration.denoise_nl_means(fast_mode=False)``, which sets
    weights below about exp(-5) to 0. Here every weight counts, which matters for small ``h`` and ``sigma=0``.

    Args:
        image: ``[H, W]`` (grey), ``[channels, H, W]`` or ``[batch, channels, H, W]``; float32 or float64, with values
            in any range.
        patch_size: number of rows and columns of a patch, odd and at least 1; half of it must be less than H and W.
        search_radius: largest distance to averaged pixels, in rows and columns, at least 0; skimage's
            ``patch_distance``.
        h: scale of differences between patches, above 0, in units of the image; about 0.8 times the standard deviation
            of the noise, or about 0.6 times with ``sigma``.
        sigma: standard deviation of the noise, at least 0; differences explained by noise are not counted.

    Returns:
        The denoised image, with the shape and dtype of ``image``; differentiable.

    Raises:
        TypeError: the image is not a float tensor.
        ValueError: the image has the wrong shape or is smaller than half a patch, or a number is out of range.

    Cost: time O(H · W · (2 · search_radius + 8)² · channels · patch_size²) in matrix products, memory O(W · channels ·
    patch_size²) in addition to the images: only a few rows are processed at a time, and the pixel-by-pixel matrix is
    never stored. With gradients, memory O(H · W · channels · patch_size²).

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> clean = torch.zeros(32, 32)
        >>> clean[:, 16:] = 1.0
        >>> noisy = clean + 0.1 * torch.randn(32, 32, generator=generator)
        >>> denoised = non_local_means(noisy, h=0.08)
        >>> errors = [(x - clean).square().mean().sqrt().item() for x in (noisy, denoised)]
        >>> print("noise {:.3f}, left {:.3f}".format(*errors))
        noise 0.103, left 0.046

    Reference: Buades, Coll & Morel 2005, "A non-local algorithm for image denoising", section 3; with ``sigma``, their
    "Non-local means denoising", Image Processing On Line 2011, section 2.
    """
    if check_int("patch_size", patch_size) % 2 == 0:
        raise value_error("patch_size", "be odd, so that a patch has a centre", patch_size)
    check_int("search_radius", search_radius, 0)
    check_number("h", h, above=0)
    check_number("sigma", sigma, least=0)
    images = _as_batch(image, patch_size)
    if 0 in images.shape:
        return image.clone()
    # Only differences between patches matter: subtract the mean to make their squares more accurate.
    mean = images.mean((1, 2, 3), keepdim=True)
    bands = _bands(images - mean, patch_size, search_radius)
    denoised = [_denoise(band, patch_size, search_radius, h, sigma) for band in bands]
    return (torch.cat(denoised, 2) + mean).reshape(image.shape)


class _Band(NamedTuple):
    """A band of adjacent image rows that non-local means denoises together, with the rows around them.

    Attributes:
        padded: ``[batch, channels, rows, W]``: the rows to denoise, the other rows within the search radius, and half a
            patch around all of them.
        first: index of the first row among those within the search radius.
        rows: number of rows to denoise.
    """

    padded: Tensor
    first: int
    rows: int


def _bands(images: Tensor, patch_size: int, search_radius: int) -> Iterator[_Band]:
    height, half = images.shape[2], patch_size // 2
    padded = F.pad(images, (half,) * 4, mode="reflect")
    for start in range(0, height, _BAND):
        stop = min(start + _BAND, height)
        top, bottom = max(start - search_radius, 0), min(stop + search_radius, height)
        yield _Band(padded[:, :, top : bottom + 2 * half], start - top, stop - start)


def _denoise(band: _Band, patch_size: int, search_radius: int, h: float, sigma: float) -> Tensor:
    """Denoise the rows of one band by non-local means: ``[batch, channels, rows, W]``."""
    half = patch_size // 2
    height, width = (size - 2 * half for size in band.padded.shape[2:])
    patches = F.unfold(band.padded, patch_size).mT[:, None] * _weights(band.padded, patch_size, h)
    pixels = as_tokens(band.padded[:, :, half : half + height, half : half + width])
    queries = slice(band.first * width, (band.first + band.rows) * width)
    score = Gaussian() if sigma == 0.0 else _ThresholdedGaussian(2 * (sigma / h) ** 2)
    out = attention(
        patches[:, :, queries],
        patches,
        pixels,
        Neighborhood(height, width, search_radius),
        score=score,
        q_positions=range(queries.start, queries.stop),
        kv_positions=range(height * width),
    )
    return as_map(out, band.rows, width)


def _weights(like: Tensor, patch_size: int, h: float) -> Tensor:
    """Return the factors that scale a patch's pixels in non-local means, ``[channels * patch_size ** 2]``.

    The weight between two patches is exp(-d²/2), where d is the distance between the scaled patches.
    """
    channels, deviation = like.shape[1], (patch_size - 1) / 4
    if patch_size == 1:
        return like.new_full((channels,), math.sqrt(2 / channels) / h)
    offsets = torch.arange(patch_size, dtype=widest_dtype(like.device), device=like.device) - patch_size // 2
    bell = torch.exp(-offsets.square() / (2 * deviation**2))
    bell = (bell[:, None] * bell).flatten()
    shares = (bell / (channels * bell.sum())).repeat(channels)
    return ((2 * shares).sqrt() / h).to(like.dtype)


class _ThresholdedGaussian(Score):
    """The score of non-local means with ``sigma``: it ignores the part of a patch distance that noise explains.

    The score is ``-max(d² / 2 - threshold, 0)``, where d is the distance between query and key.
    """

    def __init__(self, threshold: float):
        super().__init__()
        self.threshold = threshold

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        nearness = Gaussian().prepare(query, key)
        return Prepared(nearness.query, nearness.key, _at_most_0, (nearness.query.new_tensor(self.threshold),))


def _at_most_0(q: Tensor, k: Tensor, threshold: Tensor) -> Tensor:
    return (q @ k.mT + threshold).clamp(max=0.0)


def _as_batch(image: Tensor, patch_size: int) -> Tensor:
    """Check the image to denoise, and reshape it to ``[batch, channels, H, W]``."""
    hint = "torch.from_numpy(array); for an image [H, W, channels], .permute(2, 0, 1) puts channels first"
    check_type("image", image, Tensor, "be a tensor", hint=hint)
    if image.dtype not in (torch.float32, torch.float64):
        got = str(image.dtype).removeprefix("torch.")
        raise type_error("image", "be float32 or float64", got, hint="image.float() / 255 for bytes")
    if image.dim() not in (2, 3, 4):
        rule = "have shape [H, W], [channels, H, W] or [batch, channels, H, W]"
        raise value_error("image", rule, list(image.shape))
    if not bool(torch.isfinite(image.detach()).all()):
        raise value_error("image", "be finite", "NaN or inf", facts=[describe("image", image)])
    if 0 not in image.shape and min(image.shape[-2:]) <= patch_size // 2:
        rule = f"have more than {patch_size // 2} rows and columns for patch_size {patch_size}"
        got = f"{image.shape[-2]} x {image.shape[-1]}"
        raise value_error("image", rule, got, hint="the image is mirrored at its borders")
    return image.reshape((1,) * (4 - image.dim()) + image.shape)
