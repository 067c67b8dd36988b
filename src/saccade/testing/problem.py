"""The `Problem` class: the inputs of one attention call, from which laws derive related problems."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from saccade.masks import Mask, Padding, Predicate
from saccade.positions import Bias
from saccade.scores import Score
from saccade.testing import definitions, oracle

Part = Literal["early", "late", "even", "odd"]


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """The inputs of one attention call, with the allowed pairs of queries and keys.

    Attributes:
        query: ``[batch, heads, q_len, head_dim]``.
        key, value: ``[batch, kv_heads, kv_len, key_dim or value_dim]``; keys and queries have the same width, unless
            the score accepts different widths.
        allowed: bool ``[batch, heads, q_len, kv_len]``, True = may attend.
        mask: the allowed pairs as a mask object, for functions that take masks; if None, every pair is allowed.
        bias, scale, softcap: options of the function; None if not used.
        dropout_p: dropout probability. Its results are random, so laws test only whether it is accepted.
        sink_logit: ``[heads]``, the logits of the sink; None if not used.
        score: the score that compares queries and keys; if None, the dot product.
        relative: a relative bias, passed as ``bias``; a tensor ``bias`` replaces it.
        q_positions, kv_positions: int64 ``[len]`` or ``[batch, len]``, or None for the default.
        seed: the seed of all random values that a law draws for the problem.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    allowed: Tensor
    mask: Mask | None = None
    bias: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float | None = None
    sink_logit: Tensor | None = None
    score: Score | None = None
    relative: Bias | None = None
    q_positions: Tensor | None = None
    kv_positions: Tensor | None = None
    seed: int = 0

    @property
    def in_use(self) -> dict[str, Any]:
        """The options that the problem uses, by name; includes ``relative`` only if no tensor bias replaces it."""
        names = ["bias", "scale", "softcap", "dropout_p", "sink_logit", "score"]
        if self.bias is None:
            names.append("relative")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def options(self) -> dict[str, Any]:
        """The options that the problem uses, as keyword arguments of an attention function."""
        return {"bias" if name == "relative" else name: option for name, option in self.in_use.items()}

    @property
    def positions(self) -> dict[str, Tensor]:
        """The explicit positions of the problem, as keyword arguments of an attention function."""
        positions = {"q_positions": self.q_positions, "kv_positions": self.kv_positions}
        return {name: tensor for name, tensor in positions.items() if tensor is not None}

    @property
    def repeats(self) -> int:
        """Number of query heads per key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def sees_something(self) -> Tensor:
        """A mask of the rows that may attend to at least one key, bool ``[batch, heads, q_len]``."""
        return self.allowed.any(-1)

    def but(self, **changes: Any) -> Problem:
        """Return a copy of the problem with some attributes replaced."""
        return dataclasses.replace(self, **changes)

    def truth(self) -> tuple[Tensor, Tensor]:
        """Compute the reference result (out, lse) of the problem by definition, in float64."""
        head_dim = self.query.shape[3]
        scale = definitions.default_scale(self.score, head_dim) if self.scale is None else self.scale
        bias = self.bias
        if bias is None and self.relative is not None:
            bias = definitions.relative(self.relative, *self.all_positions(), self.query, scale)
        return oracle.attention(
            self.query,
            self.key,
            self.value,
            self.allowed,
            bias=bias,
            scale=scale,
            softcap=self.softcap,
            sink_logit=self.sink_logit,
            compare=None if self.score is None else partial(definitions.compare, self.score),
            modify=None if self.score is None else self._modify_scores,
        )

    def _modify_scores(self, scores: Tensor) -> Tensor:
        assert self.score is not None  # the caller has checked this
        return definitions.modified(self.score, scores, *self.all_positions())

    def all_positions(self) -> tuple[Tensor, Tensor]:
        """Return the positions of queries and of keys, explicit or default, each ``[batch | 1, len]``."""
        q_len, kv_len = self.query.shape[2], self.key.shape[2]
        count = torch.arange(max(q_len, kv_len), device=self.query.device)
        q = count[:q_len] + (kv_len - q_len) if self.q_positions is None else self.q_positions
        kv = count[:kv_len] if self.kv_positions is None else self.kv_positions
        return torch.atleast_2d(q), torch.atleast_2d(kv)

    @property
    def requires_grad(self) -> bool:
        """Whether the query, the key or the value requires a gradient."""
        return any(x.requires_grad for x in (self.query, self.key, self.value))

    def leaves(self, *, bias: bool = False, parameters: bool = False) -> Problem:
        """Return the problem with query, key, value and, optionally, options copied to new autograd leaves.

        Args:
            bias: include the tensor ``bias``.
            parameters: include the sink logits and the parameters of the score and of the relative bias.
        """
        names = ["query", "key", "value", *(["bias"] if bias else []), *(["sink_logit"] if parameters else [])]
        fresh: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        fresh = {name: tensor.detach().clone().requires_grad_() for name, tensor in fresh.items()}
        if parameters:
            fresh |= {name: copy.deepcopy(module).requires_grad_() for name, module in self._modules().items()}
        return self.but(**fresh)

    def parameters(self) -> dict[str, Tensor]:
        """Return the sink logits and the parameters of the score and the relative bias in use, by name."""
        parameters = {} if self.sink_logit is None else {"sink_logit": self.sink_logit}
        for option, module in self._modules().items():
            parameters |= {f"{option}.{name}": parameter for name, parameter in module.named_parameters()}
        return parameters

    def item(self, index: int) -> Problem:
        """Return the problem restricted to batch item ``index``."""

        def take_item(x: Tensor | None, dims: int) -> Tensor | None:
            return x if x is None or x.dim() < dims or x.shape[0] == 1 else x[index : index + 1]

        mask, whole = self.mask, self.mask
        if whole is not None and (whole.shape[0] > 1 or not _is_constant_along(self.allowed, 0)):
            mask = Predicate(lambda b, h, q, kv: whole.allows(b + index, h, q, kv))
        here = slice(index, index + 1)
        return self.but(
            query=self.query[here],
            key=self.key[here],
            value=self.value[here],
            allowed=self.allowed[here],
            mask=mask,
            bias=take_item(self.bias, 4),
            q_positions=take_item(self.q_positions, 2),
            kv_positions=take_item(self.kv_positions, 2),
        )

    def step(self, start: int, stop: int) -> Problem:
        """Return one decoding step: queries ``start`` to ``stop``, all keys up to ``stop``, and default positions."""
        keys = max(0, self.key.shape[2] - self.query.shape[2] + stop)
        return self.but(
            query=self.query[:, :, start:stop],
            key=self.key[:, :, :keys],
            value=self.value[:, :, :keys],
            allowed=self.allowed[:, :, start:stop, :keys],
            bias=None if self.bias is None else self.bias.expand_as(self.allowed)[:, :, start:stop, :keys],
        )

    def part(self, which: Part) -> Problem:
        """Return the problem with only one half of the keys visible, or only those at even or odd positions."""
        half = self.key.shape[2] // 2
        position = torch.arange(self.key.shape[2], device=self.key.device)
        if self.kv_positions is not None:
            position = self.kv_positions.reshape(-1, 1, 1, position.shape[0])
        keys: Mask = Padding((half,)) if which in ("early", "late") else Predicate(lambda b, h, q, kv: kv % 2 == 0)
        inside = (position >= 0) & (position < half) if which in ("early", "late") else position % 2 == 0
        if which in ("late", "odd"):
            keys, inside = ~keys, ~inside
        return self.but(allowed=self.allowed & inside, mask=keys if self.mask is None else self.mask & keys)

    def heads_reversed(self) -> Problem:
        """Reverse the order of query heads and of key heads, so that every query head keeps its keys."""
        mask, forward, last = self.mask, self.mask, self.query.shape[1] - 1
        if forward is not None and (forward.shape[1] > 1 or not _is_constant_along(self.allowed, 1)):
            mask = Predicate(lambda b, h, q, kv: forward.allows(b, last - h, q, kv))
        names = [name for name in ("query", "key", "value", "allowed", "bias") if getattr(self, name) is not None]
        return self.but(
            **{name: getattr(self, name).flip(1) for name in names},
            mask=mask,
            sink_logit=None if self.sink_logit is None else self.sink_logit.flip(0),
            relative=None if self.relative is None else ReversedHeads(self.relative),
        )

    def keys_reversed(self) -> Problem:
        """Reverse the order of keys and values. This is valid only if every query may attend to every key.

        Explicit key positions are also reversed. With a relative bias, default positions are made explicit first.
        """
        reordered = self.but(
            key=self.key.flip(2), value=self.value.flip(2), bias=None if self.bias is None else self.bias.flip(3)
        )
        if not self.positions and "relative" not in self.in_use:
            return reordered
        q, kv = self.all_positions()
        if self.q_positions is None:
            # With more queries than keys, the first queries would have negative positions.
            q, kv = (x + max(0, q.shape[1] - kv.shape[1]) for x in (q, kv))
        return reordered.but(q_positions=q, kv_positions=kv.flip(1))

    def ungrouped(self) -> Problem:
        """Repeat the problem's keys and values for every query head."""
        return self.but(
            key=self.key.repeat_interleave(self.repeats, dim=1), value=self.value.repeat_interleave(self.repeats, dim=1)
        )

    def _modules(self) -> dict[str, nn.Module]:
        return {name: option for name, option in self.in_use.items() if isinstance(option, nn.Module)}


class ReversedHeads(Bias):
    """A relative bias that reverses the order of another bias's heads, for `Problem.heads_reversed`."""

    def __init__(self, inner: Bias):
        super().__init__()
        self.inner, self.reach = inner, inner.reach

    def values(self, distances: Tensor, query: Tensor, scale: float) -> Tensor:
        return self.inner.values(distances, query.flip(1), scale).flip(1)

    def address(self, positions: Tensor) -> Tensor:
        return self.inner.address(positions)


def _reversed_heads(bias: Any, q: Tensor, kv: Tensor, query: Tensor, scale: float) -> Tensor:
    return definitions.relative(bias.inner, q[:, :, 0], kv[:, 0], query.flip(1), scale).flip(1)


definitions.define(ReversedHeads, _reversed_heads)


def _is_constant_along(allowed: Tensor, axis: int) -> bool:
    """Return whether a problem's mask is equal for all batch items (axis 0) or heads (axis 1).

    The values are compared, because a mask defined by a function does not show whether it depends on the axis.
    """
    return bool((allowed == allowed.narrow(axis, 0, 1)).all())
