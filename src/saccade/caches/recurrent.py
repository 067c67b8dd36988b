"""RecurrentCache: stores the running sums of linear attention or the state of a recurrence."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from saccade.caches.buffers import usable
from saccade.caches.cache import LayerCache
from saccade.caches.call_arguments import Call, KeyValueSpec, Traffic
from saccade.caches.files.file_contents import Contents
from saccade.caches.state_tensors import Leaf
from saccade.support.errors import unsupported
from saccade.support.language import Message
from saccade.support.validation import check_int


class Memory(NamedTuple):
    """The recurrent state of linear attention: sums over all earlier keys and values.

    Attributes:
        state: for linear attention, the sum of features times values, with the sum of features as the last column,
            ``[batch, kv_heads, features, value_dim + 1]``. For a recurrence, its state, which has no denominator,
            ``[batch, kv_heads, head_dim, value_dim]``.
        peak: the logarithm of a factor that was divided out of the sums, ``[batch, kv_heads]``; None if it is 0.
        segment: the document of the last token, int64 ``[batch | 1]``; None without documents.
        tainted: bool ``[batch, kv_heads]``, True where a NaN or inf was added; None if there is none.
        source: identifies the feature map. States with equal sources have the same features; None matches any source.
    """

    state: Tensor
    peak: Tensor | None = None
    segment: Tensor | None = None
    tainted: Tensor | None = None
    source: Hashable = None

    @property
    def peaks(self) -> Tensor:
        """Logarithms of the factors divided out of the sums, ``[batch, kv_heads]``, with zeros if `peak` is None."""
        return self.state.new_zeros(self.state.shape[:2]) if self.peak is None else self.peak

    @property
    def taints(self) -> Tensor:
        """The heads with NaN or inf in their sums, bool ``[batch, kv_heads]``; all False if `tainted` is None."""
        whole = self.state
        return self.tainted if self.tainted is not None else whole.new_zeros(whole.shape[:2], dtype=torch.bool)


@runtime_checkable
class Recurrent(Protocol):
    """The interface of a matrix over new tokens that continues from the `Memory` of all earlier tokens."""

    def advance(self, value: Tensor, memory: Memory | None) -> tuple[Tensor, Memory]:
        """Return the output for the new tokens, and the recurrent memory that includes them."""
        ...


class RecurrentCache(LayerCache):
    """A cache of the running sums of causal linear attention, with constant memory for sequences of any length.

    It serves mechanisms whose matrix is a product of features (`saccade.mechanisms.Linear`,
    `saccade.mechanisms.Performer`) or a recurrence, with the causal masks that they support. The result is the same as
    for one call on the full sequence, and as with a `saccade.caches.KVCache`. The mask must be the same in every call.
    Tokens cannot be subtracted from a sum, so `crop` supports only length 0. To try tokens that may be rejected, use
    `fork`, which copies nothing.

    Gradients flow to the keys and values of the current call. The stored state is a constant.

    Args:
        max_len: largest number of tokens; None for no limit. It does not affect the memory.

    Raises:
        ValueError: the mask is not causal, positions do not increase, or the batch size changes.
        UnsupportedError: the mechanism has neither features nor a recurrence, a crop is to a length other than 0, or
            there is dropout.

    Cost: memory for ``batch * kv_heads * features * (value_dim + 1)`` elements; each token takes the same number of
    multiplications.

    Example:
        >>> import torch
        >>> from saccade import masks, mechanisms
        >>> q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
        >>> linear, causal = mechanisms.Linear(), masks.Causal()
        >>> cache = linear.new_cache()
        >>> parts = [cache.attend(linear, *(x[:, :, i : i + 1] for x in (q, k, v)), mask=causal) for i in range(100)]
        >>> torch.allclose(torch.cat(parts, 2), linear(q, k, mask=causal) @ v, atol=1e-5)
        True
        >>> cache.nbytes
        586
    """

    settings = ("max_len",)
    leaves: ClassVar[tuple[Leaf, ...]] = (
        Leaf("state", "batch kv_heads features sums", "wide"),
        Leaf("peak", "batch kv_heads", "wide", is_optional=True),
        Leaf("segment", "batch|1", "positions", is_optional=True),
        Leaf("tainted", "batch kv_heads", "bool"),
    )

    def __init__(self, max_len: int | None = None):
        super().__init__()
        self.max_len = None if max_len is None else check_int("max_len", max_len)
        self._source: Hashable = None

    def advance(self, call: Call) -> Tensor:
        """Attend to all earlier tokens through the recurrent state, and update the state."""
        if call.dropout_p:
            reason = "dropout_p is not 0, and individual weights of earlier tokens cannot be dropped from a sum"
            hint = "KVCache() stores the tokens themselves"
            raise unsupported(type(call.mechanism).__name__, [reason], hint=hint)
        matrix = call.mechanism(
            call.query, call.key, mask=call.mask, q_positions=call.positions, kv_positions=call.positions
        )
        if not isinstance(matrix, Recurrent):
            reason = Message("{matrix} cannot be continued as a sum over keys", matrix=type(matrix).__name__)
            hint = "KVCache() supports every mechanism"
            raise unsupported(type(call.mechanism).__name__, [reason], hint=hint)
        out, memory = matrix.advance(call.value, self._memory)
        if call.key.shape[2]:
            state = memory._replace(state=memory.state.detach())._asdict()
            self._source = state.pop("source")
            self._state = {name: x for name, x in state.items() if x is not None}
        self._traffic = Traffic(memory.state.nbytes, memory.state.nbytes)
        return out

    @property
    def _memory(self) -> Memory | None:
        """The stored recurrent state, in a form that the current gradient mode can use."""
        if not self._state:
            return None
        stored = {name: usable(x) for name, x in self._state.items()}
        return Memory(stored["state"], stored.get("peak"), stored.get("segment"), stored["tainted"], self._source)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        numbers, tensors = super().state()
        if self._spec is not None:
            sizes = {"head_dim": self._spec.head_dim, "value_dim": self._spec.value_dim}
            numbers |= {**sizes, "source": _as_lists(self._source)}
        return numbers, tensors

    def _sizes(self, contents: Contents) -> dict[str, int]:
        return {name: contents.count(name) for name in ("head_dim", "value_dim")}

    def _check_restored(self, contents: Contents, state: dict[str, Tensor]) -> None:
        self._source = _source_in(contents)
        # A denominator, if there is one, is an extra column. A value may contain the values of all substeps. A
        # state may also contain the state of the keys (`Mesa`) or the last token (`Mamba3`).
        (features, width), value_dim = state["state"].shape[2:], contents.count("value_dim")
        if width not in (value_dim + 1, features + value_dim) and (not width or value_dim % width):
            raise contents.misfit("value_dim")

    def _why_not_cropped(self, length: int) -> str:
        return f"it stores one sum over {self.length} tokens, from which the last ones cannot be removed"

    def _check_spec(self, stored: KeyValueSpec, new: KeyValueSpec) -> None:
        # The state is a sum of features, so keys may have any width. It is float32 for all narrower dtypes.
        is_wide = stored.dtype == torch.float64, new.dtype == torch.float64
        dtype = stored.dtype if is_wide[0] == is_wide[1] else new.dtype
        super()._check_spec(stored, new._replace(head_dim=stored.head_dim, dtype=dtype))


def _as_lists(source: Hashable) -> Any:
    """Convert the tuples in a recurrent state's ``source`` to lists, so that it can be saved as JSON.

    Raises:
        UnsupportedError: the source contains something other than numbers, strings and None.
    """
    if isinstance(source, tuple):
        return [_as_lists(part) for part in source]
    if not isinstance(source, str | int | float | None):
        reason = f"its features are identified by a {type(source).__name__}, which cannot be saved in a cache file"
        raise unsupported("RecurrentCache", [reason], hint="use features that are identified by numbers")
    return source


def _source_in(contents: Contents) -> Hashable:
    """Read the ``source`` of a recurrent state from a file, and convert its lists back to tuples."""

    def as_tuples(value: object) -> Hashable:
        if isinstance(value, list):
            return tuple(map(as_tuples, value))
        if not isinstance(value, str | int | float | None):
            raise contents.misfit("source")
        return value

    return as_tuples(contents.value("source"))
