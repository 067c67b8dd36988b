"""Attention as people write it by hand, drawn at random."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Tensors = dict[str, Tensor]
Step = Callable[[Tensor, Tensors], Tensor]
Products = tuple[Callable[[Tensors], Tensor], Step]


class Draw:
    """The choices of one attention.

    Args:
        seed: of all choices.

    Attributes:
        choices: what was drawn, by name.
    """

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.choices: dict[str, Any] = {}

    def pick(self, name: str, *options: Any) -> Any:
        """Return one of the options."""
        self.choices[name] = self.random.choice(options)
        return self.choices[name]


def random_attention(seed: int) -> tuple[Callable[[Tensors], Tensor], Tensors, dict[str, Any]]:
    """Return a function of tensors, the tensors, and what was drawn."""
    draw = Draw(seed)
    torch.manual_seed(seed)
    batch, heads, n = draw.pick("batch", 1, 2, 3), draw.pick("heads", 1, 2, 4), draw.pick("n", 1, 2, 5, 8)
    m = draw.pick("m", n, n, 2, 3, 9)
    width, value_dim = draw.pick("width", 1, 3, 8), draw.pick("value_dim", 1, 4, 8)
    layout = draw.pick("layout", *_LAYOUTS)
    groups = {"grouped": draw.random.choice((1, 2)) if heads > 1 else 1, "one key head": heads}.get(layout, 1)
    dtype = draw.pick("dtype", torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16)
    sizes = {"batch": batch, "heads": heads, "n": n, "m": m, "groups": groups}
    tensors = {
        "query": torch.randn(batch, heads, n, width, dtype=dtype),
        "key": torch.randn(batch, heads // groups, m, width, dtype=dtype),
        "value": torch.randn(batch, heads // groups, m, value_dim, dtype=dtype),
        "bias": torch.randn(heads, n, m, dtype=dtype),
        "head_scale": torch.rand(heads, 1, 1, dtype=dtype) + 0.5,
        "temperature": torch.rand((), dtype=dtype) + 0.5,
    }
    for x in tensors.values():
        x.requires_grad_()
    product, times_values = _LAYOUTS[layout](draw, **sizes)
    steps = [_scale(draw, width), _softcap(draw), _bias(draw, n, m), _mask(draw, batch, n, m), _soften(draw)]
    if layout == "softmax over rows":
        steps = [steps[0], steps[1], steps[4]]  # biases and masks are for [..., n, m]

    def attend(tensors: Tensors) -> Tensor:
        scores = product(tensors)
        for step in steps:
            scores = step(scores, tensors)
        return times_values(scores, tensors)

    return attend, tensors, draw.choices


def _scale(draw: Draw, width: int) -> Step:
    root = math.sqrt(width)

    def in_place(scores: Tensor, tensors: Tensors) -> Tensor:
        scores /= root
        scores *= 1.5
        return scores

    spellings: dict[str, Step] = {
        "none": lambda s, t: s,
        "times": lambda s, t: s * (1 / root),
        "from the left": lambda s, t: 0.5 * s,
        "over": lambda s, t: torch.div(s, root),
        "in place": in_place,
        "method in place": lambda s, t: s.div_(root),
        "tensor": lambda s, t: s / torch.sqrt(torch.tensor(float(width), dtype=s.dtype)),
        "learned": lambda s, t: t["temperature"] * s,
        "by head": lambda s, t: (s * t["head_scale"]).contiguous(),
        "over learned": lambda s, t: s / t["head_scale"],
    }
    return spellings[draw.pick("scale", *spellings)]


def _softcap(draw: Draw) -> Step:
    spellings: dict[str, Step] = {
        "none": lambda s, t: s,
        "no cap": lambda s, t: s,
        "function": lambda s, t: torch.tanh(s / 2.0) * 2.0,
        "method": lambda s, t: 3 * (s / 3).tanh(),
    }
    return spellings[draw.pick("softcap", *spellings)]


def _bias(draw: Draw, n: int, m: int) -> Step:
    def in_place(scores: Tensor, tensors: Tensors) -> Tensor:
        scores += tensors["bias"][None]
        return scores

    distance = -(torch.arange(n)[:, None] - torch.arange(m)).abs()
    spellings: dict[str, Step] = {
        "none": lambda s, t: s,
        "learned": lambda s, t: t["bias"] + s,
        "in place": in_place,
        "distance": lambda s, t: s.add(0.25 * distance.to(s.dtype)),
        "detached": lambda s, t: torch.add(s, t["bias"].detach()),
        "subtracted": lambda s, t: s - distance.to(s.dtype),
        "with factor": lambda s, t: torch.add(s, t["bias"], alpha=0.5),
        "number": lambda s, t: s + 1e-9,
    }
    return spellings[draw.pick("bias", *spellings)]


def _mask(draw: Draw, batch: int, n: int, m: int) -> Step:
    lengths = torch.randint(1, m + 1, (batch,))
    at_random = torch.rand(batch, 1, n, m) < 0.6
    at_random[..., 0] = True
    patterns = {
        "none": None,
        "causal": torch.ones(1, 1, n, m, dtype=torch.bool).tril(max(0, m - n)),
        "padding": (torch.arange(m) < lengths[:, None])[:, None, None],
        "random": at_random,
    }
    visible = patterns[draw.pick("mask", *patterns)]
    low = draw.pick("low", -math.inf, -6e4 if draw.choices["dtype"] == torch.float16 else -1e9, -1e4)
    if visible is None:
        return lambda s, t: s
    hidden = ~visible

    def in_place(scores: Tensor, tensors: Tensors) -> Tensor:
        scores.masked_fill_(hidden, low)
        return scores

    def by_index(scores: Tensor, tensors: Tensors) -> Tensor:
        scores[hidden.expand(scores.shape)] = low
        return scores

    def lowest(scores: Tensor, tensors: Tensors) -> Tensor:
        return scores + (1.0 - visible.to(scores.dtype)) * torch.finfo(scores.dtype).min

    spellings: dict[str, Step] = {
        "fill": lambda s, t: s.masked_fill(hidden, low),
        "fill in place": in_place,
        "index": by_index,
        "where": lambda s, t: torch.where(visible, s, low),
        "where tensor": lambda s, t: torch.where(visible, s, torch.full([], low, dtype=s.dtype)),
        "where method": lambda s, t: s.where(visible, torch.full_like(s, low)),
        "where hidden": lambda s, t: torch.where(hidden, low, s),
        "added": lambda s, t: s + torch.zeros(visible.shape, dtype=s.dtype).masked_fill(hidden, low),
        "lowest": lowest,
        "twice": lambda s, t: lowest(s, t).masked_fill(hidden, low),
    }
    return spellings[draw.pick("form", *spellings)]


def _soften(draw: Draw) -> Step:
    dim = -2 if draw.choices["layout"] == "softmax over rows" else -1
    softmaxes: dict[str, Callable[[Tensor], Tensor]] = {
        "functional": lambda s: F.softmax(s, dim=dim),
        "torch": lambda s: torch.softmax(s, dim),
        "method": lambda s: s.softmax(s.dim() + dim),
        "module": nn.Softmax(dim=dim),
        "with dtype": lambda s: F.softmax(s, dim, dtype=torch.promote_types(s.dtype, torch.float32)),
        "special": lambda s: torch.special.softmax(s, dim),
    }
    dropouts: dict[str, Callable[[Tensor], Tensor]] = {
        "none": lambda w: w,
        "of evaluation": lambda w: F.dropout(w, p=0.4, training=False),
        "of nothing": lambda w: torch.dropout(w, 0.0, True),
        "module": nn.Dropout(0.3).eval(),
    }
    softmax, dropout = softmaxes[draw.pick("softmax", *softmaxes)], dropouts[draw.pick("dropout", *dropouts)]
    is_wide, is_method = draw.pick("cast", False, True), draw.pick("cast back", False, True)
    is_stable = draw.pick("minus the maximum", False, False, True)

    def soften(scores: Tensor, tensors: Tensors) -> Tensor:
        scores = scores - scores.amax(dim, keepdim=True).detach() if is_stable else scores
        weights = softmax(scores.float() if is_wide and scores.dtype != torch.float64 else scores)
        return dropout(weights.type_as(tensors["value"]) if is_method else weights.to(tensors["value"].dtype))

    return soften


def _heads_first(draw: Draw, **_: int) -> Products:
    spellings: dict[str, Products] = {
        "@": (lambda t: t["query"] @ t["key"].mT, lambda w, t: w @ t["value"]),
        "matmul": (lambda t: torch.matmul(t["query"], t["key"].transpose(-2, -1)), lambda w, t: w.matmul(t["value"])),
        "einsum": (
            lambda t: torch.einsum("zxcv,zxbv->zxcb", t["query"], t["key"]),
            lambda w, t: torch.einsum("bhnm, bhmd -> bhnd", w, t["value"]),
        ),
        "dots": (
            lambda t: torch.einsum("...qd,...kd->...qk", t["query"], t["key"]),
            lambda w, t: torch.einsum("...qk,...kd->...qd", w, t["value"]),
        ),
        "keys first": (
            lambda t: (t["key"] @ t["query"].mT).transpose(-1, -2),
            lambda w, t: (t["value"].mT @ w.mT).mT,
        ),
    }
    return spellings[draw.pick("product", *spellings)]


def _heads_second(draw: Draw, **_: int) -> Products:
    return (
        lambda t: torch.einsum("bihd,bjhd->bhij", t["query"].transpose(1, 2), t["key"].transpose(1, 2)),
        lambda w, t: torch.einsum("bhij,bjhd->bihd", w, t["value"].transpose(1, 2)),
    )


def _softmax_over_rows(draw: Draw, **_: int) -> Products:
    return lambda t: t["key"] @ t["query"].transpose(2, 3), lambda w, t: w.mT @ t["value"]


def _flat(draw: Draw, batch: int, heads: int, n: int, m: int, **_: int) -> Products:
    def flat(x: Tensor) -> Tensor:
        return x.reshape(batch * heads, *x.shape[2:])

    def added(t: Tensors) -> Tensor:
        nothing = torch.empty(batch * heads, n, m, dtype=t["query"].dtype)
        return torch.baddbmm(nothing, flat(t["query"]), flat(t["key"]).mT, beta=0, alpha=0.7)

    def biased(t: Tensors) -> Tensor:
        return torch.baddbmm(t["bias"].repeat(batch, 1, 1), flat(t["query"]), flat(t["key"]).mT, beta=0.5)

    spellings: dict[str, Callable[[Tensors], Tensor]] = {
        "bmm": lambda t: torch.bmm(flat(t["query"]), flat(t["key"]).transpose(1, 2)),
        "baddbmm": added,
        "biased": biased,
    }
    product = spellings[draw.pick("product", *spellings)]
    return (
        lambda t: product(t).view(batch, heads, n, m),
        lambda w, t: torch.bmm(w.reshape(batch * heads, n, m), flat(t["value"])).view(batch, heads, n, -1),
    )


def _grouped(draw: Draw, batch: int, heads: int, n: int, m: int, groups: int) -> Products:
    def split(x: Tensor) -> Tensor:
        return x.view(batch, heads // groups, groups, n, -1)

    def repeated(x: Tensor) -> Tensor:
        return x[:, :, None].expand(-1, -1, groups, -1, -1).reshape(batch, heads, m, -1)

    spellings: dict[str, Products] = {
        "einsum": (
            lambda t: torch.einsum("bkgid,bkjd->bkgij", split(t["query"]), t["key"]).reshape(batch, heads, n, m),
            lambda w, t: torch.einsum(
                "bkgij, bkjd -> bkgid", w.reshape(batch, heads // groups, groups, n, m), t["value"]
            ).reshape(batch, heads, n, -1),
        ),
        "five axes": (
            lambda t: (split(t["query"]) @ t["key"].unsqueeze(2).mT).flatten(1, 2),
            lambda w, t: (w.unflatten(1, (heads // groups, groups)) @ t["value"][:, :, None]).flatten(1, 2),
        ),
        "repeat": (
            lambda t: t["query"] @ t["key"].repeat_interleave(groups, dim=1).transpose(2, 3),
            lambda w, t: w @ torch.repeat_interleave(t["value"], groups, 1),
        ),
        "expand": (lambda t: t["query"] @ repeated(t["key"]).mT, lambda w, t: w @ repeated(t["value"])),
    }
    return spellings[draw.pick("product", *spellings)]


def _one_key_head(draw: Draw, batch: int, heads: int, n: int, m: int, **_: int) -> Products:
    def rows(t: Tensors) -> Tensor:
        return torch.bmm(t["query"].reshape(batch, heads * n, -1), t["key"][:, 0].mT).view(batch, heads, n, m)

    spellings: dict[str, Products] = {
        "broadcast": (lambda t: t["query"] @ t["key"].transpose(-1, -2), lambda w, t: torch.matmul(w, t["value"])),
        "einsum": (
            lambda t: torch.einsum("bhid,bjd->bhij", t["query"], t["key"][:, 0]),
            lambda w, t: torch.einsum("bhij,bjd->bhid", w, t["value"][:, 0]),
        ),
        "rows of heads": (
            rows,
            lambda w, t: torch.bmm(w.reshape(batch, heads * n, m), t["value"][:, 0]).view(batch, heads, n, -1),
        ),
        "expand": (
            lambda t: t["query"] @ t["key"].expand(-1, heads, -1, -1).mT,
            lambda w, t: w @ t["value"].expand(-1, heads, -1, -1),
        ),
    }
    return spellings[draw.pick("product", *spellings)]


_LAYOUTS: dict[str, Callable[..., Products]] = {
    "heads first": _heads_first,
    "heads second": _heads_second,
    "softmax over rows": _softmax_over_rows,
    "flat": _flat,
    "grouped": _grouped,
    "one key head": _one_key_head,
}
