"""Attention as people write it by hand, drawn at random."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Draw:
    """The choices of one attention.

    Args:
        seed: of all choices.

    Attributes:
        choices: what was drawn, by name, for messages.
    """

    seed: int
    choices: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def pick(self, name: str, *options: object) -> object:
        """Return one of the options."""
        self.choices[name] = self.random.choice(options)
        return self.choices[name]


def random_attention(seed: int) -> tuple[Callable[[dict[str, Tensor]], Tensor], dict[str, Tensor], dict[str, object]]:
    """Return a function of tensors, the tensors, and what was drawn."""
    draw = Draw(seed)
    torch.manual_seed(seed)
    batch, heads, n = (draw.random.choice(sizes) for sizes in ((1, 2, 3), (1, 2, 4), (1, 2, 5, 8)))
    m = n if draw.random.random() < 0.6 else draw.random.choice((2, 3, 9))
    width, value_dim = draw.random.choice((1, 3, 8)), draw.random.choice((1, 4, 8))
    groups = draw.random.choice((1, 1, 2)) if heads > 1 else 1
    layout = draw.pick("layout", "heads first", "heads second", "flat", "five axes", "one key head", "no batch")
    dtype = draw.pick("dtype", torch.float64, torch.float64, torch.float32, torch.bfloat16)
    sizes = {"batch": batch, "heads": heads, "n": n, "m": m, "groups": groups}
    draw.choices["sizes"] = (sizes, width, value_dim)
    kv_heads = {"five axes": heads // groups, "one key head": 1}.get(str(layout), heads)
    tensors = {
        "query": torch.randn(batch, heads, n, width, dtype=dtype),
        "key": torch.randn(batch, kv_heads, m, width, dtype=dtype),
        "value": torch.randn(batch, kv_heads, m, value_dim, dtype=dtype),
        "bias": torch.randn(heads, n, m, dtype=dtype),
        "head_scale": torch.rand(heads, 1, 1, dtype=dtype) + 0.5,
        "temperature": torch.rand((), dtype=dtype) + 0.5,
    }
    for x in tensors.values():
        x.requires_grad_()
    product, times_values = _products(draw, str(layout), sizes)
    steps = [_scale(draw, width), _softcap(draw), _bias(draw), _mask(draw, sizes), _soften(draw)]
    if draw.choices["orientation"] == "transposed":
        steps = [steps[0], steps[1], steps[4]]  # the others are for [..., n, m]

    def attend(tensors: dict[str, Tensor]) -> Tensor:
        scores = product(tensors)
        for step in steps:
            scores = step(scores, tensors)
        return times_values(scores, tensors)

    return attend, tensors, draw.choices


Step = Callable[[Tensor, dict[str, Tensor]], Tensor]


def _scale(draw: Draw, width: int) -> Step:
    root = math.sqrt(width)
    spelled = draw.pick("scale", "none", "times", "over", "in place", "tensor", "learned", "of heads", "left", "add zero")

    def scale(scores: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        if spelled == "times":
            return scores * (1 / root)
        if spelled == "left":
            return 0.5 * scores
        if spelled == "over":
            return torch.div(scores, root)
        if spelled == "in place":
            scores /= root
            scores *= 1.5
            return scores
        if spelled == "tensor":
            return scores / torch.sqrt(torch.tensor(float(width), dtype=scores.dtype))
        if spelled == "learned":
            return tensors["temperature"] * scores
        if spelled == "of heads":
            return (scores * tensors["head_scale"]).contiguous()
        return scores + 1e-9 if spelled == "add zero" else scores

    return scale


def _softcap(draw: Draw) -> Step:
    cap = draw.pick("softcap", None, None, None, 2.0)

    def softcap(scores: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        if cap is None or draw.choices["scale"] == "add zero":
            return scores
        return torch.tanh(scores / cap) * cap if draw.seed % 2 else (scores / cap).tanh() * cap

    return softcap


def _bias(draw: Draw) -> Step:
    kind = draw.pick("bias", "none", "none", "learned", "in place", "distance", "detached", "subtracted", "alpha")

    def bias(scores: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        n, m = scores.shape[-2:]
        distance = -(torch.arange(n)[:, None] - torch.arange(m)).abs().to(scores.dtype)
        table = tensors["bias"]
        if kind == "learned":
            return table + scores
        if kind == "in place":
            scores += table[None]
            return scores
        if kind == "distance":
            return scores.add(distance * 0.25)
        if kind == "detached":
            return torch.add(scores, table.detach())
        if kind == "subtracted":
            return scores - distance
        return torch.add(scores, table, alpha=0.5) if kind == "alpha" else scores

    return bias


def _mask(draw: Draw, sizes: dict[str, int]) -> Step:
    pattern = draw.pick("mask", "none", "causal", "padding", "random")
    batch, n, m = sizes["batch"], sizes["n"], sizes["m"]
    allowed = torch.ones(1, 1, n, m, dtype=torch.bool)
    if pattern == "causal":
        allowed = allowed.tril(max(0, m - n))
    elif pattern == "padding":
        lengths = torch.randint(1, m + 1, (batch,))
        allowed = (torch.arange(m) < lengths[:, None])[:, None, None]
    elif pattern == "random":
        allowed = torch.rand(batch, 1, n, m) < 0.6
        allowed[..., 0] = True
    form = draw.pick("form", "fill", "fill in place", "where", "where tensor", "like", "added", "lowest", "set", "twice")
    low = draw.pick("low", -math.inf, -1e9, -1e4)

    def mask(scores: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        if pattern == "none":
            return scores
        visible = allowed if scores.dim() == 4 else allowed[0]
        if scores.dim() == 5:
            visible = allowed[:, :, None]
        if form == "fill":
            return scores.masked_fill(~visible, low)
        if form == "fill in place":
            scores.masked_fill_(visible.logical_not(), low)
            return scores
        if form == "where":
            return torch.where(visible, scores, low)
        if form == "where tensor":
            return torch.where(visible, scores, torch.full([], low, dtype=scores.dtype))
        if form == "like":
            return scores.where(visible, torch.full_like(scores, low))
        if form == "added":
            return scores + torch.zeros(visible.shape, dtype=scores.dtype).masked_fill(~visible, low)
        if form == "lowest":
            return scores + (1.0 - visible.to(scores.dtype)) * torch.finfo(scores.dtype).min
        if form == "set":
            scores[(~visible).expand(scores.shape)] = low
            return scores
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        return scores.masked_fill(~visible, low)

    return mask


def _soften(draw: Draw) -> Step:
    spelled = draw.pick("softmax", "F", "torch", "method", "module", "dtype", "special")
    drop = draw.pick("dropout", "none", "eval", "zero", "module")
    cast = draw.pick("cast", False, False, True)

    def soften(scores: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        dtype, dim = scores.dtype, -2 if draw.choices["orientation"] == "transposed" else -1
        scores = scores.float() if cast and dtype != torch.float64 else scores
        if spelled == "F":
            weights = F.softmax(scores, dim=dim)
        elif spelled == "torch":
            weights = torch.softmax(scores, dim)
        elif spelled == "method":
            weights = scores.softmax(scores.dim() + dim)
        elif spelled == "module":
            weights = nn.Softmax(dim=dim)(scores)
        elif spelled == "dtype":
            weights = F.softmax(scores, dim, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        else:
            weights = torch.special.softmax(scores, dim)
        weights = weights.type_as(tensors["value"]) if draw.seed % 3 else weights.to(dtype)
        if drop == "eval":
            return F.dropout(weights, p=0.4, training=False)
        if drop == "zero":
            return torch.dropout(weights, 0.0, True)
        return nn.Dropout(0.3).eval()(weights) if drop == "module" else weights

    return soften


def _products(draw: Draw, layout: str, sizes: dict[str, int]) -> tuple[Callable[..., Tensor], Step]:
    batch, heads, n, m, groups = (sizes[name] for name in ("batch", "heads", "n", "m", "groups"))
    spelled = draw.pick("product", "@", "einsum", "matmul", "bmm", "baddbmm")
    draw.choices["orientation"] = "plain"
    if layout == "heads first" and spelled in ("@", "matmul") and draw.pick("transposed", False, True):
        draw.choices["orientation"] = "transposed" if draw.pick("softmax axis", -1, -2) == -2 else "plain"
        back = draw.choices["orientation"] == "transposed"
        if not back:
            return (
                lambda t: (t["key"] @ t["query"].mT).transpose(-1, -2),
                lambda w, t: (t["value"].mT @ w.mT).mT,
            )
        return (lambda t: torch.matmul(t["key"], t["query"].transpose(2, 3))), lambda w, t: w.mT @ t["value"]
    if layout == "five axes":
        split = lambda x: x.view(batch, heads // groups, groups, n, -1)  # noqa: E731
        if spelled == "einsum":
            return (
                lambda t: torch.einsum("bkgid,bkjd->bkgij", split(t["query"]), t["key"]).reshape(batch, heads, n, m),
                lambda w, t: torch.einsum(
                    "bkgij, bkjd -> bkgid", w.reshape(batch, heads // groups, groups, n, m), t["value"]
                ).reshape(batch, heads, n, -1),
            )
        return (
            lambda t: (split(t["query"]) @ t["key"].unsqueeze(2).mT).flatten(1, 2),
            lambda w, t: (w.unflatten(1, (heads // groups, groups)) @ t["value"][:, :, None]).flatten(1, 2),
        )
    if layout == "one key head":
        if spelled == "einsum":
            return (
                lambda t: torch.einsum("bhid,bjd->bhij", t["query"], t["key"][:, 0]),
                lambda w, t: torch.einsum("bhij,bjd->bhid", w, t["value"][:, 0]),
            )
        if spelled == "bmm":
            return (
                lambda t: torch.bmm(t["query"].reshape(batch, heads * n, -1), t["key"][:, 0].mT).view(batch, heads, n, m),
                lambda w, t: torch.bmm(w.reshape(batch, heads * n, m), t["value"][:, 0]).view(batch, heads, n, -1),
            )
        return (lambda t: t["query"] @ t["key"].transpose(-1, -2)), lambda w, t: torch.matmul(w, t["value"])
    if layout == "flat" or spelled in ("bmm", "baddbmm"):
        flat = lambda x: x.reshape(batch * heads, *x.shape[2:])  # noqa: E731

        def product(t: dict[str, Tensor]) -> Tensor:
            q, k = flat(t["query"]), flat(t["key"]).transpose(1, 2)
            scores = torch.bmm(q, k)
            if spelled == "baddbmm":
                scores = torch.baddbmm(q.new_empty(batch * heads, n, m), q, k, beta=0, alpha=0.7)
            return scores.view(batch, heads, n, m)

        return product, lambda w, t: torch.bmm(w.reshape(batch * heads, n, m), flat(t["value"])).view(batch, heads, n, -1)
    if layout == "heads second" and spelled == "einsum":
        second = lambda x: x.transpose(1, 2)  # noqa: E731
        return (
            lambda t: torch.einsum("bihd,bjhd->bhij", second(t["query"]), second(t["key"])),
            lambda w, t: torch.einsum("bhij,bjhd->bihd", w, second(t["value"])),
        )
    if layout == "no batch":
        if spelled == "einsum":
            return (
                lambda t: torch.einsum("...qd,...kd->...qk", t["query"], t["key"]),
                lambda w, t: torch.einsum("...qk,...kd->...qd", w, t["value"]),
            )
        return (lambda t: t["query"] @ t["key"].mT), lambda w, t: w @ t["value"]
    if spelled == "einsum":
        return (
            lambda t: torch.einsum("zxcv,zxbv->zxcb", t["query"], t["key"]),
            lambda w, t: torch.einsum("bhnm, bhmd -> bnhd", w, t["value"]),
        )
    return (lambda t: torch.matmul(t["query"], t["key"].transpose(-2, -1))), lambda w, t: w.matmul(t["value"])
