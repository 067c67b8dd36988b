"""LayerCache: what one attention layer remembers, as settings and a state from which everything else follows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from torch import Tensor

from saccade.caches.attend_call import Call, Like, MakesMatrix, Traffic
from saccade.caches.next_position import Upcoming
from saccade.caches.replays import OUTSIDE, Region, refuse_replay
from saccade.caches.validation import check_call, check_crop, check_tensors, checked_rows
from saccade.masks import Mask, as_mask
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.argument_hints import AnswersCalls
from saccade.support.errors import type_error, unsupported, value_error
from saccade.support.validation import check_int

if TYPE_CHECKING:
    from saccade.caches.files.record import Contents

__all__ = ["LayerCache", "Leaf"]

_NO_TOKENS = Positions(range(0))


class Leaf(NamedTuple):
    """One tensor of a cache's state, as the class declares it.

    Args:
        name: in the state, and in files.
        axes: names of its sizes, ``"batch kv_heads columns head_dim"``; ``batch|1`` where items may share a row, and
            ``columns`` where only the first `LayerCache.length` count.
        dtype: ``float`` (that of the keys), ``wide`` (float32, or float64 with float64 keys), ``positions`` (int64, -1
            where no token stands), ``int8`` or ``bool``.
        is_optional: whether a cache may go without it.
        is_saved: whether files hold it.
    """

    name: str
    axes: str
    dtype: str = "float"
    is_optional: bool = False
    is_saved: bool = True


class LayerCache(AnswersCalls):
    """What one attention layer remembers. An object of its own, handed from call to call; no module holds one.

    The law of every cache: a prefill, then extend and decode steps of any sizes, equal the full run, for every causal
    mask. A cache that forgets says in ``equals`` which other run it equals.

    A cache of one's own names its ``settings`` and ``leaves``, and says in `advance` what comes out of a call and what
    stays of it. `fork`, `reorder`, ``crop(0)``, `nbytes`, ``repr`` and `state` follow.

    Attributes:
        settings: arguments of the constructor, kept as attributes of the same names.
        leaves: the tensors of the state, batch first; they are in ``_state``, by name, as soon as something is held.
        numbers: attributes that belong to the state as well, ints and bools.
        keeps_order: whether columns are held in the order in which they came, so that positions may be anything.
        hands_on_all: whether the mechanism is handed the keys of all tokens so far, in their order.
        max_len: most columns; None for any number.
        equals: the run without a cache that this one equals.
    """

    settings: ClassVar[tuple[str, ...]] = ()
    leaves: ClassVar[tuple[Leaf, ...]] = ()
    numbers: ClassVar[tuple[str, ...]] = ()
    keeps_order: ClassVar[bool] = False
    hands_on_all: ClassVar[bool] = False
    equals: ClassVar[str] = "the full run"
    max_len: int | None = None

    _state: dict[str, Tensor]
    _shared: set[str]  # leaves whose memory a fork may hold as well: nobody writes there
    _tokens: Positions | Upcoming
    _like: Like | None
    _traffic: Traffic
    _region: Region = OUTSIDE  # in which it was made, forked or emptied

    def __init__(self) -> None:
        self._forget()

    @property
    def length(self) -> int:
        """Columns seen: tokens of a batch item, padding included."""
        tokens = self._tokens
        return tokens.length if isinstance(tokens, Upcoming) else len(tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, spare room included; memory shared with a fork counts in both."""
        return sum(x.nbytes for x in self._state.values()) + self._tokens.nbytes

    @property
    def traffic(self) -> Traffic:
        """What the last `attend` read and appended; nothing before the first."""
        return self._traffic

    def positions(self, q_len: int) -> range | Tensor | None:
        """Where the next ``q_len`` tokens will stand: a range, or int64 ``[batch, q_len]`` where items differ."""
        self.check_not_replayed()
        return self._tokens.next(check_int("q_len", q_len, 0)).given

    def attend(
        self,
        mechanism: MakesMatrix,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """Remember new keys and values, and attend to all that is remembered.

        Args:
            mechanism: makes the matrix of queries and keys.
            query: ``[batch, heads, q_len, head_dim]``.
            key: ``[batch, kv_heads, q_len, head_dim]``, of the new tokens only.
            value: ``[batch, kv_heads, q_len, value_dim]``.
            mask: who may attend to whom, read at positions.
            positions: where the new tokens stand; `positions` of the cache when None; -1 means no token.
            dropout_p: of the weights in this product.

        Returns:
            ``[batch, heads, q_len, value_dim]``. If the call fails, the cache is as it was before.

        Raises:
            UnsupportedError: gradient checkpointing, unless the cache was made inside the checkpointed function.
        """
        self.check_not_replayed()
        if not callable(mechanism) or isinstance(mask, Tensor):
            check_call(mechanism, mask)
        self._check_new(query, key, value)
        batch, _, q_len, _ = query.shape
        if mask is not None and not isinstance(mask, Mask):
            mask = as_mask(mask, (*query.shape[:3], self.length + q_len))
        tokens = self._tokens
        new = tokens.next(q_len) if positions is None else Positions.of(positions, length=q_len, batch=batch)
        if isinstance(tokens, Upcoming):
            tokens, held = tokens.extended(new, batch, key.device), new
        else:
            tokens, new = tokens.extended(new, batch, key.device)
            held = tokens
        out = self.advance(Call(mechanism, query, key, value, mask, new, held, dropout_p))
        self._tokens = tokens  # only now do the new columns count
        if self._like is None and self._state:
            self._like = Like.of(key, value)
        return out

    def advance(self, call: Call) -> Tensor:
        """What comes out of a call, ``[batch, heads, q_len, value_dim]``; keeps of it what later calls need.

        If it fails, it has changed nothing that counts. Columns are counted by `attend`, after it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define advance(call), or attend")

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Keep these batch items, in this order; they may repeat, and be fewer or more than before."""
        like = self._like
        index = checked_rows(rows, None if like is None else like.batch)
        if like is None or index.tolist() == list(range(like.batch)):
            return
        for leaf in self.leaves:
            x = self._state.get(leaf.name)
            if x is not None:
                is_one = leaf.axes.startswith("batch|1") and len(x) == 1
                self._state[leaf.name] = x.clone() if is_one else self._selected(x, index.to(x.device))
        self._tokens, self._like = self._tokens.reordered(index), like._replace(batch=len(index))
        self._shared.clear()

    def crop(self, length: int) -> None:
        """Forget all columns but the first ``length``; a cache that cannot says why, and goes back to 0 at least."""
        check_crop(length, self.length)
        if length == 0:
            self._empty()
            self._region = Region.current()
        elif length < self.length:
            reason = self._why_not_cropped(length)
            if reason is not None:
                hint = "fork() before the tokens that may have to go; KVCache() crops anywhere"
                raise unsupported(f"length={length}", [reason], hint=hint)
            self._crop(length)

    def fork(self) -> Self:
        """An independent copy: what happens to one does not show in the other. Memory is shared until one writes."""
        other = copy.copy(self)
        other._state, other._traffic = dict(self._state), Traffic(0, 0)
        self._shared, other._shared = set(self._state), set(self._state)
        other._region = Region.current()
        return other

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Numbers and tensors that say all that is held: what a file holds beside the settings."""
        tokens, tensors = self._tokens, {}
        for leaf in self.leaves:
            if leaf.is_saved and leaf.name in self._state and self.length:
                x = self._state[leaf.name]
                tensors[leaf.name] = x[:, :, : self.length] if "columns" in leaf.axes else x
        numbers = {name: getattr(self, name) for name in self.numbers}
        if isinstance(tokens, Positions):
            numbers["first"] = tokens.run.start if tokens.run else 0 if self.length else None
            if tokens.table is not None:
                tensors["positions"] = tokens.table
        else:
            numbers |= {"length": tokens.length, "next": -1 if isinstance(tokens.at, Tensor) else tokens.at}
            tensors |= {"next": tokens.at} if isinstance(tokens.at, Tensor) else {}
        return numbers, tensors

    def restore(self, contents: Contents) -> None:
        """Take up the state of another cache with the same settings; nothing that a file says is believed unseen."""
        if contents.is_empty(self.leaves):
            return
        state, sizes, like = contents.state(self.leaves, self._sizes(contents))
        if self.keeps_order:
            given = contents.positions(like.batch, sizes["columns"])
            tokens = Positions.of(given, length=sizes["columns"], batch=like.batch)
            self._tokens, _ = _NO_TOKENS.extended(tokens, like.batch, like.device)
        else:
            self._tokens = Upcoming(contents.position("length"), contents.upcoming(like.batch, state.get("table")))
        if self.max_len is not None and self.length > self.max_len:
            raise contents.misfit("max_len")
        self._check_restored(contents, state)
        self._state, self._like = state, like

    def __repr__(self) -> str:
        told = [f"{name}={getattr(self, name)!r}" for name in (*self.settings, "length", "nbytes")]
        return f"{type(self).__name__}({', '.join(told)})"

    def check_not_replayed(self) -> None:
        """Raise where gradient checkpointing replays a change of this cache."""
        if Region.current().repeats(self._region):
            refuse_replay()

    def _forget(self) -> None:
        """Hold nothing."""
        self._region = Region.current()
        self._state, self._shared, self._like, self._traffic = {}, set(), None, Traffic(0, 0)
        self._tokens = _NO_TOKENS if self.keeps_order else Upcoming()

    def _empty(self) -> None:
        """Forget all columns; the room for them may stay."""
        self._forget()

    def _crop(self, length: int) -> None:
        """Forget all columns but the first ``length``: at least 1, and fewer than there are."""

    def _why_not_cropped(self, length: int) -> str | None:
        """Why there is no way back to so many columns; None if there is."""
        return "what later tokens did to it cannot be undone"

    def _check_new(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise where new keys and values do not fit together, those before, or ``max_len``."""
        if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
            check_tensors(query, key, value)
        q, k, v = query.shape, key.shape, value.shape
        is_alike = len(q) == len(k) == len(v) == 4 and q[0] == k[0] == v[0] and q[2] == k[2] == v[2] and k[1] == v[1]
        if not is_alike or not query.dtype == key.dtype == value.dtype:
            check_tensors(query, key, value)
        like = (k[0], k[1], k[3], v[3], key.dtype, key.device)
        if self._like is not None and self._like != like:
            self._check_like(self._like, Like(*like))
        if self.max_len is not None and self.length + k[2] > self.max_len:
            got, hint = f"{self.length} held and {k[2]} new", f"{type(self).__name__}() grows; crop(length) forgets"
            raise value_error("tokens", f"fit in max_len {self.max_len}", got, hint=hint)

    def _selected(self, x: Tensor, rows: Tensor) -> Tensor:
        """These batch items of a leaf, in memory of their own."""
        return x[rows]

    def _check_like(self, held: Like, new: Like) -> None:
        """Raise where new keys and values cannot stand beside those held, which are unlike them."""
        hint = "a cache belongs to one layer and one batch: make a new one, or reorder(rows)"
        for name, old, own in zip(Like._fields, held, new, strict=True):
            if old != own:
                was, got = (str(x).removeprefix("torch.") for x in (old, own))
                what = f"{name} of {'value' if name == 'value_dim' else 'key'}"
                error = type_error if name == "dtype" else value_error
                raise error(what, f"be {was}, as in the cache", got, hint=hint)

    def _sizes(self, contents: Contents) -> dict[str, int]:
        """Sizes of leaves that are known before these are read."""
        return {}

    def _check_restored(self, contents: Contents, state: dict[str, Tensor]) -> None:
        """Raise where a file says what no such cache could have written; reads the cache's own numbers."""
