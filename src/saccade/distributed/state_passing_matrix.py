"""CarriedMatrix: own rows of a mechanism whose past is one memory, which goes from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from saccade.distributed.layouts import Turn
from saccade.distributed.state_passing import Post, tied
from saccade.matrix import Matrix
from saccade.mechanisms.recurrences.recurrence_matrix import RecurrenceMatrix
from saccade.positions.token_positions import Positions
from saccade.statistics.row_block import Block
from saccade.support.errors import unsupported

__all__ = ["CarriedMatrix"]

CALLED_AS = "ContextParallel"  # in errors

_PARTS = 8  # of the heads: the next rank begins with the first of them while this one does the second


class CarriedMatrix(Matrix):
    """Own rows of a recurrence, or of causal linear attention, over a sequence that lies on many ranks.

    Args:
        make: the matrix of some own rows, which stand at given positions.
        turns: of the own rows, in their order.
        shape: (batch, heads, own rows, tokens of the whole sequence).
        post: between the ranks.
        like: a matrix of no rows.
        sources: tensors that the matrix is made of.

    Cost: a product as on one machine; one memory, ``kv_heads * head_dim * value_dim`` numbers, comes for each turn, and
    goes. Ranks wait for one another; where a matrix can be taken apart by heads, only for the first of them.
    """

    is_stochastic = False

    def __init__(
        self,
        make: Callable[[slice, Positions], Matrix],
        turns: tuple[Turn, ...],
        shape: tuple[int, int, int, int],
        post: Post,
        like: Matrix,
        sources: Sequence[Tensor],
    ):
        self._make, self._turns, self._post = make, turns, post
        self._shape, self._like, self._sources = shape, like, sources

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    @property
    def device(self) -> torch.device:
        return self._like.device

    @property
    def kv_heads(self) -> int:
        return self._like.kv_heads

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        """Refused: weights of keys that lie elsewhere are not computed here."""
        reason = "over ranks a state stands for all earlier keys, and single weights are not to be had of it"
        raise unsupported("weights", [reason], hint="one process gives them: mechanism(query, key)")

    def matmul(self, value: Tensor, *, dropout_p: float = 0.0, seed: int | None = None) -> Tensor:
        """The product with the values of the own rows, and what the memory tells of those before them."""
        if dropout_p:
            reason = "dropout_p is not 0, and single weights of earlier tokens cannot be dropped from a sum"
            raise unsupported(type(self._like).__name__, [reason])
        found = [self._turned(turn, value[:, :, turn.rows]) for turn in self._turns]
        self._post.wait()
        if not found:  # no rows, but part of the graph, as everywhere
            return value.new_zeros(*self.shape[:3], value.shape[3]) + value.sum()
        return torch.cat(found, 2)

    def _turned(self, turn: Turn, value: Tensor) -> Tensor:
        post, matrix = self._post, cast("Any", self._make(turn.rows, Positions(turn.tokens)))
        alone, is_first = turn.before is turn.behind is None, turn.rows.start == 0
        out: list[Tensor] = []
        for part, own in [(matrix, value)] if alone else _by_heads(matrix, value):
            memory = None
            if turn.before is not None:
                sources = (*self._sources, value)
                memory = post.received(turn.before, value.device, sources, is_first=is_first and not out)
                memory = memory._replace(source=part.source)
            read, after = part.advance(own, memory)
            read = read if memory is None else tied(read, memory)
            out.append(read if turn.behind is None else post.sent(read, after, turn.behind))
        return torch.cat(out, 1)


def _by_heads(matrix: Any, value: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """A matrix and its values, some heads at a time where it can be taken apart."""
    heads = matrix.shape[1]
    if not isinstance(matrix, RecurrenceMatrix):
        yield matrix, value
        return
    for chosen in torch.arange(heads).tensor_split(min(_PARTS, heads)):
        own = chosen.tolist()
        yield matrix.of_heads(own), value[:, [head * value.shape[1] // heads for head in own]]
