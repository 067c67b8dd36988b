"""SinkWindowCache: the first tokens and the last ones, and constant memory however long the text."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade import masks
from saccade.arguments import instance, integer
from saccade.attention import AttentionMatrix
from saccade.caches.cache import LayerCache, Leaf
from saccade.caches.call import Call, Traffic
from saccade.caches.files.contents import Contents
from saccade.caches.memory import usable
from saccade.caches.upcoming import Upcoming
from saccade.errors import unsupported, value_error
from saccade.matrix import Matrix
from saccade.positions import Rotary
from saccade.positions.tokens import GivenPositions, Positions

__all__ = ["SinkWindowCache"]

_FARTHEST = 1 << 62  # beyond all positions
Index = Tensor | slice


class SinkWindowCache(LayerCache):
    r"""Keys and values of the first ``sink_tokens`` tokens and of the last ``window``; all others are forgotten.

    Without ``rotary`` tokens keep their positions, and it equals the dense run with the layer's mask
    ``& masks.streaming(sink_tokens, window)``: any causal mask, any split of the text into calls, ragged batches too.
    The first tokens then drift ever farther away from the query.

    With ``rotary``, that of the layer, positions are counted inside the cache, as if the text consisted of the tokens
    held: it equals, for each token, the dense run over these at positions 0, 1, 2, …. No distance is then larger than
    in a text of ``sink_tokens + window`` tokens, however long the stream. Keys are held as they came and turned once,
    on reading: the window keeps its distances, and only the first tokens are moved up to it.

    It remembers nothing in between: what leaves the window is gone.

    Args:
        sink_tokens: positions at the beginning that are kept, at least 0.
        window: last tokens that are kept, the newest included, at least 1.
        rotary: the layer's own, to count positions inside the cache; None to leave them as they are.

    Raises:
        ValueError: sizes out of range, tokens that stand before earlier ones, or another batch than before.
        UnsupportedError: a crop to where tokens are missing; with ``rotary``, a mask that reads more than distances,
            tokens that do not stand at 0, 1, 2, …, or a long call with anything but a softmax without a sink logit.

    Cost: memory ``batch * kv_heads * (sink_tokens + window) * (head_dim + value_dim)`` elements, taken at once, and 8
    bytes for each token held of each item (of all, if they stand alike). A step reads what is held.

    Example:
        >>> from saccade import masks, mechanisms
        >>> softmax, cache = mechanisms.Softmax(), SinkWindowCache(2, 4)
        >>> q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
        >>> parts = [cache.attend(softmax, *(x[:, :, i : i + 1] for x in (q, k, v))) for i in range(20)]
        >>> dense = softmax(q, k, mask=masks.streaming(2, 4)) @ v
        >>> torch.allclose(torch.cat(parts, 2), dense, atol=1e-5), cache.nbytes
        (True, 816)

    Reference: Xiao et al. 2024, arXiv:2309.17453, section 3.2 (StreamingLLM).
    """

    settings = ("sink_tokens", "window", "rotary")
    leaves: ClassVar[tuple[Leaf, ...]] = (
        Leaf("keys", "batch kv_heads slots head_dim"),
        Leaf("values", "batch kv_heads slots value_dim"),
        # With rotary the first keys as they came; in the slots they are turned.
        Leaf("sinks", "batch kv_heads sink_tokens head_dim", is_optional=True),
        Leaf("table", "batch|1 slots", "positions"),
    )
    numbers = ("is_run",)
    equals = "the dense run with masks.streaming(sink_tokens, window)"

    is_run: bool  # whether tokens stand at 0, 1, 2, … in every item
    _tokens: Upcoming

    def __init__(self, sink_tokens: int, window: int, *, rotary: Rotary | None = None):
        super().__init__()
        where, rule, hint = "SinkWindowCache", "be a saccade Rotary or None", "the layer's own, for instance mha.rotary"
        self.sink_tokens, self.window = integer(where, "sink_tokens", sink_tokens, 0), integer(where, "window", window)
        self.rotary = None if rotary is None else instance(where, "rotary", rotary, Rotary, rule, hint=hint)
        self._slots = self.sink_tokens + self.window

    @property
    def kv_positions(self) -> Tensor:
        """Where the tokens held stand, int64 ``[batch | 1, sink_tokens + window]``, in no order; -1 where none is."""
        return self._state["table"] if self._state else torch.full((1, self._slots), -1)

    def advance(self, call: Call) -> Tensor:
        table, q_len = call.table, call.key.shape[2]
        run = range(self.length, self.length + q_len)
        is_run = self.is_run and (call.positions.run == run or bool((table == Positions(run).on(table.device)).all()))
        if self.rotary is not None:
            self._check_inside(call, table)
        if q_len == 1 and self._state:
            out = self._step(call, table, is_run=is_run)
        else:
            out = self._long(call, table)
            if q_len:
                self._write(call, table)
        self.is_run = is_run
        return out

    def _forget(self) -> None:
        super()._forget()
        self.is_run = True

    def _why_not_cropped(self, length: int) -> str | None:
        if not self.is_run:
            return "the tokens of its items do not stand at 0, 1, 2, …, one in each column"
        if self.length > self._slots:
            return f"it has let tokens go that were in the window {self.length - length} tokens ago"
        return None

    def _crop(self, length: int) -> None:
        self._state["table"] = self._state["table"].masked_fill(self._state["table"] >= length, -1)
        self._tokens = self._tokens._replace(length=length, at=length)

    def _step(self, call: Call, table: Tensor, *, is_run: bool) -> Tensor:
        """One token: it takes the place of the one that leaves the window, and attends to what is held."""
        before = self._write(call, table)
        used = min(self.length + 1, self._slots) if is_run else self._slots  # slots fill up one by one
        try:
            q_positions, kv_positions = table, self._state["table"][:, :used]
            if self.rotary is not None:
                q_positions, kv_positions = self._turn_sinks(self.rotary, table, kv_positions)
            keys, values = self._state["keys"], self._state["values"]
            if call.needs_graph:  # which must not hold memory that is written to later; the new token gets gradients
                keys, values = keys.clone(), values.clone()
                self._put({"keys": keys, "values": values}, call, table)
            keys, values = keys[:, :, :used], values[:, :, :used]
            if is_run and call.sees_all_before and call.treats_heads_alike:
                matrix = call.mechanism(call.query, keys, mask=None, q_positions=None, kv_positions=None)
            else:
                mask = call.mask if self.rotary is not None else self._joined(call.mask)
                matrix = call.mechanism(call.query, keys, mask=mask, q_positions=q_positions, kv_positions=kv_positions)
            out = matrix.matmul(values, dropout_p=call.dropout_p)
        except BaseException:
            for x, index, old in before:  # a call that fails leaves no trace
                x[index] = old
            raise
        self._traffic = Traffic(keys.nbytes + values.nbytes, call.key.nbytes + call.value.nbytes)
        return out

    def _long(self, call: Call, table: Tensor) -> Tensor:
        """Several tokens: each sees its own window, of what is held and of the others."""
        keys, values = call.key, call.value
        kv_positions: GivenPositions = call.positions
        if self._state:
            held_keys, held = self._state["keys"], self._state["table"]
            if "sinks" in self._state:
                held_keys = torch.cat([self._state["sinks"], held_keys[:, :, self.sink_tokens :]], 2)
            keys, values = torch.cat([held_keys, keys], 2), torch.cat([self._state["values"], values], 2)
            rows = max(len(held), len(table))
            kv_positions = torch.cat([held.expand(rows, -1), table.expand(rows, -1)], 1)
        self._traffic = Traffic(keys.nbytes + values.nbytes, call.key.nbytes + call.value.nbytes)

        def matrix(query: Tensor, mask: masks.Mask, q_positions: GivenPositions) -> Matrix:
            return call.mechanism(query, keys, mask=mask, q_positions=q_positions, kv_positions=kv_positions)

        if self.rotary is None or not table.numel() or int(table.max()) < self._slots:
            return matrix(call.query, self._joined(call.mask), call.positions).matmul(values, dropout_p=call.dropout_p)
        near, first = masks.Causal() & masks.Window(self.window - 1, 0), masks.Prefix(max(1, self.sink_tokens))
        parts: list[tuple[Tensor, masks.Mask, GivenPositions]] = [
            (call.query, near & ~first if self.sink_tokens else near, call.positions)
        ]
        if self.sink_tokens:
            # To move a key up by so many positions is to move the query back by as many.
            inside = table.clamp(max=self._slots - 1)
            parts.append((self.rotary(self.rotary.unrotate(call.query, table), inside), masks.Causal() & first, inside))
        outs, logs = [], []
        for query, mask, q_positions in parts:
            part = matrix(query, mask if call.mask is None else mask & call.mask, q_positions)
            if not isinstance(part, AttentionMatrix) or not part.is_stochastic:
                reason = "tokens beyond sink_tokens + window are seen from two places, and two softmaxes are merged"
                hint = "give the text in calls of one token, or without rotary"
                raise unsupported(call.where, type(call.mechanism).__name__, [reason], hint=hint)
            outs.append(part.matmul(values, dropout_p=call.dropout_p))
            logs.append(part.lse)
        return _merged(outs, logs)

    def _make_own(self, call: Call, table: Tensor) -> None:
        """Take memory that may be written to, with a row of the table for each item where items differ."""
        key, value = call.key, call.value
        if not self._state:
            # Zeros: what is in a slot without a token is hidden, but must not be NaN.
            sizes = {"keys": (key, self._slots), "values": (value, self._slots)}
            if self.rotary is not None and self.sink_tokens:
                sizes["sinks"] = (key, self.sink_tokens)
            self._state = {name: x.new_zeros(*x.shape[:2], size, x.shape[3]) for name, (x, size) in sizes.items()}
            self._state["table"] = torch.full((1, self._slots), -1, dtype=torch.int64, device=key.device)
        for name, x in self._state.items():
            self._state[name] = x.clone() if name in self._shared else usable(x)
        self._shared.clear()
        if len(self._state["table"]) < len(table):
            self._state["table"] = self._state["table"].repeat(len(table), 1)

    def _write(self, call: Call, table: Tensor) -> list[tuple[Tensor, Any, Tensor]]:
        """Keep of the new tokens what later ones need; returns what was overwritten, and where."""
        self._make_own(call, table)
        return self._put(self._state, call._replace(key=call.key.detach(), value=call.value.detach()), table)

    def _put(self, leaves: dict[str, Tensor], call: Call, table: Tensor) -> list[tuple[Tensor, Any, Tensor]]:
        """Write the new tokens that are kept into their slots; returns what was overwritten, and where."""
        new = {"keys": call.key, "values": call.value, "sinks": call.key, "table": table[:, None, :, None]}
        before, all_kept = [], self._kept(call.positions.run, table, _FARTHEST)
        for name, x in leaves.items():
            kept = all_kept if name != "sinks" else self._kept(call.positions.run, table, self.sink_tokens)
            if kept is not None:
                row, column, slot = kept
                own, index = x[:, None, :, None] if name == "table" else x, (row, slice(None), slot)
                before.append((own, index, own[index].detach().clone()))
                own[index] = new[name][row, :, column]
        return before

    def _kept(self, run: range | None, table: Tensor, stop: int) -> tuple[Index, Index, Index] | None:
        """Items, columns and slots of the new tokens before ``stop`` that later ones need; None if there is none."""
        if run is not None and len(run) == 1:
            place, sinks = run[0], self.sink_tokens
            slot = place if place < sinks else sinks + (place - sinks) % self.window
            return (slice(None), slice(None), slice(slot, slot + 1)) if place < stop else None
        is_kept = (table < self.sink_tokens) | (table > table.amax(1, keepdim=True) - self.window)
        rows, columns = (is_kept & (table >= 0) & (table < stop)).nonzero(as_tuple=True)
        return rows if len(table) > 1 else slice(None), columns, self._slot(table[rows, columns])

    def _turn_sinks(self, rotary: Rotary, q_table: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Move the first tokens up to the window; returns positions inside the cache, of the query and of the slots."""
        shift = (q_table - (self._slots - 1)).clamp(min=0)  # [batch | 1, 1]; of an item without a token 0
        first = torch.arange(table.shape[1], device=table.device) < self.sink_tokens
        inside = torch.where(first | (table < 0), table, table - shift)
        if self.sink_tokens:
            own = torch.arange(self.sink_tokens, device=table.device)
            turned = rotary(rotary.unrotate(self._state["sinks"], own), own + shift)
            self._state["keys"][:, :, : self.sink_tokens] = turned
        return q_table - shift, inside

    def _slot(self, positions: Tensor) -> Tensor:
        """Where a token is kept: the first ones for good, the others in turn."""
        later = self.sink_tokens + (positions - self.sink_tokens) % self.window
        return torch.where(positions < self.sink_tokens, positions, later)

    def _joined(self, rule: masks.Mask | None) -> masks.Mask:
        own = masks.streaming(self.sink_tokens, self.window)
        return own if rule is None else own & rule

    def _check_inside(self, call: Call, table: Tensor) -> None:
        """Raise unless positions may be counted inside the cache."""
        reasons = []
        if call.mask is not None and not call.mask.is_relative:
            reasons.append(f"positions are counted inside the cache, and {call.mask} reads more than distances")
        before = torch.as_tensor(self._tokens.at, device=table.device).expand(len(table))
        count = (table >= 0).cumsum(1) - 1 + before[:, None]
        if bool(((table >= 0) & (table != count)).any()):
            reasons.append("positions are counted inside the cache, and tokens do not stand at 0, 1, 2, … in the text")
        if reasons:
            raise unsupported(
                call.where, "rotary", reasons, hint="SinkWindowCache without rotary leaves positions alone"
            )

    def _check_new(self, where: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        super()._check_new(where, query, key, value)
        if self.rotary is not None and self.rotary.head_dim != key.shape[3]:
            raise value_error(where, "rotary", f"be made for head_dim {key.shape[3]}", self.rotary.head_dim)

    def _sizes(self, contents: Contents) -> dict[str, int]:
        return {"slots": self._slots, "sink_tokens": self.sink_tokens}

    def restore(self, contents: Contents) -> None:
        super().restore(contents)
        if contents.value("is_run") is not self.is_run:
            raise contents.misfit("is_run")

    def _check_restored(self, contents: Contents, state: dict[str, Tensor]) -> None:
        self.is_run, after = contents.value("is_run") is True, self._tokens.at
        if self.rotary is not None and self.rotary.head_dim != state["keys"].shape[3]:
            raise contents.misfit("rotary")
        if ("sinks" in state) != (self.rotary is not None and self.sink_tokens > 0):
            raise contents.misfit("tensor sinks")
        # Each position has a slot of its own; where tokens stand one by one, it is known which ones are there.
        slot, table = torch.arange(self._slots, device=state["table"].device), state["table"]
        is_wrong = (table >= 0) & (self._slot(table) != slot)
        if self.is_run:
            later = slot + (self.length - 1 - slot).div(self.window, rounding_mode="floor") * self.window
            newest = torch.where(slot < self.sink_tokens, slot, later)
            is_wrong |= table != torch.where(slot < self.length, newest, -1)
        if bool(is_wrong.any()) or (self.is_run and (isinstance(after, Tensor) or after != self.length)):
            raise contents.misfit("table")


def _merged(outs: list[Tensor], logs: list[Tensor]) -> Tensor:
    """One softmax of several over different keys."""
    total = torch.stack(logs).logsumexp(0)
    shares = [(log - total).nan_to_num(nan=0.0).exp()[..., None] * ~total.isinf()[..., None] for log in logs]
    return sum((share * out for share, out in zip(shares, outs, strict=True)), torch.zeros(())).to(outs[0].dtype)
