"""Random calls: inputs, masks and options, right and wrong ones, drawn from a number alone."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import torch

from saccade import masks, positions

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MOST = 26  # tokens


class Rule(NamedTuple):
    """A mask, and the same said of numbers: ``truth(batch, head, query, key)``, which broadcast."""

    mask: object
    truth: object


class Inputs(NamedTuple):
    """Tensors of a call, and where queries and keys stand, int64 ``[B | 1, len]``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    q_positions: torch.Tensor
    kv_positions: torch.Tensor
    given_positions: dict


def rule(draw: random.Random, batch: int, depth: int = 2) -> Rule:
    """A mask of up to a few others."""
    kind = draw.choice(("both", "either", "not", *9 * ("one",))) if depth else "one"
    if kind == "not":
        one = rule(draw, batch, depth - 1)
        return Rule(~one.mask, lambda *at: ~one.truth(*at))
    if kind in ("both", "either"):
        a, b = rule(draw, batch, depth - 1), rule(draw, batch, depth - 1)
        if kind == "both":
            return Rule(a.mask & b.mask, lambda *at: a.truth(*at) & b.truth(*at))
        return Rule(a.mask | b.mask, lambda *at: a.truth(*at) | b.truth(*at))
    return draw.choice((_causal, _full, _window, _strided, _global, _prefix, _documents, _padding, _function))(
        draw, batch
    )


def _causal(draw, batch):
    return Rule(masks.Causal(), lambda b, h, q, kv: kv <= q)


def _full(draw, batch):
    return Rule(masks.Full(), lambda b, h, q, kv: torch.ones_like(kv, dtype=torch.bool))


def _window(draw, batch):
    left, right = (draw.choice((None, 0, 1, 3, 8, MOST)) for _ in range(2))
    return Rule(
        masks.Window(left, right),
        lambda b, h, q, kv: (
            (kv >= q - (10**6 if left is None else left)) & (kv <= q + (10**6 if right is None else right))
        ),
    )


def _strided(draw, batch):
    step = draw.randint(1, 6)
    return Rule(masks.Strided(step), lambda b, h, q, kv: (q - kv) % step == 0)


def _global(draw, batch):
    places = tuple(sorted(draw.sample(range(MOST), draw.randint(0, 3))))
    sees, seen = draw.choice(((True, True), (True, False), (False, True)))

    def is_in(x):
        found = torch.zeros_like(x, dtype=torch.bool)
        for place in places:
            found |= x == place
        return found

    return Rule(masks.Global(places, sees=sees, seen=seen), lambda b, h, q, kv: (is_in(q) & sees) | (is_in(kv) & seen))


def _prefix(draw, batch):
    length = draw.randint(0, MOST)
    return Rule(masks.Prefix(length), lambda b, h, q, kv: kv < length)


def _documents(draw, batch):
    def lengths():
        parts, left = [], MOST
        while left > 0:
            parts.append(draw.randint(1, left))
            left -= parts[-1]
        return parts

    each = [lengths() for _ in range(batch)] if batch and draw.random() < 0.4 else [lengths()]
    table = torch.tensor([[number for number, size in enumerate(item) for _ in range(size)] for item in each])
    inner = draw.choice((None, masks.Causal()))

    def truth(b, h, q, kv):
        item = b if len(each) > 1 else torch.zeros_like(b)
        same = table[item, q.clamp(0, MOST - 1)] == table[item, kv.clamp(0, MOST - 1)]
        return same & (kv <= q) if inner is not None else same

    made = each if len(each) > 1 else each[0]
    return Rule(masks.Documents(made) if inner is None else masks.Documents(made, rule=inner), truth)


def _padding(draw, batch):
    lengths = [draw.randint(0, MOST) for _ in range(max(1, batch))]
    table = torch.tensor(lengths)
    return Rule(masks.Padding(lengths), lambda b, h, q, kv: kv < table[b])


def _function(draw, batch):
    step = draw.randint(2, 5)
    return Rule(
        masks.Predicate(lambda b, h, q, kv: (q * 3 + kv + h) % step != 0),
        lambda b, h, q, kv: (q * 3 + kv + h) % step != 0,
    )


def inputs(draw: random.Random) -> Inputs:
    """Tensors of small sizes, empty ones among them."""
    dtype, batch = draw.choice(DTYPES), draw.choice((1, 1, 2, 3, 0) if draw.random() < 0.1 else (1, 2, 3))
    groups, share = draw.choice((1, 2, 3)), draw.choice((1, 1, 2, 4))
    q_len, kv_len = (draw.choice((0, 1, 2)) if draw.random() < 0.15 else draw.randint(1, MOST) for _ in range(2))
    q_len = kv_len if draw.random() < 0.5 else q_len
    width, value_width = (draw.choice((1, 3, 8, 16, 33)) for _ in range(2))
    generator = torch.Generator().manual_seed(draw.getrandbits(40))
    # Limits are those of inputs of order one: larger scores are rounded to other weights.
    spread = draw.choice((0.1, 1.0, 1.0, 3.0 if dtype == torch.float64 else 1.0))

    def made(*shape):
        x = (torch.randn(*shape, generator=generator) * spread).to(dtype)
        if draw.random() < 0.2:  # memory in another order
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        return x

    query = made(batch, groups * share, q_len, width)
    key, value = made(batch, groups, kv_len, width), made(batch, groups, kv_len, value_width)
    stands = torch.arange(max(0, kv_len - q_len), max(0, kv_len - q_len) + q_len)[None] if q_len <= kv_len else None
    given = {}
    if stands is None or draw.random() < 0.2:
        first = draw.randint(0, max(0, MOST - max(q_len, 1)))
        stands, given = torch.arange(first, first + q_len)[None], {"q_positions": range(first, first + q_len)}
        if draw.random() < 0.5:
            given = {"q_positions": stands[0].tolist()}
    return Inputs(query, key, value, stands, torch.arange(kv_len)[None], given)


def options(draw: random.Random, given: Inputs) -> dict:
    """Options that change the numbers."""
    found = {}
    batch, heads, q_len, _ = given.query.shape
    kv_len = given.key.shape[2]
    generator = torch.Generator().manual_seed(draw.getrandbits(40))
    if draw.random() < 0.3:
        found["scale"] = draw.choice((0.0, 0.1, 0.25, -0.15))
    if draw.random() < 0.2:
        found["softcap"] = draw.choice((0.5, 5.0, 50.0))
    if draw.random() < 0.25:
        shape = [draw.choice((1, size)) for size in (batch, heads, q_len, kv_len)]
        found["bias"] = torch.randn(shape, generator=generator).to(given.query.dtype)
    elif draw.random() < 0.15:
        found["bias"] = positions.ALiBi(heads)
    if draw.random() < 0.15:
        found["sink_logit"] = torch.randn(heads, generator=generator)
    return found


def _slopes(heads: int) -> list[float]:
    """ALiBi's, by its authors' rule."""
    power = 1 << (heads.bit_length() - 1)
    own = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return own + [2 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)][: heads - power]


def dense(given: Inputs, truth, chosen: dict) -> torch.Tensor:
    """The definition, in float64: weights ``[B, H, L, S]``; rows that see nothing are 0."""
    query, key = given.query.double(), given.key.double()
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scale = chosen.get("scale", 1 / math.sqrt(query.shape[3]))
    scores = query @ key.mT * scale
    if "softcap" in chosen:
        scores = chosen["softcap"] * (scores / chosen["softcap"]).tanh()
    q, kv = given.q_positions[:, None, :, None], given.kv_positions[:, None, None, :]
    bias = chosen.get("bias")
    if isinstance(bias, positions.ALiBi):
        heads = query.shape[1]
        slopes = torch.tensor(_slopes(heads), dtype=torch.float64).view(1, heads, 1, 1)
        scores = scores - slopes * (q - kv).abs()
    elif bias is not None:
        scores = scores + bias.double()
    if truth is not None:
        b = torch.arange(query.shape[0]).view(-1, 1, 1, 1)
        h = torch.arange(query.shape[1]).view(1, -1, 1, 1)
        at = torch.broadcast_tensors(b, h, q, kv)
        scores = scores.masked_fill(~truth(*at), -math.inf)
    sink = chosen.get("sink_logit")
    if sink is not None:
        column = sink.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, column], 3).softmax(3)[..., :-1]
    peak = scores.amax(3, keepdim=True) if scores.shape[3] else scores.new_zeros(*scores.shape[:3], 1)
    weights = (scores - peak.masked_fill(peak == -math.inf, 0.0)).exp()
    total = weights.sum(3, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0)
