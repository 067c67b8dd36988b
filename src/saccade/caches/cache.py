"""LayerCache: the base class of caches for one attention layer. A cache consists of settings and state."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from saccade.caches.call_arguments import (
    OUTSIDE,
    Call,
    KeyValueSpec,
    MakesMatrix,
    Region,
    Traffic,
    check_call,
    check_crop,
    check_tensors,
    checked_rows,
)
from saccade.caches.files.file_contents import Contents
from saccade.caches.state_tensors import Leaf
from saccade.masks import Mask, as_mask
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.argument_hints import ArgumentHints
from saccade.support.errors import type_error, unsupported, value_error
from saccade.support.torch_modes import CACHED, can_hold, has_values, is_transformed, outside_graph
from saccade.support.validation import check_int

_NO_TOKENS = Positions(range(0))


class LayerCache(ArgumentHints):
    """The base class of caches that store what one attention layer needs from earlier tokens.

    The caller passes the cache to each call; no module stores it. For every causal mask, a prefill followed by calls
    with any number of new tokens gives the same result as one call on the full sequence. A cache that forgets tokens
    instead gives the result that its ``equivalent_run`` describes.

    With fake or meta tensors, a cache returns outputs of the right shapes. Positions without values are assumed to be
    valid and to contain no padding.

    A custom cache declares its ``settings`` and ``leaves``. Its `advance` returns the output of a call and stores what
    later calls need. `fork`, `reorder`, ``crop(0)``, `nbytes`, ``repr`` and `state` then work without further code.

    Attributes:
        settings: names of the constructor's arguments. Each is stored as an attribute with the same name.
        leaves: declarations of the state tensors. Their first axis is the batch. Once the cache contains tokens,
            ``_state`` maps their names to the tensors.
        numbers: names of the scalar attributes (int or bool) that are also part of the state.
        keeps_order: whether columns are stored in order of arrival, so that positions may be in any order.
        exposes_all_keys: whether the mechanism receives the keys of all tokens so far, in order.
        max_len: largest number of columns; None for no limit.
        equivalent_run: describes the call on the full sequence, without a cache, that has the same result.
    """

    settings: ClassVar[tuple[str, ...]] = ()
    leaves: ClassVar[tuple[Leaf, ...]] = ()
    numbers: ClassVar[tuple[str, ...]] = ()
    keeps_order: ClassVar[bool] = False
    exposes_all_keys: ClassVar[bool] = False
    equivalent_run: ClassVar[str] = "the full run"
    max_len: int | None = None

    _state: dict[str, Tensor]
    _shared: set[str]  # leaves whose memory a fork may share, so they must not be written in place
    _length: int
    _tokens: Positions  # positions of all columns; without `keeps_order`, the last position of each item
    _spec: KeyValueSpec | None
    _traffic: Traffic
    _region: Region = OUTSIDE  # the region in which the cache was constructed, forked or cleared

    def __init__(self) -> None:
        self._forget()

    @property
    def length(self) -> int:
        """Number of columns in the cache: the tokens of one batch item, including padding."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Memory of the cache in bytes, including unused capacity. Memory shared with a fork is counted in both."""
        return sum(x.nbytes for x in self._state.values()) + self._tokens.nbytes

    @property
    def traffic(self) -> Traffic:
        """Number of bytes that the last `attend` read and appended; 0 before the first call."""
        return self._traffic

    def positions(self, q_len: int) -> range | Tensor | None:
        """Return the positions of the next ``q_len`` tokens: a range, or int64 ``[batch, q_len]`` if items differ."""
        self.check_not_replayed()
        return self._tokens.following(check_int("q_len", q_len, 0)).given

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
        """Store new keys and values, and attend to all stored keys and values.

        Args:
            mechanism: maps queries and keys to an attention matrix.
            query: ``[batch, heads, q_len, head_dim]``.
            key: ``[batch, kv_heads, q_len, head_dim]``, of the new tokens only.
            value: ``[batch, kv_heads, q_len, value_dim]``.
            mask: which queries may attend to which keys, as a rule on token positions.
            positions: positions of the new tokens, -1 for padding; when None, those that the method `positions`
                returns.
            dropout_p: dropout probability of the attention weights.

        Returns:
            ``[batch, heads, q_len, value_dim]``. If the call fails, the cache does not change.

        Raises:
            UnsupportedError: gradient checkpointing, unless the cache was created inside the checkpointed function.
        """
        if torch.compiler.is_dynamo_compiling():
            run = outside_graph(self.attend, CACHED)
            return run(mechanism, query, key, value, mask=mask, positions=positions, dropout_p=dropout_p)
        self.check_not_replayed()
        if not callable(mechanism) or isinstance(mask, Tensor):
            check_call(mechanism, mask)
        if not self.exposes_all_keys and getattr(mechanism, "needs_all_keys", False):
            reason = "its weights depend on the keys in between, and this cache does not provide all of them"
            raise unsupported(type(mechanism).__name__, [reason], hint="KVCache() provides all keys, in order")
        self._check_new(query, key, value)
        if is_transformed() and self._state:
            self._make_writable(key, value)
        batch, _, q_len, _ = query.shape
        if mask is not None and not isinstance(mask, Mask):
            mask = as_mask(mask, (*query.shape[:3], self.length + q_len))
        tokens = self._tokens
        new = tokens.following(q_len) if positions is None else Positions.of(positions, length=q_len, batch=batch)
        if self.keeps_order:
            tokens, new = tokens.extended(new, batch, key.device)
            held = tokens
        else:
            tokens, held = self._advanced(new, batch, key.device), new
        out = self.advance(Call(mechanism, query, key, value, mask, new, held, dropout_p))
        self._tokens, self._length = tokens, self._length + q_len  # only now, since `advance` may raise
        if self._spec is None and self._state:
            self._spec = KeyValueSpec.of(key, value)
        return out

    def advance(self, call: Call) -> Tensor:
        """Return the output of one checked call, ``[batch, heads, q_len, value_dim]``, and store its keys and values.

        If the call fails, the contents of the cache do not change. `attend` counts the new columns afterwards.
        """
        raise NotImplementedError(f"{type(self).__name__} must define advance(call), or attend")

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Keep only the given batch items of the cache, in the given order. Items may repeat (beam search)."""
        like = self._spec
        index = checked_rows(rows, None if like is None else like.batch)
        if like is None or (has_values(index) and index.tolist() == list(range(like.batch))):
            return
        for leaf in self.leaves:
            x = self._state.get(leaf.name)
            if x is not None:
                is_shared_row = leaf.axes.startswith("batch|1") and len(x) == 1
                self._state[leaf.name] = x.clone() if is_shared_row else self._selected(x, index.to(x.device))
        self._tokens, self._spec = self._tokens.reordered(index), like._replace(batch=len(index))
        self._shared.clear()

    def crop(self, length: int) -> None:
        """Forget all columns after the first ``length``, or raise an error if that is impossible.

        A length of 0 is always possible.
        """
        self.check_crop(length)
        if length == 0:
            region = Region.current()
            if region.vmaps == self._region.vmaps:
                self._empty()
            else:
                self._forget()
            self._region = region
        elif length < self.length:
            self._crop(length)
        self._length = length

    def check_crop(self, length: int) -> None:
        """Raise the error that `crop` would raise; the cache does not change."""
        check_crop(length, self.length)
        reason = self._why_not_cropped(length) if 0 < length < self.length else None
        if reason is not None:
            hint = "fork() before adding tokens that may be removed; KVCache() crops to any length"
            raise unsupported(f"length={length}", [reason], hint=hint)

    def fork(self) -> Self:
        """Return an independent copy of the cache. The two share memory until one of them is written to."""
        other = copy.copy(self)
        other._state, other._traffic = dict(self._state), Traffic(0, 0)
        self._shared, other._shared = set(self._state), set(self._state)
        other._region = Region.current()
        return other

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the scalars and tensors that a file must contain in addition to the settings to restore the cache."""
        tokens, tensors = self._tokens, {}
        for leaf in self.leaves:
            if leaf.is_saved and leaf.name in self._state and self.length:
                x = self._state[leaf.name]
                tensors[leaf.name] = x[:, :, : self.length] if "columns" in leaf.axes else x
        numbers = {name: getattr(self, name) for name in self.numbers}
        if self.keeps_order:
            numbers["first"] = tokens.run.start if tokens.run else 0 if self.length else None
            if tokens.table is not None:
                tensors["positions"] = tokens.table
        else:
            after = tokens.after
            numbers |= {"length": self.length, "next": -1 if isinstance(after, Tensor) else after}
            tensors |= {"next": after} if isinstance(after, Tensor) else {}
        return numbers, tensors

    def restore(self, contents: Contents) -> None:
        """Load and check the state that another cache with the same settings saved to a file."""
        if contents.is_empty(self.leaves):
            return
        state, sizes, like = contents.state(self.leaves, self._sizes(contents))
        if self.keeps_order:
            given = contents.positions(like.batch, sizes["columns"])
            tokens = Positions.of(given, length=sizes["columns"], batch=like.batch)
            self._tokens, _ = _NO_TOKENS.extended(tokens, like.batch, like.device)
            self._length = len(self._tokens)
        else:
            self._length = contents.position("length")
            self._tokens = Positions.ending_before(contents.upcoming(like.batch, state.get("table")))
        if self.max_len is not None and self.length > self.max_len:
            raise contents.misfit("max_len")
        self._check_restored(contents, state)
        self._state, self._spec = state, like

    def __repr__(self) -> str:
        settings = [f"{name}={getattr(self, name)!r}" for name in (*self.settings, "length", "nbytes")]
        return f"{type(self).__name__}({', '.join(settings)})"

    def check_not_replayed(self) -> None:
        """Raise an error if gradient checkpointing or `vmap` would repeat a call that changes this cache."""
        region = Region.current()
        if region is not self._region:
            region.check_continues(self._region)

    def _make_writable(self, key: Tensor, value: Tensor) -> None:
        """Copy state tensors that cannot hold the new keys and values under `vmap` or another transform."""
        for name, x in self._state.items():
            like = value if name.startswith("value") else key
            if not can_hold(x, like):
                is_number = not x.is_floating_point()  # a position or a code, the same in all samples
                self._state[name] = x.clone() if is_number else like.new_empty(x.shape, dtype=x.dtype).copy_(x)
                self._shared.discard(name)

    def _forget(self) -> None:
        """Drop all cached tokens and free their memory."""
        self._region = Region.current()
        self._state, self._shared, self._spec, self._traffic = {}, set(), None, Traffic(0, 0)
        self._tokens, self._length = _NO_TOKENS, 0

    def _empty(self) -> None:
        """Drop all cached tokens. A subclass may keep their memory for later tokens."""
        self._forget()

    def _crop(self, length: int) -> None:
        """Forget all columns after the first ``length``, which is at least 1 and less than the number of columns."""

    def _why_not_cropped(self, length: int) -> str | None:
        """Return the reason why the cache cannot be cropped to ``length`` columns, or None if it can."""
        return "the effect of later tokens on it cannot be undone"

    def _check_new(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise an error unless new keys and values match each other and the cache, and fit into ``max_len``."""
        if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
            check_tensors(query, key, value)
        q, k, v = query.shape, key.shape, value.shape
        is_alike = len(q) == len(k) == len(v) == 4 and q[0] == k[0] == v[0] and q[2] == k[2] == v[2] and k[1] == v[1]
        if not is_alike or not query.dtype == key.dtype == value.dtype:
            check_tensors(query, key, value)
        like = (k[0], k[1], k[3], v[3], key.dtype, key.device)
        if self._spec is not None and self._spec != like:
            self._check_spec(self._spec, KeyValueSpec(*like))
        if self.max_len is not None and self._length + k[2] > self.max_len:
            got, hint = f"{self.length} stored and {k[2]} new", f"{type(self).__name__}() grows; crop(length) forgets"
            raise value_error("tokens", f"fit in max_len {self.max_len}", got, hint=hint)

    def _advanced(self, new: Positions, batch: int, device: torch.device) -> Positions:
        """Return each item's last position after new tokens. Raise an error unless positions keep increasing."""
        tokens = self._tokens.advanced(new, batch, device)
        if tokens is None:
            rule, hint = "increase and come after those in the cache", "KVCache() accepts any order"
            got = "positions out of order" if self._tokens.run is None or new.run is None else new.run
            raise value_error("positions", rule, got, hint=hint)
        return tokens

    def _selected(self, x: Tensor, rows: Tensor) -> Tensor:
        """Copy the selected batch items of a state tensor to new memory."""
        return x[rows]

    def _check_spec(self, stored: KeyValueSpec, new: KeyValueSpec) -> None:
        """Raise an error unless new keys and values match the sizes, dtype and device of the cached ones."""
        hint = "a cache belongs to one layer and one batch: make a new one, or reorder(rows)"
        for name, old, received in zip(KeyValueSpec._fields, stored, new, strict=True):
            if old != received:
                was, got = (str(x).removeprefix("torch.") for x in (old, received))
                what = f"{name} of {'value' if name == 'value_dim' else 'key'}"
                error = type_error if name == "dtype" else value_error
                raise error(what, f"be {was}, as in the cache", got, hint=hint)

    def _sizes(self, contents: Contents) -> dict[str, int]:
        """Return the axis sizes that the settings and saved length determine, for checking the tensors of a file."""
        return {}

    def _check_restored(self, contents: Contents, state: dict[str, Tensor]) -> None:
        """Restore the scalar attributes from a file. Raise an error if no cache of this type could have written it."""
