"""Measure: one number a head, beside that of uniform attention; and all measures of one sweep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.statistics.mass import PARTS, Parts
from saccade.statistics.uniform_baseline import Near, Uniform
from saccade.support.numerics import widest_dtype

__all__ = ["NEAR", "Measure", "effective_tokens", "measures_of", "measures_of_parts"]

_LOCAL = 16
NEAR = (
    Near("first_mass", "first token", 0, 0, False),
    Near("first_4_mass", "first 4", 0, 3, False),
    Near("self_mass", "own token", 0, 0, True),
    Near("previous_mass", "token before", 1, 1, True),
    Near("local_mass", f"±{_LOCAL} tokens", -_LOCAL, _LOCAL, True),
)


class Measure(NamedTuple):
    """One number a head.

    Attributes:
        name: in tables and files.
        unit: of the number.
        meaning: a short description.
        values: ``[batch, heads]``, NaN for a head in which no query attends to anything.
        uniform: the number of uniform attention over the same keys, ``[batch, heads]``; NaN if it has none.
    """

    name: str
    unit: str
    meaning: str
    values: Tensor
    uniform: Tensor


def measures_of(answers: dict[str, Tensor], uniform: Uniform) -> tuple[Measure, ...]:
    """Turn the results of one sweep into measures.

    Args:
        answers: results by name, of queries ``[batch, heads, q_len]``, of keys and of heads.
        uniform: those of uniform attention.
    """
    seen = uniform.visible.expand(answers["largest_weight"].shape)
    return (*_of_rows(answers, uniform, seen), *_of_columns(answers, uniform, seen), *_of_logits(answers, seen))


def measures_of_parts(parts: Parts, values: Tensor, even: Tensor, seen: Tensor) -> Iterator[Measure]:
    """Turn the shares of parts into measures.

    Args:
        parts: the statistic.
        values: its result, ``[batch, heads, q_len, 4]``.
        even: the same of uniform attention; batch and heads may be 1.
        seen: keys that each query sees; batch and heads may be 1.
    """
    sees = (seen > 0).expand(values.shape[:3])
    said = (
        f"given to the first {parts.sink} tokens" if parts.sink != 1 else "given to the first token",
        f"to tokens less than {parts.local} away",
        f"to the {parts.anchor} strongest blocks of {parts.block_size} among the others",
        "to all others",
    )
    for place, (name, meaning) in enumerate(zip(PARTS, said, strict=True)):
        own, uniform = (_mean(x.expand(values.shape)[..., place], sees) for x in (values, even))
        yield Measure(f"{name}_part", "share", meaning, own, uniform)


def effective_tokens(entropy: Tensor, seen: Tensor) -> Tensor:
    """Return the effective number of keys of each query; 0 if it sees none."""
    return entropy.exp().where(seen > 0, 0.0)


def _of_rows(answers: dict[str, Tensor], uniform: Uniform, seen: Tensor) -> Iterator[Measure]:
    """Yield means over the queries that see something."""
    sees, visible = seen > 0, seen.clamp_min(1.0)

    def mean(name: str, unit: str, meaning: str, values: Tensor, even: Tensor, over: Tensor = sees) -> Measure:
        return Measure(name, unit, meaning, _mean(values, over), _mean(even, over))

    if "entropy" in answers:
        entropy, bound, chooses = answers["entropy"], visible.log(), seen > 1
        relative = entropy / bound.where(chooses, 1.0)
        yield mean("entropy", "nats", "over how many keys a query spreads", entropy, bound)
        yield mean("relative_entropy", "of log visible keys", "1 is even", relative, torch.ones_like(bound), chooses)
        tokens = effective_tokens(entropy, seen)
        yield mean("effective_tokens", "keys", "exp of the entropy", tokens, visible)
    else:
        yield mean("given_mass", "share", "what the sink leaves", answers["given_mass"], torch.ones_like(visible))
    yield mean("largest_weight", "share", "of a query's strongest key", answers["largest_weight"], 1.0 / visible)
    for near in NEAR:
        even = uniform.near[near.name].expand(seen.shape) / visible
        yield mean(near.name, "share", f"given to the {near.what}", answers[near.name], even)
    if "distance" in answers:
        even = uniform.distance.expand(seen.shape)
        yield mean("distance", "tokens", "mean, of what is looked at", answers["distance"], even)


def _of_columns(answers: dict[str, Tensor], uniform: Uniform, seen: Tensor) -> Iterator[Measure]:
    """Yield measures of a whole head that are not means over its queries."""
    sees, visible, received = seen > 0, seen.clamp_min(1.0), answers["received"]
    count = sees.sum(-1)
    some = count.clamp_min(1).to(received.dtype)
    expected = uniform.received.expand(received.shape)
    if received.shape[-1]:
        most, key = received.max(-1)
        even = expected.gather(-1, key[..., None])[..., 0]
    else:
        most = even = received.new_zeros(received.shape[:2])

    def known(name: str, unit: str, meaning: str, values: Tensor, even: Tensor) -> Measure:
        return Measure(name, unit, meaning, *(one.where(count > 0, torch.nan) for one in (values, even)))

    yield known("most_received", "share of all", "got by the key that gets most", most / some, even / some)
    if "position_information" in answers:
        mean = torch.special.entr(expected / some[..., None]).sum(-1)
        even = (mean - (visible.log() * sees).sum(-1) / some).clamp_min(0.0)
        meaning = "what a query's place says about where it looks"
        yield known("position_information", "nats", meaning, answers["position_information"], even)
    norm, even = answers["squared_norm"].sum(-1).sqrt(), (sees / visible).sum(-1).sqrt()
    yield known("frobenius_norm", "1", "square root of the sum of all squares", norm, even)


def _of_logits(answers: dict[str, Tensor], seen: Tensor) -> Iterator[Measure]:
    """Yield measures of the scores behind the weights."""
    sees = seen > 0
    if "largest_logit" in answers:
        largest = answers["largest_logit"].where(sees, -torch.inf)
        values = largest.amax(-1) if largest.shape[-1] else largest.new_full(largest.shape[:2], -torch.inf)
        values, nothing = values.where(sees.any(-1), torch.nan), torch.full_like(values, torch.nan)
        yield Measure("largest_logit", "nats", "of all scores", values, nothing)
    if "logit_variance" in answers:
        values = _mean(answers["logit_variance"], sees)
        even = _mean(torch.zeros_like(answers["logit_variance"]), sees)
        yield Measure("logit_variance", "nats²", "of a query's scores", values, even)


def _mean(values: Tensor, over: Tensor) -> Tensor:
    """Return the mean over the selected rows, summed in the widest dtype, so that a million rows lose nothing."""
    mean = torch.where(over, values, 0.0).sum(-1, dtype=widest_dtype(values.device)) / over.sum(-1)
    return mean.to(values.dtype)  # 0 / 0 is NaN: no row is selected
