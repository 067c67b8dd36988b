"""Measure the effect of rounding on a model: the unit in which differences between equivalent runs are expressed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saccade.fusion.lazy import LazyTensor
from saccade.support.validation import check_int

FACTOR = 4.0
"""Largest allowed difference between correct runs, as a multiple of the effect of a rounding error in every module.

In about 500 pairs of correct runs, the multiple was at most 1.2.
"""
_REPEATS = 24  # repeats of `jitter` before a difference in bfloat16 is reported


def row_differences(a: Tensor, b: Tensor) -> Tensor:
    """Return the largest difference between ``a`` and ``b`` in each row, relative to the root mean square of ``b``.

    Args:
        a, b: rows ``[batch, len, ...]``, with equal shapes.

    Returns:
        float64 ``[batch, len]``, or float32 on MPS. A difference is infinite if only one of the two numbers is NaN, and
        0 if both are the same infinity.
    """
    wide = torch.float32 if b.device.type == "mps" else torch.float64  # MPS has no float64
    a, b = a.detach().to(wide), b.detach().to(wide)
    apart, known = (a - b).abs(), b
    if not bool(apart.isfinite().all()):
        apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, apart.nan_to_num(nan=math.inf, posinf=math.inf))
        known = b[b.isfinite()]
    scale = known.square().mean().sqrt() if known.numel() else torch.ones((), dtype=wide)
    return (apart.flatten(2).amax(-1) if apart.dim() > 2 else apart).div(scale).nan_to_num(nan=0.0, posinf=math.inf)


def relative(a: Tensor, b: Tensor) -> float:
    """Return the largest difference between two tensors of equal shape, relative to the root mean square of ``b``.

    The difference is infinite if only one tensor is NaN at an index.
    """
    return float(row_differences(a.reshape(1, -1), b.reshape(1, -1)).max()) if b.numel() else 0.0


def jitter(
    model: nn.Module,
    run: Callable[[], Tensor],
    repeats: int = 3,
    seed: int = 0,
    tables: float = 0.0,
    weights: float = 0.0,
    base: Tensor | None = None,
) -> float:
    """Measure how much a single rounding error in every module changes a model's outputs.

    Each number returned by a module without submodules is moved up or down by one unit in the last place, at random.
    The largest output change over all repeats is the scale for differences between correct runs.

    Args:
        model: the model. Its hooks, buffers, training flags and random state are left unchanged.
        run: a function that runs the model and returns the outputs.
        repeats: number of repeats.
        seed: seed of the signs.
        tables: relative change of untrained tables, such as sinusoidal positions. If the model runs in a wider dtype
            than the one in which the tables were stored, pass the rounding error of that narrower dtype.
        weights: relative change of parameters with two dimensions or more, drawn for each repeat. If the model rounds
            its weights when it uses them, as under autocast, pass that rounding error.
        base: the result of ``run``, if it is already known.

    Returns:
        The largest change, relative to the root mean square of the outputs.

    Cost: ``repeats`` runs, and one more run without ``base``; memory for a copy of the changed tables and weights.
    """
    draw = torch.Generator().manual_seed(check_int("seed", seed, 0))
    times = check_int("repeats", repeats)
    leaves = [part for part in model.modules() if not any(True for _ in part.children())]
    with restoring_state(model), torch.no_grad():
        base = run() if base is None else base
        handles = []
        stored = [(table, table.detach().clone()) for table in _tables(model)] if tables else []
        matrices = [(one, one.detach().clone()) for one in _rounded_weights(model)] if weights else []

        def change() -> float:
            for matrix, own in matrices:
                matrix.data.copy_(own * (1 + weights * _signs(own, draw)))
            torch.clear_autocast_cache()  # it contains the weights of the previous run
            return relative(run(), base)

        try:
            for leaf in leaves:
                handles.append(leaf.register_forward_hook(lambda module, args, out: _perturbed(out, draw)))
            for table, own in stored:
                table.data.mul_(1 + tables * _signs(own, draw))
            return max(change() for _ in range(times))
        finally:
            for handle in handles:
                handle.remove()
            for table, own in (*stored, *matrices):
                table.data.copy_(own)
            torch.clear_autocast_cache()


def autocast_noise(model: nn.Module, run: Callable[[], Tensor], rows: Tensor, found: float, seed: int) -> float:
    """Return the effect of one rounding in the result of every module, in every weight matrix and in the rows.

    Weights are rounded to bfloat16, because the result of a module may be float32 although autocast ran its products
    in bfloat16. The effect is measured more often if the difference ``found`` is larger than `FACTOR` times the effect:
    in bfloat16, a router may choose another expert in a few rows, which three repeats of `jitter` may not show.

    Args:
        model, run, seed: see `jitter`; autocast is on.
        rows: the result of ``run``.
        found: a difference between two runs, relative to the root mean square of the rows.
    """
    weights = torch.finfo(torch.bfloat16).eps / 2  # the largest relative error of rounding to nearest
    last = relative(rows * (1 + torch.finfo(rows.dtype).eps), rows)
    noise = jitter(model, run, seed=seed, weights=weights, base=rows)
    if found > FACTOR * (noise + last):
        noise = max(noise, jitter(model, run, _REPEATS, seed + 1, weights=weights, base=rows))
    return noise + last


@contextmanager
def restoring_state(model: nn.Module) -> Iterator[None]:
    """Restore a model's buffers and training flags, and the random state, after the block."""
    modes = [(part, part.training) for part in model.modules()]
    buffers = [(part, name, one, _copy(one)) for part in model.modules() for name, one in part._buffers.items()]
    devices = {tensor.device.index for tensor in model.parameters() if tensor.device.type == "cuda"}
    others, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=sorted(index for index in devices if index is not None)):
        try:
            yield
        finally:
            random.setstate(others)
            np.random.set_state(numbers)
            for part, was in modes:
                part.training = was
            for part, name, buffer, contents in buffers:
                if buffer is not None and contents is not None:
                    buffer.data.copy_(contents)
                part._buffers[name] = buffer


def _tables(model: nn.Module) -> list[Tensor]:
    """Return a model's tables: buffers, and frozen parameters of a trainable model, with two dimensions or more."""
    parameters = list(model.parameters())
    frozen = [own for own in parameters if not own.requires_grad] if any(p.requires_grad for p in parameters) else []
    return [own for own in (*frozen, *model.buffers()) if own.is_floating_point() and own.dim() >= 2]


def _rounded_weights(model: nn.Module) -> list[Tensor]:
    """Return the parameters with two dimensions or more that a conversion to bfloat16 changes."""
    return [own for own in model.parameters() if own.dim() >= 2 and own.dtype in (torch.float32, torch.float16)]


def _signs(like: Tensor, draw: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=draw).sign().to(like)


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _perturbed(out: Any, draw: torch.Generator) -> Any:
    """Move each element of a module's result by one unit in the last place, except infinities, NaN and 0."""
    if isinstance(out, Tensor):
        if not out.is_floating_point() or type(out) is LazyTensor:  # weights that are never materialised
            return out
        up = torch.randint(0, 2, out.shape, generator=draw, dtype=torch.bool).to(out.device)
        ends = torch.where(up, math.inf, -math.inf).to(out.dtype)
        return torch.where(out.isfinite() & (out != 0), torch.nextafter(out, ends), out)  # a result of 0 is often exact
    if type(out) in (tuple, list):
        return type(out)(_perturbed(one, draw) for one in out)
    return out
