"""A mechanism whose keys lie on many ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from saccade.distributed.transfer import Fetch, agree
from saccade.errors import unsupported, value_error
from saccade.masks import Mask, as_mask
from saccade.matrix import Matrix
from saccade.mechanisms import Differential, Mechanism, Softmax, TopK
from saccade.positions import Bias
from saccade.positions.tokens import GivenPositions, Positions
from saccade.statistics.block import Block

if TYPE_CHECKING:
    from saccade.distributed.context import ContextParallel

__all__ = ["SpreadMatrix", "SpreadMechanism"]

_OF_SEEN_KEYS = (Softmax, TopK, Differential)  # whose rows follow from the keys that their queries may attend to


class SpreadMechanism(Mechanism):
    """A mechanism over ranks: each makes the rows of its own queries, over the keys that these can see.

    Args:
        mechanism: what is made; one whose rows follow from the keys that their queries can see.
        context: the ranks.

    Raises:
        UnsupportedError: a mechanism that sums up all keys.
    """

    def __init__(self, mechanism: Mechanism, context: ContextParallel):
        super().__init__()
        if not isinstance(mechanism, _OF_SEEN_KEYS):
            name = type(mechanism).__name__
            reason = f"{name} sums up all keys, and over ranks only rows of keys that are seen can be made"
            raise unsupported("ContextParallel", name, [reason], hint="Softmax, TopK and Differential run over ranks")
        self.mechanism, self.context = mechanism, context

    @property
    def treats_heads_alike(self) -> bool:
        return self.mechanism.treats_heads_alike

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        return self.mechanism.reasons(mask)

    def with_bias(self, bias: Tensor | Bias) -> Mechanism:
        return SpreadMechanism(self.mechanism.with_bias(bias), self.context)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> SpreadMatrix:
        context = self.context
        seq_len = context._seq_len(query.shape[2], None)
        stands = context.positions(seq_len, query.device)
        for name, given in (("q_positions", q_positions), ("kv_positions", kv_positions)):
            _check_positions(name, given, stands, len(query))
        rule = as_mask(mask, (*query.shape[:2], seq_len, seq_len), where="ContextParallel")
        plan = context.plan(query, key, rule, seq_len, ["a matrix has the own rows of all heads"])
        if context.checks:
            agree(f"{plan.fingerprint} {query.shape} {key.shape}", context.group, query.device, "ContextParallel")
        fetch = context._fetch(plan, query.device)
        own = self.mechanism(query, fetch(key), mask=rule, q_positions=stands, kv_positions=fetch.columns)
        return SpreadMatrix(own, fetch)


class SpreadMatrix(Matrix):
    """Own rows of a matrix, over the keys that they can see.

    Args:
        matrix: of the own queries and the keys that were fetched.
        fetch: how values come.
    """

    def __init__(self, matrix: Matrix, fetch: Fetch):
        self.matrix, self._fetch = matrix, fetch

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.matrix.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    @property
    def kv_heads(self) -> int:
        return self.matrix.kv_heads

    @property
    def is_stochastic(self) -> bool:
        return self.matrix.is_stochastic

    @property
    def columns(self) -> Tensor:
        """Positions of the keys, int64 ``[kv_len]``."""
        return self._fetch.columns

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        return self.matrix.blocks(batch, head, rows)

    def matmul(self, value: Tensor, *, dropout_p: float = 0.0, seed: int | None = None) -> Tensor:
        """The product with the values of the own rows, and those that come from other ranks."""
        if dropout_p and seed is None:
            raise value_error("ContextParallel", "seed", "be given with dropout, the same on every rank", None)
        return self.matrix.matmul(self._fetch(value), dropout_p=dropout_p, seed=seed)


def _check_positions(name: str, given: GivenPositions, stands: Tensor, batch: int) -> None:
    """Raise unless positions are those of the own rows, in all batch items."""
    if given is None:
        rule, hint = "be given: those of the own rows", "positions=cp.positions(seq_len)"
        raise value_error("ContextParallel", name, rule, None, hint=hint)
    found = Positions.of(given, "ContextParallel", name, length=len(stands), batch=batch)
    if not torch.equal(found.on(stands.device), stands.expand(batch, -1)[: len(found.on())]):
        rule, hint = "be those of the own rows, in order", "positions=cp.positions(seq_len)"
        raise value_error("ContextParallel", name, rule, "others", hint=hint)
