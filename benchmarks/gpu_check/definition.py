"""Attention by its definition in float64, with gradients written out by hand: it shares no code with any kernel.

It also says how far rounding could move each number: the root of the sum of the squares of the products that the number
is the sum of. An error is measured in that unit, so a missing key counts as much among 8,191 keys as among 63.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["LIMITS", "Problem", "Truth", "truth", "worst"]

LIMITS = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-4}
"""The largest error that is rounding, in the unit above: a few dozen roundings of the dtype."""
_FLOOR = 0.1  # a row smaller than a tenth of the usual size is judged as if it were that large
_MOST_CELLS = {"cuda": 1 << 26, "cpu": 1 << 21}  # of a tensor of scores: rows are taken in groups


@dataclasses.dataclass(frozen=True)
class Problem:
    """Tensors of one attention, and the options that change its scores.

    Attributes:
        query, key, value: ``[1, heads, length, width]``; fewer heads of keys.
        grad: upstream gradient of the output.
        allowed: which pairs count, from indices of queries ``[rows, 1]`` and keys ``[1, keys]``.
        softcap: of the scores; None without.
        sink: a logit for each head, ``[heads]``; None without.
        bias: a number for each head and distance, ``[heads, 2 * reach + 1]``, clipped at the reach; None without.
        slopes: of a bias that falls with distance, ``[heads]``; None without.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    allowed: Callable[[Tensor, Tensor], Tensor]
    softcap: float | None = None
    sink: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None


@dataclasses.dataclass
class Truth:
    """Numbers by the definition, and the size that an error of each is measured in; by name."""

    values: dict[str, Tensor]
    sizes: dict[str, Tensor]


def truth(problem: Problem) -> Truth:
    """Return output, lse and gradients of every row."""
    q, k, v, g = (x.detach().double() for x in (problem.query, problem.key, problem.value, problem.grad))
    heads, length, share = q.shape[1], q.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    sums = {name: torch.zeros_like(x) for name, x in (("key", k), ("value", v))}
    squares = {name: torch.zeros_like(x) for name, x in sums.items()}
    for name in ("sink", "bias"):
        x = getattr(problem, name)
        if x is not None:
            sums[name], squares[name] = (torch.zeros_like(x, dtype=torch.float64) for _ in range(2))
    rows: dict[str, list[Tensor]] = {name: [] for name in ("output", "lse", "query", "size output", "size query")}
    step = max(1, _MOST_CELLS[q.device.type] // (heads * k.shape[2]))
    for start in range(0, length, step):
        part = slice(start, start + step)
        _add_rows(problem, (q[:, :, part], k, v, g[:, :, part]), start, rows, sums, squares)
    joined = {name: torch.cat(parts, 2) for name, parts in rows.items()}
    group = lambda x: x.unflatten(1, (-1, share)).sum(2)  # noqa: E731
    values = {"output": joined["output"], "lse": joined["lse"], "gradient of query": joined["query"]}
    sizes = {"output": joined["size output"], "lse": joined["lse"].abs().clamp_min(1.0)}
    sizes["gradient of query"] = joined["size query"].sqrt()
    for name, total in sums.items():
        both = (total, squares[name]) if name in ("sink", "bias") else (group(total), group(squares[name]))
        values[f"gradient of {name}"], sizes[f"gradient of {name}"] = both[0], both[1].sqrt()
    return Truth(values, sizes)


def _add_rows(
    problem: Problem,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    start: int,
    rows: dict[str, list[Tensor]],
    sums: dict[str, Tensor],
    squares: dict[str, Tensor],
) -> None:
    """Add some rows to what has been computed of the others."""
    q, k, v, g = tensors
    scale = q.shape[3] ** -0.5
    places = (
        torch.arange(start, start + q.shape[2], device=q.device)[:, None],
        torch.arange(k.shape[2], device=q.device),
    )
    scores = q @ k.mT * scale
    slope = torch.ones((), dtype=torch.float64, device=q.device)
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
        slope = 1.0 - (scores / problem.softcap).square()
    distance = places[0] - places[1]
    if problem.slopes is not None:
        scores = scores - problem.slopes.double()[:, None, None] * distance.abs()
    if problem.bias is not None:
        reach = problem.bias.shape[1] // 2
        entry = distance.clamp(-reach, reach) + reach
        scores = scores + problem.bias.detach().double()[:, entry]
    scores = scores.masked_fill(~problem.allowed(*places), -torch.inf)
    lse = scores.logsumexp(-1)
    if problem.sink is not None:
        sink = problem.sink.detach().double()[:, None]
        lse = torch.logaddexp(lse, sink)
    weights = (scores - lse[..., None]).exp()
    out = weights @ v
    of_weights, taken = g @ v.mT, (g * out).sum(-1, keepdim=True)
    of_scores = weights * (of_weights - taken)
    moved = (weights * (of_weights.abs() + taken.abs())).square()
    rows["output"].append(out)
    rows["lse"].append(lse)
    rows["size output"].append((weights.square() @ v.square()).sqrt() + out.abs())
    if problem.sink is not None:
        share = (sink - lse).exp() * taken[..., 0]
        sums["sink"] -= share.sum((0, 2))
        squares["sink"] += share.square().sum((0, 2))
    if problem.bias is not None:
        sums["bias"] += _by_distance(of_scores[0], distance, reach)
        squares["bias"] += _by_distance(moved[0], distance, reach)
    of_scores, moved = of_scores * slope * scale, moved * (slope * scale).square()
    rows["query"].append(of_scores @ k)
    rows["size query"].append(moved @ k.square())
    sums["key"] += of_scores.mT @ q
    squares["key"] += moved.mT @ q.square()
    sums["value"] += weights.mT @ g
    squares["value"] += weights.square().mT @ g.square()


def _by_distance(x: Tensor, distance: Tensor, reach: int) -> Tensor:
    """Return sums of ``[heads, rows, keys]`` over the pairs at each distance, clipped at the reach."""
    near = torch.arange(1 - reach, reach, device=x.device)
    column = distance[:, :1] - near  # of the key at that distance: the first key is at 0
    inside = (column >= 0) & (column < x.shape[2])
    index = column.clamp(0, x.shape[2] - 1).expand(len(x), -1, -1)
    sums = torch.where(inside, x.gather(2, index), 0.0).sum(1)
    ends = [torch.where(beyond, x, 0.0).sum((1, 2))[:, None] for beyond in (distance <= -reach, distance >= reach)]
    return torch.cat([ends[0], sums, ends[1]], 1)


def worst(got: Tensor, name: str, its: Truth) -> tuple[float, str]:
    """Return the largest error of a quantity in its unit, infinity where a number is not finite, and its place."""
    want, size = its.values[name], its.sizes[name]
    got = got.detach().double()
    if name in ("lse", "gradient of sink", "gradient of bias"):  # numbers of their own, not rows
        want, size, got = want[..., None], size[..., None], got[..., None]
    missed, sizes = (got - want).norm(dim=-1), size.norm(dim=-1)
    floor = _FLOOR * sizes.square().mean().sqrt()
    errors = torch.where(missed == 0.0, 0.0, missed / (sizes + floor))
    errors = torch.where(errors.isnan(), torch.inf, errors)
    place = [int(x) for x in torch.unravel_index(errors.argmax(), errors.shape)]
    row = place[-1] if errors.dim() > 1 else None
    where = f"head {place[-2] if row is not None else place[-1]}" + ("" if row is None else f", row {row}")
    return float(errors.max()), where
