"""Claims about masking: large negative numbers, masked tokens, and queries that may attend to no key."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.masks import Causal, Padding
from saccade.matrix import attention, attention_with_lse
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, at_least, equal, same


def filled(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, constant: float = -1e9) -> Tensor:
    """Compute attention as in tutorials, replacing masked scores with a large negative number."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return scores.masked_fill(~allowed, constant).softmax(-1) @ value


def filled_with_infinity(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """Compute attention with masked scores replaced by minus infinity."""
    return filled(query, key, value, allowed, -torch.inf)


def over_queries(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """Compute attention with the common mistake of a softmax over the queries instead of the keys."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return scores.masked_fill(~allowed, -1e9).softmax(-2) @ value


def _raises_runtime_error(compute: Callable[[], object]) -> bool:
    try:
        compute()
    except RuntimeError:
        return True
    return False


@claim(
    latex=r"s_{ij}\leftarrow-10^9\ \text{masks}",
    source="code of tutorials, with -1e9 or -1e20",
    verdict="holds if",
    conditions="the query sees some key, scores are not float16, and nothing is added or capped afterwards. A query "
    "that sees no key gets the mean of all values, those of hidden tokens too, and NaN if the number is -inf; in "
    "float16 neither -10⁹ nor -10²⁰ exists",
)
def a_large_negative_number_masks(
    draw: Draw,
    *,
    masked: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = filled,
    constant: float = -1e9,
    cap: float = 5.0,
    infinite: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = filled_with_infinity,
) -> Measurements:
    """Scores of -10⁹ mask a key."""
    q, k, v = (draw.normal(1, 1, 6, 4).float() for _ in range(3))
    allowed = torch.ones(6, 6, dtype=torch.bool).tril()
    expected = attention(q, k, v, allowed)
    yield same("float32, causal: output against a mask", masked(q, k, v, allowed), expected, 1e-5)
    allowed[3] = False
    out = masked(q, k, v, allowed)[0, 0, 3]
    yield apart("a query that sees nothing: its largest output, against 0", float(out.abs().max()), 0.0, 1e-3)
    yield same("the same, against the mean of all values", out, v[0, 0].mean(0), 1e-5)
    brain = torch.tensor([0.0, constant], dtype=torch.bfloat16)
    yield equal("bfloat16: weight of a masked key", float(brain.softmax(0)[1]), 0.0)
    half = torch.zeros(2, 2, dtype=torch.float16)
    fails = _raises_runtime_error(lambda: half.masked_fill(torch.ones(2, 2, dtype=torch.bool), constant))
    yield equal("float16 refuses -10⁹", fails, True)
    capped = cap * torch.tanh(torch.tensor([0.0, constant]) / cap)
    yield apart("weight of a masked key, scores capped at 5 after masking", float(capped.softmax(0)[1]), 0.0, 1e-3)
    some = infinite(q, k, v, torch.ones(6, 6, dtype=torch.bool).tril())
    yield same("-inf, causal: output against a mask", some, expected, 1e-5)
    none = infinite(q, k, v, allowed)
    yield equal(
        "-inf, a query that sees nothing: share of its output that is NaN",
        float(none[0, 0, 3].isnan().float().mean()),
        1,
    )


@claim(
    latex=r"s_{ij}+(1-m_{ij})\cdot(-10^9)",
    source="code that adds a mask to the scores",
    verdict="holds if",
    conditions="the conditions of a-large-negative-number-masks hold; near -10⁹ float32 has multiples of 64 only, so "
    "the weights of a query that sees nothing are rounding errors; and -10⁴ leaves its true weights",
)
def an_added_number_masks(
    draw: Draw,
    *,
    added: Callable[[Tensor, float | Tensor], Tensor] = lambda scores, constant: (scores + constant).softmax(-1),
) -> Measurements:
    """Adding -10⁹ to scores masks a key."""
    scores = torch.tensor([0.0, 40.0, 80.0, -30.0])
    rounded = added(scores, -1e9)
    yield equal("scores 0, 40, 80, -30 plus -10⁹: weight of the second", float(rounded[1]), 0.5, 1e-6)
    yield apart("the same without rounding", float(rounded[1]), float(scores.softmax(-1)[1]), 0.4)
    row = 3 * draw.normal(8).float()
    visible = torch.tensor([True] * 5 + [False] * 3)
    mixed = added(row, torch.where(visible, 0.0, -1e9))
    yield equal("a row with visible keys: weight of the masked ones", float(mixed[5:].sum()), 0.0)
    yield same("-10⁴ added to all of a row: weights, against those of no mask", added(row, -1e4), row.softmax(-1), 1e-2)


@claim(
    latex=r"V(i)=\emptyset\ \Rightarrow\ o_i=0,\ \log Z_i=-\infty,\ \nabla=0",
    source="the empty sum; this library guarantees it for every kernel",
    verdict="holds",
)
def empty_rows_give_nothing(
    draw: Draw, *, attend: Callable[..., tuple[Tensor, Tensor]] = attention_with_lse
) -> Measurements:
    """A query that may attend to nothing gets exactly 0, and sends no gradient."""
    q, k, v = (draw.normal(1, 1, 5, 4).requires_grad_() for _ in range(3))
    allowed = torch.ones(5, 5, dtype=torch.bool).tril(-1)  # the first row is empty
    out, lse = attend(q, k, v, allowed)
    zeros = torch.zeros(4, dtype=torch.float64)
    yield same("its output, against 0", out[0, 0, 0], zeros, 0.0)
    yield equal("its lse is -inf", bool(torch.isneginf(lse[0, 0, 0])), True)
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    yield same("its gradient, against 0", gradients[0][0, 0, 0], zeros, 0.0)
    yield equal("all gradients are finite", all(bool(torch.isfinite(gradient).all()) for gradient in gradients), True)


@claim(
    latex=r"j\notin V(i)\ \Rightarrow\ \partial o_i/\partial k_j=\partial o_i/\partial v_j=0",
    source="tutorials; Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3",
    verdict="holds",
    conditions="the mask is applied to the scores before softmax over the keys (with softmax over the queries, later "
    "tokens have an influence despite the mask). A causal mask lets a token see itself: the token at position i + 1 "
    "is generated from the tokens up to i",
)
def masks_hide_the_future_and_padding(
    draw: Draw,
    *,
    attend: Callable[..., Tensor] = attention,
    wrong_axis: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = over_queries,
) -> Measurements:
    """Tokens hidden by a mask, whether later tokens or padding, have no influence."""
    n, tokens = 8, 5
    q, k, v = (draw.normal(1, 1, n, 4) for _ in range(3))

    def influence(mask: object) -> Tensor:
        """Return how strongly each output of masked attention depends on each key and value, ``[n, n]``."""

        def of(key: Tensor, value: Tensor) -> Tensor:
            return attend(q, key, value, mask)[0, 0].sum(-1)

        by_key, by_value = torch.autograd.functional.jacobian(of, (k, v))
        return (by_key.abs() + by_value.abs())[:, 0, 0].sum(-1)

    causal, padded = influence(Causal()), influence(Padding([tokens], padded_len=n))
    yield equal("causal: largest influence of a later token", float(causal.triu(1).max()), 0.0)
    least = float(causal[torch.ones_like(causal, dtype=torch.bool).tril()].min())
    yield at_least("causal: smallest influence of the token itself and of earlier ones", least, 1.5e-4)
    yield equal("padding: largest influence of a padding token", float(padded[:, tokens:].max()), 0.0)
    lower = torch.ones(n, n, dtype=torch.bool).tril()
    of_queries = torch.autograd.functional.jacobian(lambda x: wrong_axis(x, k, v, lower)[0, 0].sum(-1), q)
    later = of_queries[:, 0, 0].abs().sum(-1).triu(1)
    yield at_least("softmax over queries, causal: largest influence of a later token's query", float(later.max()), 0.1)
