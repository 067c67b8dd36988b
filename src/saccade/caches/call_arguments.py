"""Validate the arguments of a cache call (`Call`), and define the interface that a cache requires of a mechanism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from saccade.masks import Causal, Mask
from saccade.matrix import Matrix
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.errors import describe, hidden_by_vmap, type_error, unsupported, value_error
from saccade.support.torch_modes import count_vmaps, has_values, is_mapped, is_tracing, is_transformed
from saccade.support.validation import ShapeSpec, check_int, is_integer


class MakesMatrix(Protocol):
    """The interface that a cache requires of a mechanism: it maps queries and keys to an attention matrix.

    A mechanism that declares ``treats_heads_alike``, as `saccade.mechanisms.Mechanism` does, may run faster.
    """

    def __call__(
        self, query: Tensor, key: Tensor, *, mask: object, q_positions: GivenPositions, kv_positions: GivenPositions
    ) -> Matrix:
        """Return the attention matrix of queries and keys."""
        ...


class Traffic(NamedTuple):
    """The number of bytes of keys and values that one cache call read and appended.

    Args:
        bytes_read: bytes of all keys that at least one query needs, and of their values; each is counted once.
        bytes_appended: bytes of the new keys and values.
    """

    bytes_read: int
    bytes_appended: int


class Call(NamedTuple):
    """The checked arguments of one call of `LayerCache.attend`.

    Args:
        mechanism, query, key, value, dropout_p: the arguments of the call.
        mask: the mask, a rule on token positions; None for no mask.
        positions: positions of the new tokens.
        kv_positions: positions of all tokens so far if the cache keeps them in order; otherwise, of the new tokens.
    """

    mechanism: MakesMatrix
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    positions: Positions
    kv_positions: Positions
    dropout_p: float

    @property
    def table(self) -> Tensor:
        """Positions of the new tokens of a cache call, int64 ``[batch | 1, q_len]``, on the device of the keys."""
        return self.positions.on(self.key.device)

    @property
    def treats_heads_alike(self) -> bool:
        """Whether the mechanism declares that the matrix of every head depends only on dot products and the mask."""
        return getattr(self.mechanism, "treats_heads_alike", False)

    @property
    def attends_to_all_earlier(self) -> bool:
        """Whether the mask of the call lets every new query attend to every earlier token."""
        return self.mask is None or type(self.mask) is Causal

    @property
    def differs_between_heads(self) -> bool:
        """Whether the mask of the call may differ between heads or batch items."""
        return self.mask is not None and (self.mask.shape != (1, 1) or self.mask.calls_functions)

    @property
    def needs_graph(self) -> bool:
        """Whether autograd will record the attention of this cache call."""
        if not torch.is_grad_enabled():
            return False
        if any(x.requires_grad for x in (self.query, self.key, self.value)):
            return True
        module = self.mechanism
        return isinstance(module, torch.nn.Module) and any(x.requires_grad for x in module.parameters())

    def product(self, matrix: Matrix, value: Tensor) -> tuple[Tensor]:
        """Return the attention output of a cache call, ``matrix @ value``, as a tuple of one tensor."""
        return (matrix.matmul(value, dropout_p=self.dropout_p),)


class KeyValueSpec(NamedTuple):
    """The sizes, dtype and device of cached keys and values. New keys and values must match them."""

    batch: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> KeyValueSpec:
        """Return the sizes, dtype and device of keys and values."""
        batch, kv_heads, _, head_dim = key.shape
        return cls(batch, kv_heads, head_dim, value.shape[3], key.dtype, key.device)


_NEW = ShapeSpec(
    "query [batch, heads, q_len, head_dim]",
    "key [batch, kv_heads, q_len, key_dim]",
    "value [batch, kv_heads, q_len, value_dim]",
)


def check_call(mechanism: object, mask: object) -> None:
    """Raise an error if the mechanism is not callable, or if the mask is a tensor, which has no positions."""
    if not callable(mechanism):
        hint = "for instance saccade.mechanisms.Softmax()"
        raise type_error(
            "mechanism", "be a function that returns attention matrices", type(mechanism).__name__, hint=hint
        )
    if isinstance(mask, Tensor):
        hint = "masks.Dense(tensor) reads a tensor by position; mark padding with position -1"
        raise value_error("mask", "be a rule on positions (not a tensor) with a cache", "a tensor", hint=hint)


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise an error unless keys and values are ``[batch, kv_heads, q_len, width]`` and match the query."""
    hint = "the cache adds the keys of earlier tokens itself; keys of other tokens go to a CrossCache"
    _NEW.check(query, key, value, hint=hint)
    if not query.dtype == key.dtype == value.dtype:
        facts = [describe("query", query), describe("key", key), describe("value", value)]
        got = ", ".join(str(x.dtype).removeprefix("torch.") for x in (query, key, value))
        raise value_error("dtype", "be the same for query, key and value", got, facts=facts)


def checked_rows(rows: Tensor | Sequence[int], batch: int | None) -> Tensor:
    """Check the indices of the batch items to keep in a cache, and return them as int64 ``[items]``."""
    is_list = isinstance(rows, Sequence) and not isinstance(rows, str) and all(map(is_integer, rows))
    index = torch.tensor(rows, dtype=torch.int64, device="cpu") if is_list else rows
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32) or index.dim() != 1:
        got = f"{index.dtype} {list(index.shape)}" if isinstance(index, Tensor) else rows
        raise type_error("rows", "be an int tensor [items], or a list of ints", got)
    if batch is not None and index.numel() and has_values(index):
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= batch:
            rule = f"be batch items, from 0 to {batch - 1}"
            raise value_error("rows", rule, low if low < 0 else high)
    return index.to(torch.int64)


def check_crop(length: object, stored: int) -> None:
    """Raise an error unless a cache can be cropped to ``length``: an int from 0 to the number of stored columns."""
    if not 0 <= check_int("length", length, None) <= stored:
        raise value_error("length", f"be from 0 to {stored}, the number of stored columns", length)


class Region(NamedTuple):
    """The region of gradient checkpointing and of `vmap` that is currently running, if it can be identified.

    A replay runs inside a backward pass, which has an id. In the forward pass, a region of the non-reentrant
    checkpoint is identified by torch's hooks for saved tensors; a region of the reentrant checkpoint cannot be.

    Args:
        graph_task: id of the backward pass; -1 outside of backward passes.
        hook: id of the checkpoint's hook; 0 outside of checkpoints.
        vmaps: number of enclosing ``vmap`` calls.
    """

    graph_task: int = -1
    hook: int = 0
    vmaps: int = 0

    @classmethod
    def current(cls) -> Region:
        """Return the region of gradient checkpointing and `vmap` in which the current call runs."""
        if is_tracing():
            return OUTSIDE
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        graph_task = torch._C._current_graph_task_id()
        if hooks is None and graph_task == -1 and not is_transformed():
            return OUTSIDE  # quickly, since every step of every layer asks
        is_checkpoint = hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
        return cls(graph_task, id(hooks[0]) if is_checkpoint else 0, count_vmaps())

    def repeats(self, made_in: Region) -> bool:
        """Return whether this region replays a call that changed a cache in the region ``made_in``."""
        is_other_pass = self.graph_task not in (-1, made_in.graph_task)
        return is_other_pass or self.hook not in (0, made_in.hook)

    def check_continues(self, made_in: Region, *, is_read_only: bool = False) -> None:
        """Raise an error unless a cache from the region ``made_in`` can be used in this region.

        Args:
            made_in: the region in which the cache was constructed, forked or cleared.
            is_read_only: whether the call does not change the cache, so that it may be repeated.
        """
        if self.repeats(made_in) and not is_read_only:
            refuse_replay()
        if self.vmaps < made_in.vmaps:
            reason = "the cache was created inside the function that vmap maps, so it contains the tokens of one sample"
            raise unsupported("vmap", [reason], hint="return the outputs, and create another cache outside")
        if self.vmaps > made_in.vmaps and not is_read_only:
            reason = "the cache was created outside the function that vmap maps, so all samples would write to it"
            raise unsupported("vmap", [reason], hint="create it inside: layer.new_cache(), or cache.fork()")


OUTSIDE = Region()


def check_readable(*tensors: Tensor) -> None:
    """Raise an error if `vmap` hides values that a cache must read to decide which tokens to store."""
    if is_transformed() and any(map(is_mapped, tensors)):
        raise hidden_by_vmap("queries, keys and values")


def refuse_replay() -> NoReturn:
    """Raise the error for a cache call that gradient checkpointing replays or will replay.

    Raises:
        UnsupportedError: always.
    """
    reason = "the backward pass runs this call again, and its tokens would be added to the cache a second time"
    hint = "train without a cache, or make it inside the checkpointed function: layer.new_cache() or cache.fork()"
    raise unsupported("gradient checkpointing", [reason], hint=hint)
