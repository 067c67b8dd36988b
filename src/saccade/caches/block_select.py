"""BlockSelectCache: stores all keys, but reads only the blocks that matter for each step's query."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.caches.attend_by_head import attend_by_head
from saccade.caches.block_read import BlockRead, VisibleColumns
from saccade.caches.call_arguments import Call, Traffic, check_readable
from saccade.caches.files.file_contents import Contents
from saccade.caches.kv_cache import KVCache, check_softmax
from saccade.caches.state_tensors import Leaf
from saccade.engine.kernels import native
from saccade.engine.kernels.native_arguments import PANEL
from saccade.masks import Causal
from saccade.masks.rules.key_ranges import KeyRanges
from saccade.matrix import Matrix
from saccade.matrix.block_sparse import restrict_to_blocks, stable_topk
from saccade.scorers.block_scorers import BlockBounds, BlockScorer, score_rows, summarize_blocks
from saccade.support.errors import unsupported, value_error
from saccade.support.numerics import is_finite, wide_dtype
from saccade.support.torch_modes import is_plain as is_plain_tensor
from saccade.support.validation import check_choice, check_int, check_type

_ENTRIES = 1 << 21  # number of block scores computed at a time


class BlockSelectCache(KVCache):
    r"""A cache of all keys and values. A decoding step reads only the first, last and highest-scoring blocks.

    Columns are divided into blocks of ``block_size``. A call with several tokens (a prompt, a further question) reads
    everything and is exact. With ``prompt="sparse"``, each of its tokens instead reads the blocks that a decoding step
    would read. A call with one token reads ``budget`` tokens for each key head: the first ``sink_blocks`` blocks, the
    last ``local_blocks`` blocks (including the unfinished one), and *anchor blocks*, which are the blocks in between
    with the highest scores for this query. The softmax of the mechanism then runs over these tokens.

    The result equals that of a `KVCache` while at most ``budget`` tokens are stored. After that, the result of each
    step equals dense attention in which all other blocks are masked. Nothing is forgotten: the next step may read
    blocks that this step skips.

    In a ragged batch, this holds for each item. An item's budget counts its tokens but not its padding, and blocks
    that contain only padding are ignored. Block boundaries are the same for all items of the batch, so padding may put
    tokens into different blocks than without a batch.

    Heads that share keys read the same blocks. Each head's scores are normalised by a softmax over blocks, and a
    block's score is the maximum over these heads.

    Args:
        block_size: number of tokens in a block, at least 1.
        budget: number of tokens that a step reads for each key head, a multiple of ``block_size`` that is large enough
            for the first and last blocks.
        sink_blocks: number of blocks at the beginning that are always read.
        local_blocks: number of blocks at the end that are always read, at least 1; the last may be unfinished.
        scorer: ranks the other blocks; `saccade.scorers.BlockBounds` when None.
        rescore_every: blocks are ranked again after this many steps. Steps in between reuse the last ranking, with
            newer blocks ranked last.
        prompt: "dense" or "sparse". With "sparse", each token of a call reads only the blocks that it would read in a
            step, so the result does not depend on how a sequence is split into calls. This requires a causal mask, no
            padding, and ``rescore_every=1``.
        max_len: see `KVCache`; rounded up to full blocks.

    Raises:
        ValueError: sizes do not fit together, or a `KVCache` rejects an argument.
        UnsupportedError: the matrix of the mechanism is not a softmax, or a sparse prompt has padding or a mask that is
            not causal.

    Cost: the memory of a `KVCache`, plus a summary for each finished block. For each key head, a step reads ``budget``
    keys and values and all summaries. If padding leaves blocks partly empty, all items read as many blocks as the item
    that needs the most. With a bias, a custom score, a sink logit, or a mask that differs between heads, a step
    repeats its arithmetic (but not its reads) for each key head.

    Example:
        >>> from saccade import masks, mechanisms
        >>> softmax, causal, cache = mechanisms.Softmax(), masks.Causal(), BlockSelectCache(4, 16)
        >>> q, k, v = (torch.randn(1, 2, 101, 8) for _ in range(3))
        >>> prompt = cache.attend(softmax, q[:, :, :100], k[:, :, :100], v[:, :, :100], mask=causal)
        >>> step = cache.attend(softmax, q[:, :, 100:], k[:, :, 100:], v[:, :, 100:], mask=causal)
        >>> cache.traffic.bytes_read, 101 * 2 * 16 * 4  # bytes of all keys and values
        (4864, 12928)

    Reference: Tang et al. 2024, arXiv:2406.10774 (Quest); blocks at both ends: Xiao et al. 2024, arXiv:2402.04617.
    """

    settings = ("block_size", "budget", "sink_blocks", "local_blocks", "rescore_every", "scorer", "prompt", "max_len")
    leaves = (
        *KVCache.leaves,
        Leaf("summary", "batch kv_heads blocks width", is_optional=True, is_saved=False),
        Leaf("ranking", "batch kv_heads ranked", "wide", is_optional=True),  # the last ranking, if steps reuse it
    )
    numbers = ("exact_until", "age")
    equivalent_run = (
        "the full run up to the budget; beyond it, for each step, the dense run that hides the other blocks"
    )
    exposes_all_keys, needs_softmax = False, True

    exact_until: int | None  # number of columns before the first step that skipped blocks
    age: int  # number of steps that have used the last ranking
    _summarized: int  # number of blocks with a summary

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
            hint = "a reused ranking depends on how the sequence was split into calls"
            raise value_error("rescore_every", 'be 1 with prompt="sparse"', rescore_every, hint=hint)
        if budget % block_size:
            raise value_error("budget", f"be a multiple of block_size {block_size}", budget)
        if budget < (sink_blocks + local_blocks) * block_size:
            rule = f"cover {sink_blocks} first and {local_blocks} last blocks of {block_size} tokens"
            raise value_error(
                "budget", rule, budget, hint="the budget counts tokens per key head, including those blocks"
            )
        hint = "saccade.scorers.BlockMeans(), BlockBounds(), or a subclass of BlockScorer"
        scorer = BlockBounds() if scorer is None else scorer
        self.scorer = check_type("scorer", scorer, BlockScorer, "be a BlockScorer or None", hint=hint)

    @property
    def exact_len(self) -> int:
        return self.length if self.exact_until is None else min(self.length, self.exact_until)

    @property
    def summary(self) -> Tensor | None:
        """The scorer's summaries of finished blocks, ``[batch, kv_heads, blocks, width]``; None if there are none."""
        return self._state["summary"][:, :, : self._summarized] if "summary" in self._state else None

    def advance(self, call: Call) -> Tensor:
        check_readable(call.query, call.key, call.value)
        start, size = self.length, self.block_size
        if self.prompt == "sparse" and call.key.shape[2] > 1:
            return self._advance_sparse(call)
        if call.key.shape[2] != 1 or not len(call.key) or start // size < self.budget // size:
            return super().advance(call)
        keys, _ = self._write_columns("key", start, call.key), self._write_columns("value", start, call.value)
        summary = self._summary_of(keys, call.kv_positions.table, start // size)
        visible = VisibleColumns.of(call)
        ranking, age, bytes_ranked = self._rank(call, summary, visible)
        blocks, hidden = self._select(ranking, visible)
        unfinished = range(start // size * size, start + 1)
        read = BlockRead(self._state["key"], self._state["value"], blocks, hidden, unfinished, size)
        if call.needs_graph:
            read.newest = (call.key, call.value)  # gradients reach the new token; stored keys are constants

        def positions(rows: slice) -> Tensor:
            return visible.positions(read, rows)

        def finish(matrix: Matrix, v: Tensor) -> tuple[Tensor]:
            check_softmax(matrix, call)
            return call.product(matrix, v)

        if visible.allowed is None and size % PANEL == 0 and self._is_read_in_place(call):
            (out,) = self._read_in_place(call, read.ranges, finish)
        else:
            kv_heads, portions, sees_all = blocks.shape[1], read.portions(), visible.allowed is None
            (out,) = attend_by_head(call, kv_heads, read.read, positions, finish, portions=portions, sees_all=sees_all)
        self._state.pop("ranking", None)
        if self.rescore_every > 1:
            self._state["ranking"], self.age = ranking, age
        self.exact_until = start if self.exact_until is None else self.exact_until
        self._traffic = Traffic(read.nbytes + bytes_ranked, call.key.nbytes + call.value.nbytes)
        return out

    def _advance_sparse(self, call: Call) -> Tensor:
        """Attend with several tokens. Each token reads the blocks that it would read in a decoding step."""
        start, stop = self.length, self.length + call.key.shape[2]

        def select(query: Tensor, keys: Tensor) -> Tensor:
            summary = self._summary_of(keys, None, stop // self.block_size)
            return self._select_for_prompt(query, summary, start)

        _check_sparse_prompt(call)
        if stop <= self.budget:  # all blocks are read; possibly none is finished yet
            return super().advance(call)
        out = super().advance(call._replace(mechanism=_BlockSparseMechanism(call, select, self.block_size)))
        if self.exact_until is None:
            self.exact_until = max(start, self.budget)
        return out

    @staticmethod
    def _is_read_in_place(call: Call) -> bool:
        """Return whether a kernel can read the selected blocks in place, without a copy."""
        query = call.query
        is_plain = call.treats_heads_alike and not call.needs_graph and is_plain_tensor(query)
        return is_plain and query.is_cpu and native.is_on() and native.reads(query.dtype)

    def _read_in_place(
        self, call: Call, ranges: KeyRanges, finish: Callable[[Matrix, Tensor], tuple[Tensor]]
    ) -> tuple[Tensor]:
        """Return the attention output for blocks that are read in place, treating each key head as a batch item."""
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
        """Return the summaries used to rank finished blocks. Each summary is computed only once."""
        size, done = self.block_size, self._summarized
        if done < finished:
            blocks = keys[:, :, done * size : finished * size].unflatten(2, (finished - done, size))
            real = torch.ones(1, (finished - done) * size, dtype=torch.bool, device=keys.device)
            if table is not None:
                real = table[:, done * size : finished * size] >= 0
            with torch.no_grad():
                new = summarize_blocks(self.scorer, blocks, real.view(-1, 1, finished - done, size, 1))
            self._write_columns("summary", done, new)
            self._summarized = finished
        return self._state["summary"][:, :, :finished]

    def _rank(self, call: Call, summary: Tensor, visible: VisibleColumns) -> tuple[Tensor, int, int]:
        """Rank finished blocks. Return scores ``[batch, kv_heads, blocks]``, their age in steps, and the bytes read."""
        batch, kv_heads, blocks, _ = summary.shape
        last = self._state.get("ranking")
        if last is not None and self.age < self.rescore_every:
            newer = last.new_full((batch, kv_heads, blocks - last.shape[2]), -torch.inf)
            return torch.cat([last, newer], 2), self.age + 1, last.nbytes
        scores = self._scores(call.query, summary)[:, :, 0]
        if not visible.is_all_real:  # blocks of padding are excluded from the softmax over blocks
            scores = scores.masked_fill((visible.tokens(blocks, self.block_size) == 0)[:, None], -torch.inf)
        return log_shares(scores).view(batch, kv_heads, -1, blocks).amax(2), 1, summary.nbytes

    def _scores(self, query: Tensor, summary: Tensor) -> Tensor:
        """Return scaled scores of blocks, ``[batch, heads, rows, blocks]``, for ``query [batch, heads, rows, dim]``."""
        with torch.no_grad():
            return score_rows(self.scorer, query, summary).to(wide_dtype(query.dtype)) * query.shape[3] ** -0.5

    def _select(self, ranking: Tensor, visible: VisibleColumns) -> tuple[Tensor, Tensor | None]:
        """Return the blocks that a step reads in addition to the unfinished one, int64 ``[batch, kv_heads, blocks]``.

        The second result, bool of the same shape, marks entries to ignore: they pad items that read fewer blocks than
        others. It is None if there are no such entries.
        """
        blocks, size = ranking.shape[2], self.block_size
        order = ranking.clone()
        if visible.allowed is None:
            order[..., : self.sink_blocks] = order[..., blocks - (self.local_blocks - 1) :] = torch.inf
            top_blocks = self.budget // size - 1
            return stable_topk(order, top_blocks) if self.prompt == "sparse" else order.topk(
                top_blocks, 2, sorted=False
            ).indices, None
        tokens = visible.tokens(blocks, size)
        has_tokens = tokens > 0
        before, after = has_tokens.cumsum(1), has_tokens.flip(1).cumsum(1).flip(1)
        at_ends = has_tokens & ((before <= self.sink_blocks) | (after <= self.local_blocks - 1))
        order = order.clamp(min=torch.finfo(order.dtype).min).masked_fill(at_ends[:, None], torch.inf)
        is_visible = visible.allowed[..., : blocks * size].unflatten(-1, (blocks, size)).any(-1)[:, :, 0]
        if is_visible.shape[1] > 1:
            is_visible = is_visible.view(is_visible.shape[0], ranking.shape[1], -1, blocks).any(2)
        order = order.masked_fill(~is_visible, -torch.inf)
        if visible.is_all_real:
            # If fewer blocks are visible than fit into the budget, masked blocks are read too, with weight 0.
            return order.topk(self.budget // size - 1, 2, sorted=False).indices, None
        # Padding does not count towards the budget: an item reads more blocks if they contain fewer tokens.
        rank, index = order.sort(dim=2, descending=True)
        counted = tokens[:, None].expand_as(index).gather(2, index).cumsum(2)
        left = self.budget - visible.real[:, blocks * size :].sum(1)
        is_read = (counted <= left[:, None, None]) & (rank > -torch.inf)
        width = int(is_read.sum(2).max())
        return index[..., :width], ~is_read[..., :width]

    def _select_for_prompt(self, query: Tensor, summary: Tensor, start: int) -> Tensor:
        """Return the blocks that each prompt token reads, int32 ``[batch, kv_heads, tokens, blocks]``, ascending.

        Args:
            query: ``[batch, heads, tokens, head_dim]``.
            summary: summaries of all finished blocks, ``[batch, kv_heads, blocks, width]``.
            start: the column of the prompt's first token.
        """
        batch, heads, tokens, _ = query.shape
        kv_heads, finished, size = summary.shape[1], summary.shape[2], self.block_size
        top_blocks, unused = self.budget // size - 1, -(-(start + tokens) // size)
        index_of_block = torch.arange(finished, device=query.device)
        parts = []
        step = max(1, _ENTRIES // max(1, batch * heads * finished))
        for first in range(0, tokens, step):
            part = query[:, :, first : first + step]
            before = torch.arange(first, first + part.shape[2], device=query.device) + start
            before = before.div_(size, rounding_mode="floor")[:, None]  # number of finished blocks
            scores = self._scores(part, summary).masked_fill(index_of_block >= before, -torch.inf)
            order = log_shares(scores).unflatten(1, (kv_heads, -1)).amax(2)
            at_ends = (index_of_block < self.sink_blocks) | (index_of_block >= before - (self.local_blocks - 1))
            order = order.masked_fill(at_ends, torch.inf).masked_fill(index_of_block >= before, -torch.inf)
            order = F.pad(order, (0, max(0, top_blocks - finished)), value=-torch.inf)
            index = stable_topk(order, top_blocks)
            index = index.masked_fill(order.gather(-1, index) == -torch.inf, unused)
            parts.append(torch.cat([index, before.expand(*index.shape[:3], 1)], -1).int().sort(-1).values)
        return torch.cat(parts, 2)

    def _check_restored(self, contents: Contents, state: dict[str, Tensor]) -> None:
        super()._check_restored(contents, state)
        self.age, self.exact_until = contents.count("age"), contents.count_or_none("exact_until", 0, self.length)
        if "ranking" in state and state["ranking"].shape[2] > self.length // self.block_size:
            raise contents.misfit("ranking")


class _BlockSparseMechanism(nn.Module):
    """A wrapper that restricts each query of a sparse prompt to its selected key blocks.

    Args:
        call: the cache call, with the mechanism to wrap.
        select: maps the queries and all keys to block indices; see `saccade.matrix.block_sparse`.
        size: number of keys in a block.
    """

    def __init__(self, call: Call, select: Callable[[Tensor, Tensor], Tensor], size: int):
        super().__init__()
        self.mechanism, self.call, self._select, self._size = call.mechanism, call, select, size

    def forward(self, query: Tensor, key: Tensor, **options: Any) -> Matrix:
        """Return the attention matrix of the call, restricted to the selected key blocks."""
        matrix: Any = self.mechanism(query, key, **options)
        check_softmax(matrix, self.call)
        with torch.no_grad():
            index = self._select(query, key)
        return restrict_to_blocks(matrix, index, self._size)


def _check_sparse_prompt(call: Call) -> None:
    """Raise an error unless blocks can be selected for all tokens of a sparse prompt in one pass."""
    reasons = []
    if not isinstance(call.kv_positions.given, range):
        reasons.append("it has padding or explicit positions")
    if type(call.mask) is not Causal:
        reasons.append("its mask is not masks.Causal()")
    if reasons:
        raise unsupported('prompt="sparse"', reasons, hint='prompt="dense", or one token at a time')


def log_shares(scores: Tensor) -> Tensor:
    """Return the log softmax of block scores, or inf for a NaN score.

    A block with a NaN score is therefore always selected, and the output is NaN, as in full attention.
    """
    shares = scores.log_softmax(-1)
    if is_finite(shares):
        return shares
    is_nan = scores.isnan()
    shares = scores.masked_fill(is_nan, -torch.inf).log_softmax(-1)
    return shares.masked_fill(is_nan, torch.inf).masked_fill(shares.isnan() & ~is_nan, -torch.inf)
