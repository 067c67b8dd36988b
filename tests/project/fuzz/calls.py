"""Random calls, and the judgement of an answer: it must equal the definition or be one of our errors."""

from __future__ import annotations

import inspect
import random
import re

import torch
from tests.project.fuzz import drawing
from torch.nn import functional as F

import saccade as sc
from saccade import caches, mechanisms, models
from saccade.testing.tolerances import error, tolerance

IMPLS = ("auto", "auto", "auto", "tiled", "reference", "fused", "native", "sdpa")
_OURS = re.compile(r"^[\w.]+(\(.*\))?: ")
_PYTHONS = re.compile(r"^[A-Z]\w+\.__init__\(\) (missing|takes) ")  # a call that Python itself cannot make
WRONG = ("a string", -1, 3.5, None, torch.zeros(2), [], object(), True, float("nan"))


class WrongAnswerError(AssertionError):
    """A result that is neither right nor one of our errors."""


def run(number: int) -> str:
    """Make one call, drawn from a number; return its kind and whether it was answered.

    Raises:
        WrongAnswerError: what it answered, and how to see it again.
    """
    draw = random.Random(number)
    kind = draw.choice(KINDS)
    try:
        kind(draw)
    except (ValueError, TypeError, NotImplementedError) as refusal:
        if not (_OURS.match(str(refusal)) or _PYTHONS.match(str(refusal))):
            raise WrongAnswerError(f"call {number} ({kind.__name__}): {type(refusal).__name__}: {refusal}") from refusal
        return f"{kind.__name__}: refused"
    except WrongAnswerError as mistake:
        raise WrongAnswerError(f"call {number} ({kind.__name__}): {mistake}") from mistake
    except Exception as crash:
        raise WrongAnswerError(f"call {number} ({kind.__name__}): {type(crash).__name__}: {crash}") from crash
    return f"{kind.__name__}: answered"


def judged(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, quantity: str = "output") -> None:
    """Raise unless an answer is the definition's, but for rounding."""
    if got.shape != want.shape:
        raise WrongAnswerError(f"shape {list(got.shape)}, not {list(want.shape)}")
    if bool(got.isnan().any()):
        raise WrongAnswerError("NaN")
    found = error(got, want)
    if not found <= tolerance(dtype, quantity):
        raise WrongAnswerError(f"differs by {found:.3g}")


def product(draw):
    """Call `saccade.attention`, sometimes with gradients."""
    given = drawing.inputs(draw)
    rule = drawing.rule(draw, len(given.query)) if draw.random() < 0.8 else drawing.Rule(None, None)
    chosen = drawing.options(draw, given)
    impl, leaves = draw.choice(IMPLS), [given.query, given.key, given.value]
    # In half precision terms that cancel leave their rounding behind; the laws hold it to a scale of its own.
    wants_gradients = draw.random() < 0.3 and given.query.dtype.itemsize > 2
    if wants_gradients:
        leaves = [x.clone().requires_grad_() for x in leaves]
    out = sc.attention(*leaves, rule.mask, impl=impl, **chosen, **given.given_positions)
    doubles = [x.detach().double().requires_grad_(wants_gradients) for x in leaves]
    exact = given._replace(query=doubles[0], key=doubles[1])
    share = given.query.shape[1] // given.key.shape[1]
    want = drawing.dense(exact, rule.truth, chosen) @ doubles[2].repeat_interleave(share, 1)
    judged(out.detach(), want.detach(), out.dtype)
    if wants_gradients and out.numel():
        grad = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
        found = torch.autograd.grad(out, leaves, grad)
        expected = torch.autograd.grad(want, doubles, grad.double())
        for one, other in zip(found, expected, strict=True):
            judged(one, other, out.dtype, "gradient")


def tensor_mask(draw):
    """Give a bool tensor of any shape that broadcasts as a mask."""
    given = drawing.inputs(draw)
    batch, heads, q_len, _ = given.query.shape
    shape = [draw.choice((1, size)) for size in (batch, heads, q_len, given.key.shape[2])]
    shape = shape[draw.choice((0, 0, 2)) :]
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(draw.getrandbits(40))) < draw.choice((0.2, 0.9))
    out = sc.attention(given.query, given.key, given.value, mask)
    weights = drawing.dense(given, None, {})
    scores = given.query.double() @ given.key.double().repeat_interleave(heads // given.key.shape[1], 1).mT
    scores = (scores * given.query.shape[3] ** -0.5).masked_fill(~mask, -torch.inf)
    weights = scores.softmax(3).nan_to_num() if scores.shape[3] else weights
    want = weights @ given.value.double().repeat_interleave(heads // given.key.shape[1], 1)
    judged(out, want, out.dtype)


def questions(draw):
    """Ask for statistics and parts of the lazy matrix."""
    given = drawing.inputs(draw)
    rule, chosen = drawing.rule(draw, len(given.query)), drawing.options(draw, given)
    matrix = sc.AttentionMatrix(given.query, given.key, rule.mask, **chosen, **given.given_positions)
    want = drawing.dense(given, rule.truth, chosen)
    kind = draw.choice(("dense", "received", "row", "transposed", "topk", "entropy", "lse"))
    if kind == "dense":
        judged(matrix.to_dense(), want, matrix.dtype)
    elif kind == "received":
        judged(matrix.received(), want.sum(2), torch.bfloat16 if matrix.dtype.itemsize == 2 else torch.float32)
    elif kind == "row":
        b, h, i = (draw.randrange(max(1, size)) for size in want.shape[:3])
        judged(matrix[b, h, i], want[b, h, i], matrix.dtype) if want.numel() else matrix.shape
    elif kind == "transposed":
        x = (
            torch.linspace(-1, 1, want.shape[0] * want.shape[1] * want.shape[2] * 3)
            .view(*want.shape[:3], 3)
            .to(matrix.dtype)
        )
        judged(matrix.mT @ x, want.mT @ x.double(), matrix.dtype, "gradient")
    elif kind == "topk":
        count = draw.randint(1, 4)
        got = matrix.topk(count)
        best = want.sort(3, descending=True).values[..., :count]
        judged(got.weights[..., : best.shape[3]], best, matrix.dtype)
    elif kind == "entropy":
        judged(matrix.entropy().float(), -(want * want.clamp(min=1e-300).log()).sum(3), torch.bfloat16)
    else:
        plain = drawing.dense(given, rule.truth, {name: x for name, x in chosen.items() if name != "sink_logit"})
        judged(matrix.lse.isinf().float(), (plain.sum(3) == 0).float(), torch.float32)


def cached(draw):
    """Run a prompt and steps of any sizes through a cache."""
    given = drawing.inputs(draw)
    length = given.key.shape[2]
    query = (
        given.query
        if given.query.shape[2] == length
        else given.query.new_zeros(*given.query.shape[:2], length, given.query.shape[3])
    )
    rule = drawing.rule(draw, len(query))
    mask, truth = sc.masks.Causal() & rule.mask, lambda b, h, q, kv: (kv <= q) & rule.truth(b, h, q, kv)
    cache = draw.choice((caches.KVCache, caches.KVCache, lambda: caches.KVCache(length + 3)))()
    parts, start = [], 0
    while start < length:
        stop = min(length, start + draw.randint(1, 9))
        cut = [x[:, :, start:stop] for x in (query, given.key, given.value)]
        parts.append(cache.attend(mechanisms.Softmax(), *cut, mask=mask))
        start = stop
    if parts:
        exact = given._replace(query=query, q_positions=torch.arange(length)[None])
        share = query.shape[1] // given.key.shape[1]
        want = drawing.dense(exact, truth, {}) @ given.value.double().repeat_interleave(share, 1)
        judged(torch.cat(parts, 2), want, query.dtype)


def layer(draw):
    """Compare a layer with its parts, by the definition."""
    heads, share, head_dim = draw.choice((1, 2)), draw.choice((1, 2)), draw.choice((2, 5, 8))
    width, length, batch = heads * share * head_dim, draw.randint(0, drawing.MOST), draw.choice((0, 1, 2, 2))
    torch.manual_seed(draw.getrandbits(30))
    rule = drawing.rule(draw, batch)
    made = sc.nn.MultiHeadAttention(width, heads * share, num_kv_heads=heads, mask=None).double()
    x = torch.randn(batch, length, width, dtype=torch.float64)
    out = made(x, mask=rule.mask)

    def parts(linear, count):
        return F.linear(x, linear.weight, linear.bias).view(batch, length, count, head_dim).transpose(1, 2)

    q, k, v = (
        parts(made.query_projection, heads * share),
        parts(made.key_projection, heads),
        parts(made.value_projection, heads),
    )
    stands = torch.arange(length)[None]
    weights = drawing.dense(drawing.Inputs(q, k, v, stands, stands, {}), rule.truth, {})
    merged = (weights @ v.repeat_interleave(share, 1)).transpose(1, 2).reshape(batch, length, width)
    judged(out.detach(), made.output_projection(merged).detach(), torch.float64)


def mechanism(draw):
    """Compare a mechanism's product with its entries, whole, in halves and through a cache."""
    length, width = draw.randint(1, drawing.MOST), draw.choice((4, 8))
    torch.manual_seed(draw.getrandbits(30))
    make = draw.choice(MECHANISMS)
    made = make(2, width).double()
    query, key, value = torch.randn(3, draw.choice((1, 2)), 2, length, width, dtype=torch.float64)
    key = F.normalize(key, dim=-1)
    rule = drawing.rule(draw, len(query), depth=1)
    mask = sc.masks.Causal() if made.reasons(rule.mask) else rule.mask
    matrix = made(query, key, mask=mask)
    out = matrix @ value
    judged(out.detach(), (matrix.to_dense() @ value).detach(), torch.float64)
    if mask.is_causal:
        cache, parts, start = made.new_cache(), [], 0
        while start < length:
            stop = min(length, start + draw.randint(1, 9))
            cut = [x[:, :, start:stop] for x in (query, key, value)]
            parts.append(cache.attend(made, *cut, mask=mask))
            start = stop
        judged(torch.cat(parts, 2).detach(), out.detach(), torch.float64)


def recorded(draw):
    """Compare the recorded weights of a layer of torch with those that it returns."""
    length, heads = draw.randint(1, 12), draw.choice((1, 2, 4))
    torch.manual_seed(draw.getrandbits(30))
    layer = torch.nn.MultiheadAttention(8, heads, batch_first=True).eval()
    x = torch.randn(draw.choice((1, 2)), length, 8)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1) if draw.random() < 0.5 else None
    _, want = layer(x, x, x, attn_mask=mask, average_attn_weights=False)
    with sc.record(layer, keep="qk") as recording:
        layer(x, x, x, attn_mask=mask, need_weights=draw.random() < 0.5)
    judged(recording[0].matrix.to_dense(), want.detach().double(), torch.float32)


def decoder(draw):
    """Compare a decoder's prompt and steps of any sizes with the whole text, also packed and padded."""
    torch.manual_seed(draw.getrandbits(30))
    heads = draw.choice((1, 2))
    config = models.DecoderConfig(
        vocab_size=11,
        max_len=40,
        embed_dim=8 * heads,
        num_heads=2 * heads,
        num_kv_heads=heads,
        num_layers=draw.choice((1, 2)),
        feed_forward_dim=12,
        position_encoding=draw.choice(("rotary", "alibi", "learned")),
        norm=draw.choice(("layer", "rms")),
        gated=draw.random() < 0.5,
        mask=draw.choice((None, sc.masks.sliding_window(5))),
    )
    model, length = models.Decoder(config).double().eval(), draw.randint(1, drawing.MOST)
    tokens = torch.randint(11, (draw.choice((1, 3)), length))
    mask = draw.choice((None, sc.masks.Documents([13, 13])))
    with torch.no_grad():
        want, cache, parts, start = model(tokens, mask=mask), model.new_cache(), [], 0
        while start < length:
            stop = min(length, start + draw.randint(1, 9))
            parts.append(model(tokens[:, start:stop], mask=mask, cache=cache))
            start = stop
    judged(torch.cat(parts, 1), want, torch.float64, "gradient")


def wrong(draw):
    """Make a call with one wrong argument."""
    given = drawing.inputs(draw)
    tensors, chosen = [given.query, given.key, given.value], {}
    name = draw.choice(
        (
            "query",
            "key",
            "value",
            "mask",
            "scale",
            "softcap",
            "bias",
            "sink_logit",
            "impl",
            "q_positions",
            "seed",
            "dropout_p",
        )
    )
    value = draw.choice(WRONG)
    mask = None
    if name in ("query", "key", "value"):
        tensors[("query", "key", "value").index(name)] = value
    elif name == "mask":
        mask = value
    else:
        chosen[name] = value
    out = sc.attention(*tensors, mask, **chosen)
    if bool(out.isnan().any()):
        raise WrongAnswerError(f"NaN of {name}={value!r}")


def constructors(draw):
    """Make masks with random arguments: each can be written out, or raises one of our errors."""
    joined = ("And", "Or", "Not", "After", "Mask")  # made by &, | and ~
    names = [name for name in sc.masks.__all__ if name not in joined and isinstance(getattr(sc.masks, name), type)]
    kind = getattr(sc.masks, draw.choice(names))
    likely = (1, 2, 7, (0,), [1, 2])
    unlikely = (0, -1, None, True, 2.5, "x", [[1, 2], [3]], [], torch.tensor([1, 2]), torch.ones(3, 3).bool())
    needed = [own for own in inspect.signature(kind).parameters.values() if own.default is own.empty]
    is_plausible = draw.random() < 0.5
    pool = likely if is_plausible else likely + unlikely
    mask = kind(*(draw.choice(pool) for _ in range(len(needed) if is_plausible else draw.randint(0, 3))))
    if isinstance(mask, sc.masks.Mask):
        mask.to_dense(draw.randint(1, 6), batch=mask.shape[0], heads=mask.shape[1])


MECHANISMS = (
    lambda heads, width: mechanisms.Softmax(),
    lambda heads, width: mechanisms.Linear(),
    lambda heads, width: mechanisms.Performer(8, seed=1),
    lambda heads, width: mechanisms.Delta(),
    lambda heads, width: mechanisms.GatedLinear(),
    lambda heads, width: mechanisms.S4D(heads, 4),
    lambda heads, width: mechanisms.SSD(heads),
)
KINDS = (
    *(product, product, product, tensor_mask, questions, questions, cached, layer),
    *(mechanism, recorded, decoder, wrong, constructors),
)
