"""EntryCache: stores the last keys, one compressed entry for each finished block, and the tokens of the open block."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from saccade.caches.buffers import empty, usable
from saccade.caches.cache import LayerCache
from saccade.caches.call_arguments import Call, Traffic
from saccade.caches.files.file_contents import Contents
from saccade.caches.state_tensors import Leaf
from saccade.matrix import AttentionMatrix, Matrix
from saccade.matrix.block_sparse import SelectedBlocks
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.errors import unsupported, value_error
from saccade.support.torch_modes import has_values
from saccade.support.validation import check_bool, check_int

_SMALLEST = 16  # smallest number of entries to allocate memory for


class CompressesBlocks(Protocol):
    """The interface of a mechanism that compresses blocks of tokens to entries and attends to them."""

    @property
    def parts(self) -> Tensor:
        """The projected new tokens from which entries are computed, ``[batch, kv_heads, q_len, width]``."""
        ...

    def compress(self, parts: Tensor, first: int) -> tuple[Tensor, Tensor | None]:
        """Return the entries of all complete blocks in ``parts``, and their index keys.

        Both are ``[batch, kv_heads, blocks, width]``; without an indexer, the index keys are None.

        Args:
            parts: projected tokens. With overlapping blocks and ``first > 0``, they begin with the previous block.
            first: index of the first block to compress.
        """
        ...

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: object,
        q_positions: GivenPositions,
        kv_positions: GivenPositions,
        entries: int,
        start: int,
        index_key: Tensor | None,
        window_first: bool,
    ) -> Matrix:
        """Return the attention matrix over entries and tokens; see `saccade.mechanisms.entry_softmax.EntrySoftmax`."""
        ...


class EntryCache(LayerCache):
    r"""A cache of the keys in a window and of compressed entries, for `saccade.nn.CompressedAttention`.

    It stores the keys of the last ``window`` tokens, one entry for each finished block (and its index key, if the layer
    has an indexer), and the projected tokens of the open block, of which no entry exists yet. With overlapping blocks,
    it also stores the projected tokens of the block before. The result equals that of the full run.

    Positions count from 0, without gaps, and are equal for all batch items. To try tokens that may be rejected, use
    `fork`: `crop` is possible only within the open block, and by more than one token only while the window contains all
    tokens.

    Gradients flow to the keys and entries of the current call. Stored keys and entries are constants.

    Args:
        block_size: number of tokens in a block.
        window: number of last tokens to store, at least 1.
        overlap: whether an entry also depends on the block before its own.
        max_len: largest number of tokens, to allocate memory for in advance; None for no limit.

    Raises:
        ValueError: positions do not continue those in the cache, or the sizes differ from earlier calls.
        UnsupportedError: a mechanism that does not compress blocks, or a crop that would need forgotten tokens.

    Cost: memory for ``batch * ((window + entries) * head_dim + entries * index_dim + open * parts_dim)`` elements,
    where entries is at most twice their number, open is below ``2 * block_size``, and parts_dim is the width of
    projected tokens. Without gradients, a step of one token copies only its own key and, at the end of a block, the new
    entry.

    Example:
        >>> import torch
        >>> from saccade.nn import CompressedAttention
        >>> layer = CompressedAttention(16, 4, head_dim=8, rotary_dim=4, block_size=4, window=6)
        >>> cache, x = layer.new_cache(), torch.randn(1, 30, 16)
        >>> with torch.no_grad():
        ...     out = torch.cat([layer(part, cache=cache) for part in x.split([17, *[1] * 13], 1)], 1)
        >>> torch.allclose(out, layer(x), atol=1e-5), cache.entries.shape
        (True, torch.Size([1, 1, 7, 8]))

    Reference: DeepSeek-AI 2026, DeepSeek-V4.
    """

    settings = ("block_size", "window", "overlap", "max_len")
    leaves: ClassVar[tuple[Leaf, ...]] = (
        Leaf("keys", "batch kv_heads slots head_dim"),  # the ring of the window, then entries
        Leaf("pending", "batch kv_heads open parts"),
        Leaf("index_keys", "batch kv_heads entries index_dim", is_optional=True),
    )

    def __init__(self, block_size: int, window: int, *, overlap: bool = False, max_len: int | None = None):
        super().__init__()
        self.block_size, self.window = check_int("block_size", block_size), check_int("window", window)
        self.overlap = check_bool("overlap", overlap)
        self.max_len = None if max_len is None else check_int("max_len", max_len)

    @property
    def entries(self) -> Tensor | None:
        """The entries of all finished blocks, ``[batch, kv_heads, blocks, head_dim]``; None before the first call."""
        if not self._state:
            return None
        return self._state["keys"][:, :, self.window : self.window + self.length // self.block_size]

    def advance(self, call: Call) -> Tensor:
        blocks: Any = call.mechanism
        if not hasattr(blocks, "compress"):
            hint = (
                "new_cache() of a saccade.nn.CompressedAttention makes this cache; KVCache() supports every mechanism"
            )
            raise unsupported(type(blocks).__name__, ["it does not compress blocks of tokens to entries"], hint=hint)
        self._check_call(call)
        pending = self._state.get("pending")
        self._check_width("parts", pending, blocks.parts)
        parts = blocks.parts if pending is None else torch.cat([usable(pending), blocks.parts], 2)
        entries, index_keys = blocks.compress(parts, self.length // self.block_size)
        self._check_width("index keys", self._state.get("index_keys"), index_keys)
        q_len, is_plain = call.query.shape[2], call.attends_to_all_earlier and not torch.is_grad_enabled()
        if q_len == 1 and self._state and self.length + 1 >= self.window and is_plain:
            out = self._step(call, blocks, entries, index_keys)
        else:
            out = self._attend_many(call, blocks, entries, index_keys)
        if q_len:
            stop = self.length + q_len
            extra = self.block_size if self.overlap and stop >= self.block_size else 0
            self._state["pending"] = parts[:, :, parts.shape[2] - stop % self.block_size - extra :].detach().clone()
            self._shared.discard("pending")
        return out

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        numbers, tensors = super().state()
        if self._spec is not None:
            numbers["head_dim"], count = self._spec.head_dim, self.length // self.block_size
            tensors["keys"] = tensors["keys"][:, :, : self.window + count]
            if "index_keys" in tensors:
                tensors["index_keys"] = tensors["index_keys"][:, :, :count]
        return numbers, tensors

    def _step(self, call: Call, blocks: CompressesBlocks, entries: Tensor, index_keys: Tensor | None) -> Tensor:
        """Attend with one new token to a full window and all entries, without copying them."""
        start, total = self.length, (self.length + 1) // self.block_size
        keys = self._with_entries("keys", self.window, entries, call.key)
        index_key = None if index_keys is None else self._with_entries("index_keys", 0, index_keys, call.key)
        slot = keys.narrow(2, start % self.window, 1)
        before = slot.clone()
        slot.copy_(call.key)
        try:
            matrix = blocks(
                call.query,
                keys,
                mask=None,
                q_positions=None,
                kv_positions=None,
                entries=total,
                start=start,
                index_key=index_key,
                window_first=True,
            )
            columns = matrix.shape[3]  # fewer in a dry run
            out = matrix.matmul(keys if columns == keys.shape[2] else keys[:, :, :columns], dropout_p=call.dropout_p)
        except BaseException:  # a failed call changes nothing
            slot.copy_(before)
            raise
        read = _bytes_read(matrix, keys) + (0 if index_key is None else index_key.nbytes)
        self._traffic = Traffic(read, call.key.nbytes + entries.nbytes)
        return out

    def _attend_many(self, call: Call, blocks: CompressesBlocks, entries: Tensor, index_keys: Tensor | None) -> Tensor:
        """Attend with any number of new tokens to a copy of the keys that at least one of them sees."""
        start, count = self.length, self.length // self.block_size
        new_entries, index_key, tokens = entries, index_keys, [call.key]
        if self._state:
            stored = usable(self._state["keys"])
            places = torch.arange(max(0, start - self.window + 1), start, device=stored.device) % self.window
            tokens = [stored.index_select(2, places), call.key]
            entries = torch.cat([stored[:, :, self.window : self.window + count], entries], 2)
            if index_keys is not None:
                index_key = torch.cat([usable(self._state["index_keys"])[:, :, :count], index_keys], 2)
        keys = torch.cat([entries, *tokens], 2)
        matrix = blocks(
            call.query,
            keys,
            mask=call.mask,
            q_positions=None,
            kv_positions=None,
            entries=entries.shape[2],
            start=start,
            index_key=index_key,
            window_first=False,
        )
        out = matrix.matmul(keys, dropout_p=call.dropout_p)
        if call.key.shape[2]:
            self._write(call.key.detach(), new_entries.detach(), None if index_keys is None else index_keys.detach())
        read = keys.nbytes + (0 if index_key is None else index_key.nbytes)
        self._traffic = Traffic(read, call.key.nbytes + new_entries.nbytes)
        return out

    def _write(self, key: Tensor, entries: Tensor, index_keys: Tensor | None) -> None:
        """Store new entries, and the new keys that are in the window of later tokens."""
        keys, stop = self._with_entries("keys", self.window, entries, key), self.length + key.shape[2]
        last = min(self.window, key.shape[2])
        slots = torch.arange(stop - last, stop, device=key.device) % self.window
        keys[:, :, slots] = key[:, :, key.shape[2] - last :]
        if index_keys is not None:
            self._with_entries("index_keys", 0, index_keys, key)

    def _with_entries(self, name: str, before: int, new: Tensor, like: Tensor) -> Tensor:
        """Write new entries into a state tensor after ``before`` other columns, and return a view of all columns.

        New memory is allocated like ``like``, which has all dimensions that `vmap` maps.
        """
        count = self.length // self.block_size
        x, start, stop = self._state.get(name), before + count, before + count + new.shape[2]
        is_read_only = x is not None and x.is_inference() and not torch.is_inference_mode_enabled()
        if x is None or stop > x.shape[2] or name in self._shared or is_read_only:
            room = max(_SMALLEST, 2 * count) if self.max_len is None else self.max_len // self.block_size
            grown = empty(like, (*new.shape[:2], max(stop, before + room), new.shape[3]))
            if x is None:
                grown[:, :, :before].zero_()  # slots of the window are saved to files even if they are unused
            else:
                grown[:, :, :start].copy_(x[:, :, :start])
            x = self._state[name] = grown
            self._shared.discard(name)
        x.narrow(2, start, stop - start).copy_(new)
        return x.narrow(2, 0, stop)

    def _check_call(self, call: Call) -> None:
        """Raise an error unless keys are values, and the new tokens continue those in the cache."""
        if call.value is not call.key:
            rule, hint = "be the key itself: only keys are stored", "KVCache() stores separate keys and values"
            raise value_error("value", rule, "another tensor", hint=hint)
        first = self.length if not len(call.positions) else call.positions.consecutive_start()
        if first != self.length:
            reason = "blocks are counted from position 0, without gaps, and are the same for all batch items"
            raise unsupported("positions", [reason], hint="one text at a time, each with its own cache")

    def _check_width(self, name: str, stored: Tensor | None, new: Tensor | None) -> None:
        """Raise an error unless a new tensor has the width of the one in the cache, or both are None."""
        widths = [0 if x is None else x.shape[3] for x in (stored, new)]
        if self._state and widths[0] != widths[1]:
            hint = "a cache belongs to one layer and one batch: make a new one, or reorder(rows)"
            raise value_error(name, f"have width {widths[0]}, as in the cache", widths[1], hint=hint)

    def _crop(self, length: int) -> None:
        pending = self._state["pending"]
        self._state["pending"] = pending[:, :, : pending.shape[2] - (self.length - length)]
        self._tokens = Positions.ending_before(length)

    def _why_not_cropped(self, length: int) -> str | None:
        if length // self.block_size != self.length // self.block_size:
            return "it has compressed the last block of these tokens, and no longer stores the tokens themselves"
        if max(0, length - self.window + 1) < self.length - self.window:  # the next token sees a replaced one
            return f"it has forgotten tokens that were in the window {self.length - length} tokens ago"
        return None

    def _sizes(self, contents: Contents) -> dict[str, int]:
        length, width = contents.position("length"), contents.count("head_dim")
        count, extra = length // self.block_size, self.block_size if self.overlap and length >= self.block_size else 0
        sizes = {"slots": self.window + count, "entries": count, "open": length % self.block_size + extra}
        return sizes | {"head_dim": width, "value_dim": width}

    def _check_restored(self, contents: Contents, state: dict[str, Tensor]) -> None:
        if contents.has("next") or self._tokens.after != self.length:
            raise contents.misfit("next")
        keys = state["keys"]
        contents.check_room(keys, state.get("index_keys", keys[..., :0]), (self.max_len or 0) // self.block_size)


def _bytes_read(matrix: Matrix, keys: Tensor) -> int:
    """Return the number of bytes of the keys that a step reads: the selected ones, if there is a selection."""
    columns = matrix.shape[3]
    rule = matrix.inputs.rule if isinstance(matrix, AttentionMatrix) else None  # an edited matrix has no inputs
    if isinstance(rule, SelectedBlocks) and has_values(rule.index):
        columns = rule.keys_read(1, columns) // max(1, len(rule.index))
    return keys.nbytes * columns // max(1, keys.shape[2])
