"""CrossCache: stores the keys and values of a cross-attention context, so that they are projected only once."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade.caches.buffers import usable
from saccade.caches.cache import LayerCache
from saccade.caches.call_arguments import KeyValueSpec, MakesMatrix, Region, Traffic, check_call
from saccade.caches.files.file_contents import Contents
from saccade.caches.state_tensors import Leaf
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.errors import value_error
from saccade.support.validation import ShapeSpec

_CONTEXT = ShapeSpec("key [batch, kv_heads, len, head_dim]", "value [batch, kv_heads, len, value_dim]")


class CrossCache(LayerCache):
    """A cache for cross-attention that stores the projected context of the first call for all later calls.

    ``mha(x, context, cache=cache)`` projects the context in the first call only. Later calls may omit the context. If
    they pass it, it must have the same shape, but its contents are not compared.

    The cache does not count queries. If a mask or rotation needs their positions, pass ``positions``.

    Example:
        >>> import torch
        >>> from saccade.nn import MultiHeadAttention
        >>> mha, cache = MultiHeadAttention(16, 4, context_dim=8).eval(), CrossCache()
        >>> x, context = torch.randn(1, 3, 16), torch.randn(1, 5, 8)
        >>> first = mha(x[:, :2], context, cache=cache)
        >>> last = mha(x[:, 2:], cache=cache)
        >>> torch.allclose(torch.cat([first, last], 1), mha(x, context), atol=1e-6)
        True
    """

    leaves: ClassVar[tuple[Leaf, ...]] = (
        Leaf("key", "batch kv_heads columns head_dim"),
        Leaf("value", "batch kv_heads columns value_dim"),
        Leaf("kv_positions", "batch|1 columns", "positions", is_optional=True),
    )
    exposes_all_keys = True

    _run: range | None  # positions of the context, if they are a range
    _is_new: bool

    @property
    def is_filled(self) -> bool:
        """Whether the cross-attention context is stored."""
        return bool(self._state)

    @property
    def length(self) -> int:
        """Number of tokens in the cross-attention context, including padding."""
        return self._state["key"].shape[2] if self._state else 0

    @property
    def key(self) -> Tensor | None:
        """Keys of the projected context, ``[batch, kv_heads, length, head_dim]``; None before the first call."""
        return self._state.get("key")

    @property
    def value(self) -> Tensor | None:
        """Values of the projected context, ``[batch, kv_heads, length, value_dim]``; None before the first call."""
        return self._state.get("value")

    @property
    def kv_positions(self) -> range | Tensor | None:
        """Positions of the tokens in the cross-attention context; None if they are 0, 1, 2, …"""
        return self._state.get("kv_positions", self._run)

    def positions(self, q_len: int) -> None:
        """Return None, since a cross-attention cache does not count queries."""

    def fill(self, key: Tensor, value: Tensor, *, kv_positions: GivenPositions = None) -> None:
        """Store the context: ``key [batch, kv_heads, len, head_dim]`` and ``value [batch, kv_heads, len, value_dim]``.

        Raises:
            ValueError: the cache is already filled, or the shapes do not match.
        """
        self.check_not_replayed()
        if self._state:
            hint = "make a new cache for a new context"
            raise value_error("cache", "be empty", f"{self.length} keys", hint=hint)
        _CONTEXT.check(key, value)
        checked = None
        if kv_positions is not None:
            batch, _, length, _ = key.shape
            checked = Positions.of(kv_positions, "kv_positions", length=length, batch=batch).given
        # Share memory with the caller only if gradients must reach the context.
        self._state = {name: x if x.requires_grad else x.clone() for name, x in (("key", key), ("value", value))}
        if isinstance(checked, Tensor):
            self._state["kv_positions"] = torch.atleast_2d(checked).clone()
        else:
            self._run = checked
        self._spec = KeyValueSpec.of(key, value)
        self._is_new = True

    def attend(
        self,
        mechanism: MakesMatrix,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """Attend to the context. ``key`` and ``value`` are required in the first call, and None in later calls.

        Args:
            mechanism, query, mask, dropout_p: see `LayerCache.attend`.
            key, value: keys and values of the context in the first call, unless `fill` stored them; None after that.
            positions: positions of the queries, if the mask needs them.

        Raises:
            ValueError: no context is stored or passed, or a context is passed although one is already stored.
        """
        check_call(mechanism, mask)
        Region.current().check_continues(self._region, is_read_only=True)
        if key is not None and value is not None:
            self.fill(key, value)
        if not self._state:
            raise value_error("key and value", "be passed in the first call", None)
        self._state = {name: usable(x) for name, x in self._state.items()}
        keys, values, kv_positions = self._state["key"], self._state["value"], self.kv_positions
        if positions is not None and kv_positions is None:
            kv_positions = range(self.length)
        matrix = mechanism(query, keys, mask=mask, q_positions=positions, kv_positions=kv_positions)
        out = matrix.matmul(values, dropout_p=dropout_p)
        nbytes = keys.nbytes + values.nbytes
        self._traffic, self._is_new = Traffic(nbytes, nbytes if self._is_new else 0), False
        return out

    def crop(self, length: int) -> None:
        """Do nothing, since cropping the generated tokens does not change the context."""

    def check_crop(self, length: int) -> None:
        """Do nothing; see `crop`."""

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        run = self._run
        return {"kv_positions": None if run is None else [run.start, run.stop, run.step]}, dict(self._state)

    def restore(self, contents: Contents) -> None:
        if not contents.has("key"):
            return
        state, _, _ = contents.state(self.leaves, {})
        run, saved = None, contents.value("kv_positions")
        if "kv_positions" not in state and saved is not None:
            is_range = isinstance(saved, list) and len(saved) == 3 and all(type(x) is int for x in saved)
            if not is_range or not saved[2] or max(map(abs, saved)) > 1 << 40:
                raise contents.misfit("kv_positions")
            run = range(*saved)
        self.fill(state["key"], state["value"], kv_positions=state.get("kv_positions", run))
        self._is_new = False

    def _forget(self) -> None:
        super()._forget()
        self._run, self._is_new = None, False
