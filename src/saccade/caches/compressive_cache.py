"""CompressiveCache: stores a fixed-size sum over all finished segments, and the tokens of the open segment."""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from saccade.caches.buffers import usable
from saccade.caches.cache import LayerCache
from saccade.caches.call_arguments import Call, Traffic
from saccade.caches.files.file_contents import Contents
from saccade.caches.state_tensors import Leaf
from saccade.positions.token_positions import Positions
from saccade.support.errors import unsupported
from saccade.support.language import Message
from saccade.support.torch_modes import has_values
from saccade.support.validation import check_int


@runtime_checkable
class RemembersSegments(Protocol):
    """The interface of a matrix that continues from a compressive memory of all finished segments."""

    def advance_segments(
        self, value: Tensor, memory: Tensor | None, tainted: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Return the output, the updated memory, which of its heads contain NaN or inf, and which tokens to store."""
        ...


class CompressiveCache(LayerCache):
    """A cache of bounded size for `saccade.mechanisms.CompressiveMemory`.

    It stores a sum over all finished segments, and the keys and values of the open segment: a segment is added to the
    sum only when it is complete. The result is the same as for one call on the full sequence, and as with a
    `saccade.caches.KVCache`. In a ragged batch, each item is divided into segments separately. Tokens cannot be
    subtracted from a sum, so `crop` supports only length 0. To try tokens that may be rejected, use `fork`, which
    copies nothing.

    Gradients flow to the keys and values of the current call. Stored keys and values are constants.

    Args:
        max_len: largest number of tokens; None for no limit. It does not affect the memory.

    Raises:
        ValueError: positions do not increase, or the batch size changes.
        UnsupportedError: the mechanism has no segments, a crop is to a length other than 0, or there is dropout.

    Cost: memory for at most ``batch * kv_heads * (head_dim * (value_dim + 1) + segment * (head_dim + value_dim))``
    elements, and 8 bytes for each stored token. A step reads and copies the open segment.

    Example:
        >>> import torch
        >>> from saccade import masks, mechanisms
        >>> q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
        >>> memory, causal = mechanisms.CompressiveMemory(2, 16), masks.Causal()
        >>> cache = memory.new_cache()
        >>> parts = [cache.attend(memory, *(x[:, :, i : i + 1] for x in (q, k, v)), mask=causal) for i in range(100)]
        >>> torch.allclose(torch.cat(parts, 2), memory(q, k, mask=causal) @ v, atol=1e-5)
        True
        >>> cache.nbytes
        1120
    """

    settings = ("max_len",)
    leaves: ClassVar[tuple[Leaf, ...]] = (
        Leaf("keys", "batch kv_heads open head_dim"),
        Leaf("values", "batch kv_heads open value_dim"),
        Leaf("table", "batch|1 open", "positions"),
        Leaf("memory", "batch kv_heads head_dim sums", "wide", is_optional=True),
        Leaf("tainted", "batch kv_heads", "bool", is_optional=True),
    )

    def __init__(self, max_len: int | None = None):
        super().__init__()
        self.max_len = None if max_len is None else check_int("max_len", max_len)

    @property
    def kv_positions(self) -> Tensor:
        """Positions of the tokens in the open segment, int64 ``[batch | 1, open]``; -1 for padding."""
        return self._state["table"] if self._state else torch.empty(1, 0, dtype=torch.int64)

    def advance(self, call: Call) -> Tensor:
        kind = type(call.mechanism).__name__
        if call.dropout_p:
            reason = "dropout_p is not 0, and individual weights of earlier tokens cannot be dropped from a sum"
            raise unsupported(kind, [reason], hint="KVCache() stores the tokens themselves")
        stored = {name: usable(x) for name, x in self._state.items()}
        keys, values, where = call.key, call.value, call.positions
        if stored:
            keys, values = torch.cat([stored["keys"], keys], 2), torch.cat([stored["values"], values], 2)
            where = _concatenate_positions(stored["table"], call.table)
        matrix = call.mechanism(call.query, keys, mask=call.mask, q_positions=call.positions, kv_positions=where)
        if not isinstance(matrix, RemembersSegments):
            reason = Message("{matrix} cannot be continued as a sum over segments", matrix=type(matrix).__name__)
            raise unsupported(kind, [reason], hint="KVCache() supports every mechanism")
        out, memory, tainted, is_open = matrix.advance_segments(values, stored.get("memory"), stored.get("tainted"))
        self._traffic = Traffic(
            sum(x.nbytes for x in (keys, values, memory) if x is not None), call.key.nbytes + call.value.nbytes
        )
        if call.key.shape[2]:
            tokens = {"keys": keys.detach(), "values": values.detach(), "table": where.on(keys.device)}
            self._state = _open_segment_tokens(tokens, is_open)
            sums = {"memory": memory, "tainted": tainted}
            self._state |= {name: x.detach() for name, x in sums.items() if x is not None}
        return out

    def _why_not_cropped(self, length: int) -> str:
        return (
            f"it stores one sum over the segments of {self.length} tokens, from which the last ones cannot be removed"
        )

    def _check_restored(self, contents: Contents, state: dict[str, Tensor]) -> None:
        memory, table = state.get("memory"), state["table"]
        if memory is not None and memory.shape[3] != state["values"].shape[3] + 1:
            raise contents.misfit("tensor memory")
        later = table[:, 1:] <= table[:, :-1].cummax(1).values if table.shape[1] else table
        if bool((later & (table[:, 1:] >= 0)).any()) or self.length < table.shape[1]:
            raise contents.misfit("table")


def _concatenate_positions(stored: Tensor, new: Tensor) -> Positions:
    """Concatenate the positions of stored and new tokens. Return them as a range if they are consecutive."""
    rows = max(len(stored), len(new))
    table = torch.cat([stored.expand(rows, -1), new.expand(rows, -1)], 1)
    first = Positions(None, table).consecutive_start()
    return Positions(None, table) if first is None else Positions(range(first, first + table.shape[1]))


def _open_segment_tokens(tokens: dict[str, Tensor], is_open: Tensor) -> dict[str, Tensor]:
    """Return the tokens of each item's open segment in order, padded at the end."""
    if not has_values(is_open):
        reason = "the length of the open segment follows from positions, and fake and meta tensors have no values"
        raise unsupported("CompressiveCache", [reason], hint="KVCache() stores all tokens")
    count = int(is_open.sum(1).amax()) if len(is_open) else 0
    order = (~is_open).to(torch.uint8).sort(dim=1, stable=True).indices[:, :count]
    if len(order) == 1:
        return {name: x.index_select(1 if name == "table" else 2, order[0]) for name, x in tokens.items()}
    table = tokens["table"].expand(len(order), -1).gather(1, order).masked_fill(~is_open.gather(1, order), -1)
    wide = {name: tokens[name] for name in ("keys", "values")}
    index = order[:, None, :, None]
    gathered = {name: x.gather(2, index.expand(*x.shape[:2], -1, x.shape[3])) for name, x in wide.items()}
    return gathered | {"table": table}
