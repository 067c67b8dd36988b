"""The `Case` class: a mask, the same mask as a function of plain integers, sizes and options."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from saccade.masks import Full, Mask
from saccade.positions import Bias
from saccade.scores import Score
from saccade.testing.problem import Problem

Rule = Callable[[int, int, int, int], bool]
Positions = tuple[int, ...] | tuple[tuple[int, ...], ...]
_Module = TypeVar("_Module", bound=nn.Module)


class Inputs(NamedTuple):
    """The random input tensors of a test case; ``bias`` and ``sink_logit`` may be None."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    sink_logit: Tensor | None


@dataclasses.dataclass(frozen=True)
class Case:
    """A test case for the laws, which consists of a mask, sizes and options. Every new mask should get a case.

    Args:
        name: the name in reports and test ids.
        mask: the mask; if None, every pair is allowed.
        rule: the same mask as a function ``(b, h, q, kv) -> bool`` of plain ints, where q and kv are positions.
            It is the reference, so that laws also detect mistakes in the mask. If None, ``mask.to_dense`` is used
            instead.
        batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim: sizes.
        key_dim: width of the keys; if None, the width of the queries, which most scores require.
        bias: shape of a random bias, which broadcasts to ``[batch, heads, q_len, kv_len]``.
        scale, softcap: options of the function, if not None.
        sink: whether each head has a sink with a random logit.
        score: the score that compares queries and keys; if None, the dot product.
        relative: a relative bias, a function of distances.
        q_positions, kv_positions: positions of tokens (-1 is padding), per item if nested. By default key j is at
            position j and query i at ``kv_len - q_len + i``.
        seed: the seed of the random inputs.
    """

    name: str
    mask: Mask | None = None
    rule: Rule | None = None
    batch: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    q_len: int = 7
    kv_len: int = 7
    head_dim: int = 8
    value_dim: int = 8
    key_dim: int | None = None
    bias: tuple[int, int, int, int] | None = None
    scale: float | None = None
    softcap: float | None = None
    sink: bool = False
    score: Score | None = None
    relative: Bias | None = None
    q_positions: Positions | None = None
    kv_positions: Positions | None = None
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the options that a function must support to be tested on this case."""
        names = ("bias", "scale", "softcap", "score", "relative")
        return tuple(name for name in names if getattr(self, name) is not None) + ("sink_logit",) * self.sink

    @property
    def explicit_positions(self) -> tuple[str, ...]:
        """The names among ``q_positions`` and ``kv_positions`` for which the case sets explicit positions."""
        return tuple(name for name in ("q_positions", "kv_positions") if getattr(self, name) is not None)

    @cached_property
    def allowed(self) -> Tensor:
        """The dense mask that the rule defines, bool ``[batch, num_heads, q_len, kv_len]``; True = may attend."""
        shape = (self.batch, self.num_heads, self.q_len, self.kv_len)
        if self.rule is None:
            return self._dense_mask()
        rows = [
            [q is not None and kv is not None and self.rule(b, h, q, kv) for kv in keys]
            for b in range(self.batch)
            for queries, keys in [self.positions_of_item(b)]
            for h in range(self.num_heads)
            for q in queries
        ]
        return torch.tensor(rows, dtype=torch.bool).reshape(shape)

    @cached_property
    def is_causal(self) -> bool:
        """Whether no query of the case may attend to a later key."""
        future = dataclasses.replace(self, rule=lambda b, h, q, kv: kv > q).allowed
        return not bool((self.allowed & future).any())

    def with_seed(self, seed: int) -> Case:
        """Return a copy of the case with ``seed`` added to its seed; for 0, return the case itself."""
        if seed == 0:
            return self
        other = dataclasses.replace(self, seed=self.seed + seed)
        names: tuple[str, ...] = ("allowed", "is_causal")
        for name in names:  # these do not depend on the seed, and are slow to compute
            if name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]
        return other

    def positions_of_item(self, b: int) -> tuple[list[int | None], list[int | None]]:
        """Return the positions of the queries and of the keys of batch item ``b``, with None for padding."""
        default = range(self.kv_len - self.q_len, self.kv_len), range(self.kv_len)
        return _item_positions(self.q_positions, b, default[0]), _item_positions(self.kv_positions, b, default[1])

    def inputs(self, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Inputs:
        """Draw the case's tensors from a normal distribution in float64, and round them to the given dtype."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

        return Inputs(
            query=normal(self.batch, self.num_heads, self.q_len, self.head_dim),
            key=normal(self.batch, self.num_kv_heads, self.kv_len, self.key_dim or self.head_dim),
            value=normal(self.batch, self.num_kv_heads, self.kv_len, self.value_dim),
            bias=None if self.bias is None else normal(*self.bias),
            sink_logit=normal(self.num_heads) if self.sink else None,
        )

    def problem(self, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Problem:
        """Build the `Problem` of the case from its tensors and frozen copies of its modules, in the given dtype."""
        query, key, value, bias, sink_logit = self.inputs(dtype, device)

        def frozen_copy(module: _Module | None) -> _Module | None:
            return None if module is None else copy.deepcopy(module).to(device, dtype).requires_grad_(False)

        return Problem(
            query,
            key,
            value,
            self.allowed.to(device),
            mask=self.mask,
            bias=bias,
            scale=self.scale,
            softcap=self.softcap,
            sink_logit=sink_logit,
            score=frozen_copy(self.score),
            relative=frozen_copy(self.relative),
            q_positions=None if self.q_positions is None else torch.tensor(self.q_positions, device=device),
            kv_positions=None if self.kv_positions is None else torch.tensor(self.kv_positions, device=device),
            seed=self.seed,
        )

    def _dense_mask(self) -> Tensor:
        # Without a mask, only padding is masked.
        return (Full() if self.mask is None else self.mask).to_dense(
            self.q_len,
            self.kv_len,
            batch=self.batch,
            heads=self.num_heads,
            q_positions=None if self.q_positions is None else torch.tensor(self.q_positions),
            kv_positions=None if self.kv_positions is None else torch.tensor(self.kv_positions),
        )


def _item_positions(positions: Positions | None, b: int, default: range) -> list[int | None]:
    if positions is None:
        return list(default)
    rows = [row for row in positions if isinstance(row, tuple)]
    return [p if p >= 0 else None for p in (rows[b] if rows else positions) if isinstance(p, int)]


def seeded(build: Callable[[], _Module], seed: int = 0) -> _Module:
    """Build a module and fill its parameters with seeded normal numbers; with zeros, mistakes could go unnoticed."""
    with torch.random.fork_rng(devices=()):
        module = build()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module
