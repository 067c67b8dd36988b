"""BlockSelectCache: all keys are held, and each step reads the blocks that matter for its query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from saccade.attention import AttentionMatrix
from saccade.caches.block_reading import Reading
from saccade.caches.checks import check_count, check_dense_mask, check_mechanism, checked_rows
from saccade.caches.columns import Columns
from saccade.caches.kv_cache import KVCache, is_graph
from saccade.caches.layer_cache import MakesMatrix, Traffic
from saccade.caches.plain import is_plain, sees_all_before, tells_heads_apart
from saccade.caches.scorers import BlockScorer, BoundScorer
from saccade.engine.at_positions import Positions
from saccade.errors import type_error, unsupported, value_error
from saccade.finite import is_finite
from saccade.masks import Mask, as_mask
from saccade.matrix import Matrix

__all__ = ["BlockSelectCache"]


class BlockSelectCache(KVCache):
    r"""Keys and values of all tokens; a step reads the first blocks, the last ones, and those that matter to its query.

    Columns are cut into blocks of ``block_size``. A call with several tokens (a prompt, a further question) reads
    everything and is exact. A call with one token reads ``budget`` tokens for each key head: the ``sink_blocks`` first
    blocks, the ``local_blocks`` last ones, the unfinished one included, and as many *anchor blocks* as fit: the blocks
    in between that score highest for this query. Softmax then runs over what was read, with its own scores.

    Equals the run with a `KVCache` as long as no more than ``budget`` tokens are held; after that, the dense run of
    each step in which all other blocks are hidden. Nothing is forgotten: what one step leaves out the next may read.

    In a ragged batch both hold for each item: the budget counts its tokens and no padding, and blocks of nothing but
    its padding count as no blocks, neither first nor last nor in between. Blocks are cut at the batch's columns, so
    that padding may put an item's tokens into other blocks than those of its text alone.

    Heads that share keys share blocks: for each head the scores are set against one another by a softmax over blocks,
    and a block counts by the head that wants it most.

    Args:
        block_size: tokens in a block, at least 1.
        budget: tokens that a step reads for each key head: a multiple of ``block_size`` that holds at least the first
            and last blocks.
        sink_blocks: blocks at the beginning that are always read.
        local_blocks: blocks at the end that are always read, at least 1.
        scorer: ranks the blocks between; `BoundScorer` when None.
        rescore_every: steps from one ranking of the blocks to the next; in between, the last ranking counts, in which
            newer blocks come last.
        max_len: as of `KVCache`; rounded up to whole blocks.

    Raises:
        ValueError: sizes that do not fit together, or what a `KVCache` refuses.
        UnsupportedError: a mechanism whose matrix is not a softmax.

    Cost: memory of a `KVCache`, and a summary for each finished block. A step reads ``budget`` keys and values and all
    summaries, for each key head; where padding leaves blocks half empty, as many blocks as the item that needs most of
    them. With a bias, a score of its own, a sink logit, or a mask that tells heads apart, the
    arithmetic of a step (not what is read) is repeated for each key head.

    Example:
        >>> from saccade import masks, mechanisms
        >>> softmax, causal, cache = mechanisms.Softmax(), masks.Causal(), BlockSelectCache(4, 16)
        >>> q, k, v = (torch.randn(1, 2, 101, 8) for _ in range(3))
        >>> prompt = cache.attend(softmax, q[:, :, :100], k[:, :, :100], v[:, :, :100], mask=causal)
        >>> step = cache.attend(softmax, q[:, :, 100:], k[:, :, 100:], v[:, :, 100:], mask=causal)
        >>> cache.traffic.bytes_read, 101 * 2 * 16 * 4  # of all keys and values
        (4864, 12928)

    Reference: Tang et al. 2024, arXiv:2406.10774 (Quest); blocks at both ends: Xiao et al. 2024, arXiv:2402.04617.
    """

    hands_on_all = False

    def __init__(
        self,
        block_size: int,
        budget: int,
        *,
        sink_blocks: int = 1,
        local_blocks: int = 2,
        scorer: BlockScorer | None = None,
        rescore_every: int = 1,
        max_len: int | None = None,
    ):
        where = "BlockSelectCache"
        counts = {"block_size": block_size, "budget": budget, "local_blocks": local_blocks}
        for name, count in (counts | {"rescore_every": rescore_every}).items():
            check_count(where, name, count)
        check_count(where, "sink_blocks", sink_blocks, 0)
        if budget % block_size:
            raise value_error(where, "budget", f"be a multiple of block_size {block_size}", budget)
        if budget < (sink_blocks + local_blocks) * block_size:
            rule = f"hold {sink_blocks} first and {local_blocks} last blocks of {block_size}"
            raise value_error(where, "budget", rule, budget, hint="tokens for each key head, those blocks included")
        if scorer is not None and not isinstance(scorer, BlockScorer):
            hint = "saccade.caches.MeanScorer(), BoundScorer(), or a BlockScorer of one's own"
            raise type_error(where, "scorer", "be a BlockScorer or None", type(scorer).__name__, hint=hint)
        super().__init__(max_len)
        self.block_size, self.budget = block_size, budget
        self.sink_blocks, self.local_blocks, self.rescore_every = sink_blocks, local_blocks, rescore_every
        self.scorer = BoundScorer() if scorer is None else scorer
        self._keys, self._values = Columns(max_len, block_size), Columns(max_len, block_size)
        self._summaries, self._summarized = Columns(), 0
        self.ranking: tuple[Tensor | None, int] = (None, 0)  # the last one, if it is to be used again, and its uses
        self._step_traffic: Traffic | None = None
        self.exact_until: int | None = None  # columns before the first step that left something out

    @property
    def nbytes(self) -> int:
        ranking, _ = self.ranking
        own = 0 if ranking is None else ranking.untyped_storage().nbytes()
        return super().nbytes + self._summaries.nbytes + own

    @property
    def traffic(self) -> Traffic:
        """Summaries that were read count as bytes read; a ranking that is used again counts with its own size."""
        return super().traffic if self._step_traffic is None else self._step_traffic

    @property
    def exact_len(self) -> int:
        return self.length if self.exact_until is None else min(self.length, self.exact_until)

    @property
    def summary(self) -> Tensor | None:
        """What the scorer remembers of finished blocks, ``[batch, kv_heads, blocks, width]``; made when first asked."""
        return self._summaries.first(self._summarized)

    def attend(
        self,
        mechanism: MakesMatrix,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: object = None,
        positions: Positions = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        check_mechanism("BlockSelectCache.attend", mechanism)
        finished = self.length // self.block_size
        is_step = isinstance(key, Tensor) and key.dim() == 4 and key.shape[2] == 1 and len(key) > 0
        if not is_step or finished < self.budget // self.block_size:
            out = super().attend(mechanism, query, key, value, mask=mask, positions=positions, dropout_p=dropout_p)
            self._step_traffic = None
            return out
        return self._step(mechanism, query, key, value, mask, positions, dropout_p, finished)

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        like = self._keys.like
        index = checked_rows("BlockSelectCache.reorder", rows, None if like is None else like[0])
        super().reorder(index)
        if like is None:
            return
        self._summaries.reorder(index, self._summarized)
        ranking, age = self.ranking
        if ranking is not None:
            self.ranking = ranking[index.to(ranking.device)], age

    def crop(self, length: int) -> None:
        super().crop(length)
        self._summarized = min(self._summarized, length // self.block_size)
        self.ranking = (None, 0)
        if self.exact_until is not None and length <= self.exact_until:
            self.exact_until = None

    def fork(self) -> Self:
        other = type(self)(
            self.block_size,
            self.budget,
            sink_blocks=self.sink_blocks,
            local_blocks=self.local_blocks,
            scorer=self.scorer,
            rescore_every=self.rescore_every,
            max_len=self.max_len,
        )
        other._keys, other._values, other._places = self._keys.fork(), self._values.fork(), self._places
        other._summaries, other._summarized = self._summaries.fork(), self._summarized
        other.ranking, other.exact_until = self.ranking, self.exact_until
        return other

    def __repr__(self) -> str:
        return (
            f"BlockSelectCache({self.block_size}, {self.budget}, sink_blocks={self.sink_blocks}, "
            f"local_blocks={self.local_blocks}, scorer={self.scorer}, length={self.length}, nbytes={self.nbytes})"
        )

    def _check_matrix(self, matrix: Matrix, mechanism: MakesMatrix, where: str) -> None:
        if not isinstance(matrix, AttentionMatrix):
            reason = f"a {type(matrix).__name__} is no softmax, of which the largest terms could be chosen"
            raise unsupported(where, type(mechanism).__name__, [reason], hint="KVCache() fits every mechanism")

    def _step(
        self,
        mechanism: MakesMatrix,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object,
        positions: Positions,
        dropout_p: float,
        finished: int,
    ) -> Tensor:
        where = "BlockSelectCache.attend"
        start = self.length
        rule = self._checked_rule(query, key, value, mask, where)
        places, q_positions = self._places.extended(positions, key.shape[0], 1, key.device, where)
        self._keys.written(start, key)
        self._values.written(start, value)
        summary = self._summarized_to(finished)
        seen = _Seen.of(rule, q_positions, places.held, start + 1, query)
        ranking, age, bytes_ranked = self._ranked(query, summary, seen, where)
        chosen, spare = self._chosen(ranking, seen)
        unfinished = range(finished * self.block_size, start + 1)
        reading = Reading(self._keys, self._values, chosen, spare, unfinished, self.block_size)
        if is_graph(mechanism, query, key, value):
            reading.newest = (key, value)  # gradients reach the new token; what is remembered is a constant
        out = self._product(mechanism, query, reading, rule, seen, dropout_p, where)
        self._places, self.ranking = places, (ranking if self.rescore_every > 1 else None, age)
        self.exact_until = start if self.exact_until is None else self.exact_until
        self._step_traffic = Traffic(reading.nbytes + bytes_ranked, reading.column_bytes * key.shape[0] * key.shape[1])
        return out

    def _checked_rule(self, query: Tensor, key: Tensor, value: Tensor, mask: object, where: str) -> Mask | None:
        check_dense_mask(where, mask)
        self._check(query, key, value, where)
        shape = (query.shape[0], query.shape[1], 1, self.length + 1)
        return None if mask is None else as_mask(mask, shape, where=where)

    def _summarized_to(self, finished: int) -> Tensor:
        """Summaries of the finished blocks; each is made once."""
        if self._summarized < finished:
            size, done = self.block_size, self._summarized
            keys = self._keys.first(finished * size)
            assert keys is not None
            blocks = keys[:, :, done * size :].unflatten(2, (finished - done, size))
            held = self._places.held
            if isinstance(held, range):
                real = torch.ones(1, 1, finished - done, size, 1, dtype=torch.bool, device=keys.device)
            else:
                real = (held[:, done * size : finished * size] >= 0).view(-1, 1, finished - done, size, 1)
            with torch.no_grad():
                new = self.scorer.summarize(blocks, real)
            self._check_summary(new, blocks)
            self._summaries.written(done, new)
            self._summarized = finished
        summary = self._summaries.first(finished)
        assert summary is not None
        return summary

    def _check_summary(self, new: object, blocks: Tensor) -> None:
        expected = tuple(blocks.shape[:3])
        if not isinstance(new, Tensor) or new.dim() != 4 or new.shape[:3] != expected:
            got = list(new.shape) if isinstance(new, Tensor) else type(new).__name__
            rule = f"summarize blocks as [{', '.join(map(str, expected))}, width]"
            raise value_error("BlockSelectCache", "scorer", rule, got)

    def _ranked(self, query: Tensor, summary: Tensor, seen: _Seen, where: str) -> tuple[Tensor, int, int]:
        """How high each finished block ranks, ``[batch, kv_heads, blocks]``; the age of this, and bytes read for it."""
        batch, kv_heads, blocks, width = summary.shape
        held, age = self.ranking
        if held is not None and age < self.rescore_every:
            newer = held.new_full((batch, kv_heads, blocks - held.shape[2]), -torch.inf)
            return torch.cat([held, newer], 2), age + 1, held.numel() * held.element_size()
        with torch.no_grad():
            scores = self.scorer.score(query[:, :, 0], summary)
        expected = (batch, query.shape[1], blocks)
        if not isinstance(scores, Tensor) or scores.shape != expected:
            got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise value_error(where, "scorer", f"score blocks as {list(expected)}", got)
        scores = scores.to(torch.float64 if query.dtype == torch.float64 else torch.float32) * query.shape[3] ** -0.5
        if not seen.is_all_real:  # blocks of padding are none that others are set against
            scores = scores.masked_fill((seen.tokens(blocks, self.block_size) == 0)[:, None], -torch.inf)
        relative = scores.log_softmax(2)
        if not is_finite(relative):
            broken = scores.isnan()  # a block that holds a NaN is read, as the dense run reads it
            relative = scores.masked_fill(broken, -torch.inf).log_softmax(2)
            relative = relative.masked_fill(broken, torch.inf).masked_fill(relative.isnan() & ~broken, -torch.inf)
        grouped = relative.view(batch, kv_heads, -1, blocks).amax(2)
        return grouped, 1, batch * kv_heads * blocks * width * summary.element_size()

    def _chosen(self, ranking: Tensor, seen: _Seen) -> tuple[Tensor, Tensor | None]:
        """Blocks to read besides the unfinished one, int64 ``[batch, kv_heads, blocks]``, in any order.

        The second, bool of the same shape or None, says which of them only fill the table up and are not to be seen.
        """
        blocks, size = ranking.shape[2], self.block_size
        order = ranking.clone()
        if seen.allowed is None:
            order[..., : self.sink_blocks] = order[..., blocks - (self.local_blocks - 1) :] = torch.inf
            return order.topk(self.budget // size - 1, 2, sorted=False).indices, None
        tokens = seen.tokens(blocks, size)
        has_some = tokens > 0
        before, after = has_some.cumsum(1), has_some.flip(1).cumsum(1).flip(1)
        at_ends = has_some & ((before <= self.sink_blocks) | (after <= self.local_blocks - 1))
        order = order.clamp(min=torch.finfo(order.dtype).min).masked_fill(at_ends[:, None], torch.inf)
        some = seen.allowed[..., : blocks * size].unflatten(-1, (blocks, size)).any(-1)[:, :, 0]
        if some.shape[1] > 1:
            some = some.view(some.shape[0], ranking.shape[1], -1, blocks).any(2)
        order = order.masked_fill(~some, -torch.inf)
        if seen.is_all_real:
            # Of blocks that none may see there may be too few others: what is then read besides is hidden by the mask.
            return order.topk(self.budget // size - 1, 2, sorted=False).indices, None
        # Padding fills no budget: an item reads more blocks where they hold fewer tokens.
        rank, index = order.sort(dim=2, descending=True)
        counted = tokens[:, None].expand_as(index).gather(2, index).cumsum(2)
        left = self.budget - seen.real[:, blocks * size :].sum(1)
        is_read = (counted <= left[:, None, None]) & (rank > -torch.inf)
        width = int(is_read.sum(2).max())
        return index[..., :width], ~is_read[..., :width]

    def _product(
        self,
        mechanism: MakesMatrix,
        query: Tensor,
        reading: Reading,
        rule: Mask | None,
        seen: _Seen,
        dropout_p: float,
        where: str,
    ) -> Tensor:
        batch, heads, _, width = query.shape
        kv_heads = reading.chosen.shape[1]
        plain = is_plain(mechanism)
        if plain and not tells_heads_apart(rule):
            # Each key head of each item as a batch item of its own.
            folded = query.reshape(batch * kv_heads, heads // kv_heads, 1, width)
            parts = []
            for rows in reading.portions():
                k, v = reading.read(rows)
                where_q, where_kv = (None, None) if seen.allowed is None else seen.places(reading, rows)
                own = None if seen.allowed is None else rule
                matrix = mechanism(
                    folded[rows.start : rows.stop], k[:, None], mask=own, q_positions=where_q, kv_positions=where_kv
                )
                self._check_matrix(matrix, mechanism, where)
                parts.append(matrix.matmul(v[:, None], dropout_p=dropout_p))
            return torch.cat(parts).view(batch, heads, 1, -1)
        group, parts = heads // kv_heads, []
        for g in range(kv_heads):
            rows = range(g, batch * kv_heads, kv_heads)
            k, v = (x[:, None].expand(-1, kv_heads, -1, -1) for x in reading.read(rows))
            where_q, where_kv = seen.places(reading, rows)
            matrix = mechanism(query, k, mask=rule, q_positions=where_q, kv_positions=where_kv)
            self._check_matrix(matrix, mechanism, where)
            parts.append(matrix.matmul(v, dropout_p=dropout_p)[:, g * group : (g + 1) * group])
        return torch.cat(parts, 1)


class _Seen(NamedTuple):
    """Which columns the new token may see, and where things stand.

    Args:
        allowed: bool ``[batch | 1, heads | 1, 1, columns]``; None if all are.
        real: where a token stands, bool ``[batch | 1, columns]``.
        is_all_real: whether there is no padding.
        q_positions: int64 ``[batch | 1, 1]``.
        kv_positions: int64 ``[batch | 1, columns]``.
    """

    allowed: Tensor | None
    real: Tensor
    is_all_real: bool
    q_positions: Tensor
    kv_positions: Tensor | range

    @classmethod
    def of(
        cls, rule: Mask | None, q_positions: range | Tensor, held: range | Tensor, columns: int, query: Tensor
    ) -> _Seen:
        device = query.device
        q = _table(q_positions, device)
        if isinstance(held, range) and sees_all_before(rule):
            return cls(None, torch.ones(1, 1, dtype=torch.bool, device=device).expand(1, columns), True, q, held)
        kv = _table(held, device)
        real = kv >= 0
        allowed = real[:, None, None]
        if rule is not None:
            apart = tells_heads_apart(rule)
            b = torch.arange(query.shape[0] if apart else 1, device=device)[:, None, None, None]
            h = torch.arange(query.shape[1] if apart else 1, device=device)[None, :, None, None]
            allowed = allowed & rule.allows(b, h, q[:, None, :, None], kv[:, None, None, :])
        return cls(allowed, real, isinstance(held, range) or bool(real.all()), q, kv)

    def tokens(self, blocks: int, size: int) -> Tensor:
        """How many tokens the first blocks hold, int64 ``[batch | 1, blocks]``."""
        return self.real[:, : blocks * size].unflatten(1, (blocks, size)).sum(2)

    def places(self, reading: Reading, rows: range) -> tuple[Tensor, Tensor]:
        """Positions of queries ``[rows, 1]`` and of the columns read ``[rows, columns]``, for some key heads."""
        columns = reading.columns(rows)
        items = torch.tensor(rows, device=columns.device) // reading.chosen.shape[1]
        q = self.q_positions[items if len(self.q_positions) > 1 else torch.zeros_like(items)]
        if isinstance(self.kv_positions, range):
            return q, columns + self.kv_positions.start
        table = self.kv_positions.expand(int(items.max()) + 1, -1) if len(self.kv_positions) == 1 else self.kv_positions
        where = table[items].gather(1, columns)
        spare = reading.is_spare(rows)
        return q, where if spare is None else where.masked_fill(spare, -1)


def _table(positions: range | Tensor, device: torch.device) -> Tensor:
    if isinstance(positions, range):
        return torch.arange(positions.start, positions.stop, device=device)[None]
    return torch.atleast_2d(positions.to(device))
