"""BlockSelectCache: all keys are held, and each step reads the blocks that matter for its query."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from saccade.caches.attend_call import Call, Traffic
from saccade.caches.block_read import Reading, Seen
from saccade.caches.block_scorers import BlockScorer, BoundScorer
from saccade.caches.cache import Leaf
from saccade.caches.files.record import Contents
from saccade.caches.kv_cache import KVCache, check_softmax
from saccade.caches.per_head import attend_by_head
from saccade.caches.sparse_prefill import Selecting, blocks_of_prompt, check_prompt, set_against
from saccade.engine.kernels import native
from saccade.engine.kernels.native_plan import PANEL
from saccade.engine.tiles.stable_topk import strongest
from saccade.masks.rules.key_ranges import KeyRanges
from saccade.matrix import Matrix
from saccade.support.errors import value_error
from saccade.support.numerics import wide_dtype
from saccade.support.torch_modes import is_plain as is_plain_tensor
from saccade.support.validation import ShapeSpec, check_choice, check_int, check_type

__all__ = ["BlockSelectCache"]

_SUMMARY, _SCORES = ShapeSpec("summary [batch, kv_heads, blocks, width]"), ShapeSpec("scores [batch, heads, blocks]")


class BlockSelectCache(KVCache):
    r"""Keys and values of all tokens; a step reads the first blocks, the last ones, and those that matter to its query.

    Columns are cut into blocks of ``block_size``. A call with several tokens (a prompt, a further question) reads
    everything and is exact, unless ``prompt="sparse"``: then each of its tokens reads what a step would. A call with
    one token reads ``budget`` tokens for each key head: the ``sink_blocks`` first
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
        prompt: "dense", or "sparse": tokens that come together read no more than each would by itself, so that any
            split of a text gives the same; with a causal mask, without padding, and ``rescore_every=1``.
        max_len: as of `KVCache`; rounded up to whole blocks.

    Raises:
        ValueError: sizes that do not fit together, or what a `KVCache` refuses.
        UnsupportedError: a mechanism whose matrix is not a softmax; a sparse prompt with padding or another mask.

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

    settings = ("block_size", "budget", "sink_blocks", "local_blocks", "rescore_every", "scorer", "prompt", "max_len")
    leaves = (
        *KVCache.leaves,
        Leaf("summary", "batch kv_heads blocks width", is_optional=True, is_saved=False),
        Leaf("ranking", "batch kv_heads ranked", "wide", is_optional=True),  # the last one, if it is to be used again
    )
    numbers = ("exact_until", "age")
    equals = (
        "within the budget the full run, and after that the dense run of each step in which other blocks are hidden"
    )
    hands_on_all, needs_softmax = False, True

    exact_until: int | None  # columns before the first step that left something out
    age: int  # steps for which the ranking has been used
    _summarized: int  # blocks

    def __init__(
        self,
        block_size: int,
        budget: int,
        *,
        sink_blocks: int = 1,
        local_blocks: int = 2,
        scorer: BlockScorer | None = None,
        rescore_every: int = 1,
        prompt: Literal["dense", "sparse"] = "dense",
        max_len: int | None = None,
    ):
        super().__init__(max_len)
        self.block_size = check_int("block_size", block_size)
        self.budget = check_int("budget", budget)
        self.sink_blocks = check_int("sink_blocks", sink_blocks, 0)
        self.local_blocks = check_int("local_blocks", local_blocks)
        self.rescore_every = check_int("rescore_every", rescore_every)
        self.prompt = check_choice("prompt", prompt, ("dense", "sparse"))
        if prompt == "sparse" and rescore_every > 1:
            hint = "a ranking that is used again depends on how the text was split"
            raise value_error("rescore_every", 'be 1 with prompt="sparse"', rescore_every, hint=hint)
        if budget % block_size:
            raise value_error("budget", f"be a multiple of block_size {block_size}", budget)
        if budget < (sink_blocks + local_blocks) * block_size:
            rule = f"hold {sink_blocks} first and {local_blocks} last blocks of {block_size}"
            raise value_error("budget", rule, budget, hint="tokens for each key head, those blocks included")
        hint = "saccade.caches.MeanScorer(), BoundScorer(), or a BlockScorer of one's own"
        given = BoundScorer() if scorer is None else scorer
        self.scorer = check_type("scorer", given, BlockScorer, "be a BlockScorer or None", hint=hint)

    @property
    def exact_len(self) -> int:
        return self.length if self.exact_until is None else min(self.length, self.exact_until)

    @property
    def summary(self) -> Tensor | None:
        """What the scorer remembers of finished blocks, ``[batch, kv_heads, blocks, width]``; made when first asked."""
        return self._state["summary"][:, :, : self._summarized] if "summary" in self._state else None

    def advance(self, call: Call) -> Tensor:
        start, size = self.length, self.block_size
        if self.prompt == "sparse" and call.key.shape[2] > 1:
            return self._sparse(call)
        if call.key.shape[2] != 1 or not len(call.key) or start // size < self.budget // size:
            return super().advance(call)
        keys, _ = self._written("key", start, call.key), self._written("value", start, call.value)
        summary = self._summary_of(keys, call.kv_positions.table, start // size)
        seen = Seen.of(call)
        ranking, age, bytes_ranked = self._ranked(call, summary, seen)
        chosen, spare = self._chosen(ranking, seen)
        unfinished = range(start // size * size, start + 1)
        reading = Reading(self._state["key"], self._state["value"], chosen, spare, unfinished, size)
        if call.needs_graph:
            reading.newest = (call.key, call.value)  # gradients reach the new token; what is remembered is a constant

        def stand(rows: slice) -> Tensor:
            return seen.positions(reading, rows)

        def finish(matrix: Matrix, v: Tensor) -> tuple[Tensor]:
            check_softmax(matrix, call)
            return call.product(matrix, v)

        if seen.allowed is None and size % PANEL == 0 and self._is_read_in_place(call):
            (out,) = self._in_place(call, reading.ranges, finish)
        else:
            kv_heads, portions, sees_all = chosen.shape[1], reading.portions(), seen.allowed is None
            (out,) = attend_by_head(call, kv_heads, reading.read, stand, finish, portions=portions, sees_all=sees_all)
        self._state.pop("ranking", None)
        if self.rescore_every > 1:
            self._state["ranking"], self.age = ranking, age
        self.exact_until = start if self.exact_until is None else self.exact_until
        self._traffic = Traffic(reading.nbytes + bytes_ranked, call.key.nbytes + call.value.nbytes)
        return out

    def _sparse(self, call: Call) -> Tensor:
        """Several tokens, of which each reads what a step would read."""
        start, stop = self.length, self.length + call.key.shape[2]

        def index_of(query: Tensor, keys: Tensor) -> Tensor:
            summary = self._summary_of(keys, None, stop // self.block_size)
            return blocks_of_prompt(self, query, summary, range(start, stop))

        check_prompt(call)
        if stop <= self.budget:  # everything is read, and no block may be finished yet
            return super().advance(call)
        out = super().advance(call._replace(mechanism=Selecting(call, index_of, self.block_size)))
        if self.exact_until is None:
            self.exact_until = max(start, self.budget)
        return out

    @staticmethod
    def _is_read_in_place(call: Call) -> bool:
        """Whether a kernel will take blocks from where they lie, which spares a copy of them."""
        query = call.query
        is_plain = call.treats_heads_alike and not call.needs_graph and is_plain_tensor(query)
        return is_plain and query.is_cpu and native.is_on() and native.reads(query.dtype)

    def _in_place(
        self, call: Call, ranges: KeyRanges, finish: Callable[[Matrix, Tensor], tuple[Tensor]]
    ) -> tuple[Tensor]:
        """The product, with the key heads of all items as items."""
        batch, heads, q_len, _ = call.query.shape
        keys, values = (self._state[name][:, :, : ranges.columns].flatten(0, 1)[:, None] for name in ("key", "value"))
        query = call.query.reshape(len(keys), -1, q_len, call.query.shape[3])
        matrix = call.mechanism(query, keys, mask=ranges, q_positions=None, kv_positions=None)
        (out,) = finish(matrix, values)
        return (out.reshape(batch, heads, *out.shape[2:]),)

    def _forget(self) -> None:
        super()._forget()
        self._summarized, self.age, self.exact_until = 0, 0, None

    def _crop(self, length: int) -> None:
        super()._crop(length)
        self._state.pop("ranking", None)
        self._summarized = min(self._summarized, length // self.block_size)
        if self.exact_until is not None and length <= self.exact_until:
            self.exact_until = None

    def _summary_of(self, keys: Tensor, table: Tensor | None, finished: int) -> Tensor:
        """Summaries of the finished blocks; each is made once."""
        size, done = self.block_size, self._summarized
        if done < finished:
            blocks = keys[:, :, done * size : finished * size].unflatten(2, (finished - done, size))
            real = torch.ones(1, (finished - done) * size, dtype=torch.bool, device=keys.device)
            if table is not None:
                real = table[:, done * size : finished * size] >= 0
            with torch.no_grad():
                new = self.scorer.summarize(blocks, real.view(-1, 1, finished - done, size, 1))
            batch, kv_heads, count = blocks.shape[:3]
            _SUMMARY.check(new, batch=batch, kv_heads=kv_heads, blocks=count)
            self._written("summary", done, new)
            self._summarized = finished
        return self._state["summary"][:, :, :finished]

    def _ranked(self, call: Call, summary: Tensor, seen: Seen) -> tuple[Tensor, int, int]:
        """How high each finished block ranks, ``[batch, kv_heads, blocks]``; the age of this, and bytes read for it."""
        batch, kv_heads, blocks, _ = summary.shape
        held, query = self._state.get("ranking"), call.query[:, :, 0]
        if held is not None and self.age < self.rescore_every:
            newer = held.new_full((batch, kv_heads, blocks - held.shape[2]), -torch.inf)
            return torch.cat([held, newer], 2), self.age + 1, held.nbytes
        with torch.no_grad():
            scores = self.scorer.score(query, summary)
        _SCORES.check(scores, batch=batch, heads=query.shape[1], blocks=blocks)
        scores = scores.to(wide_dtype(query.dtype)) * query.shape[2] ** -0.5
        if not seen.is_all_real:  # blocks of padding are none that others are set against
            scores = scores.masked_fill((seen.tokens(blocks, self.block_size) == 0)[:, None], -torch.inf)
        relative = set_against(scores)
        return relative.view(batch, kv_heads, -1, blocks).amax(2), 1, summary.nbytes

    def _chosen(self, ranking: Tensor, seen: Seen) -> tuple[Tensor, Tensor | None]:
        """Blocks to read besides the unfinished one, int64 ``[batch, kv_heads, blocks]``, in any order.

        The second, bool of the same shape or None, says which of them only fill the table up and are not to be seen.
        """
        blocks, size = ranking.shape[2], self.block_size
        order = ranking.clone()
        if seen.allowed is None:
            order[..., : self.sink_blocks] = order[..., blocks - (self.local_blocks - 1) :] = torch.inf
            few = self.budget // size - 1
            return strongest(order, few) if self.prompt == "sparse" else order.topk(few, 2, sorted=False).indices, None
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

    def _check_restored(self, contents: Contents, state: dict[str, Tensor]) -> None:
        super()._check_restored(contents, state)
        self.age, self.exact_until = contents.count("age"), contents.count_or_none("exact_until", 0, self.length)
        if "ranking" in state and state["ranking"].shape[2] > self.length // self.block_size:
            raise contents.misfit("ranking")
