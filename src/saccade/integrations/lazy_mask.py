"""LazyMask: a tensor subclass that carries a mask rule through third-party models without allocating memory."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import enable_reentrant_dispatch
from torch.utils._pytree import tree_iter, tree_map

from saccade.integrations.tensor_masks import both
from saccade.masks import Dense, Mask
from saccade.masks.convert.deferred_masks import Unread
from saccade.support.errors import unsupported
from saccade.support.torch_modes import constant_result

CALLED_AS = "LazyMask"  # the name in error messages

_SAME = ("aten.detach.default", "aten.alias.default", "aten.lift_fresh.default")
# Operations that change the memory or shape of a tensor in place.
_OTHER_FORM = ("aten.set_", "aten.resize", "aten.squeeze_", "aten.unsqueeze_")


_SUMS = ("aten.add", "aten.sub", "aten.rsub")


class Placed(NamedTuple):
    """A mask rule, together with the token positions of one attention call.

    Attributes:
        rule: the mask, evaluated at the token positions.
        q_positions, kv_positions: consecutive positions of queries and keys.
        texts: lengths of the packed sequences of each batch item (a single item applies to all); None if unknown.
        left_padding: number of padding tokens before the first token of each batch item; None without padding.
    """

    rule: Mask
    q_positions: range
    kv_positions: range
    texts: tuple[tuple[int, ...], ...] | None = None
    left_padding: tuple[int, ...] | None = None

    def restricted(self, allowed: Tensor) -> Placed:
        """Return the rule restricted to pairs that are True in ``allowed``, bool ``[batch, heads, q_len, kv_len]``."""
        return self._replace(rule=both(self.rule, dense_at(allowed, self.q_positions, self.kv_positions)))


class _Content:
    """The state that a lazy mask shares with its detached copies: the rule, and the dense mask if allocated."""

    def __init__(self, placed: Placed, not_readable: str, traced: Unread | None):
        self.placed, self.not_readable, self.traced = placed, not_readable, traced
        self.memory: Tensor | None = None
        self.lock = threading.Lock()


class LazyMask(Tensor):
    """A tensor ``[batch, 1, q_len, kv_len]`` that represents a mask rule without allocating memory.

    A bool mask is True for allowed pairs. A float mask is added to scores: 0 for allowed pairs, and the lowest number
    of the dtype for masked pairs.

    Passing the mask on costs nothing. Any operation on it runs on the dense mask and returns an ordinary tensor, which
    is slower but always correct. If an operation writes to the mask, or returns a view that could be written to,
    memory is allocated for the dense mask; from then on, the lazy mask represents the contents of this memory.

    Args:
        placed: the rule and the token positions.
        batch: number of batch items.
        device: the device of the model.
        dtype: bool or floating point.
        not_readable: the reason why operations must not read the mask; empty if they may.
        traced: the equivalent mask for a compiled function that receives this mask as an argument, or None.

    Raises:
        UnsupportedError: an operation would change the mask's shape in place, such as ``unsqueeze_``, or would add a
            bool mask to floating-point scores; any operation if ``not_readable`` is set.

    Cost: no memory. An operation costs batch × q_len × kv_len bytes.
    """

    _content: _Content

    @staticmethod
    def __new__(
        cls,
        placed: Placed,
        batch: int,
        device: torch.device,
        dtype: torch.dtype = torch.bool,
        not_readable: str = "",
        traced: Unread | None = None,
    ) -> Self:
        shape = (batch, placed.rule.shape[1], len(placed.q_positions), len(placed.kv_positions))
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        mask._content = _Content(placed, not_readable, traced)
        return mask

    @property
    def traced(self) -> Unread | None:
        """The equivalent mask for a compiled function; None if there is none or memory has been allocated."""
        return None if self._content.memory is not None else self._content.traced

    @property
    def placed(self) -> Placed:
        """The mask rule and the positions; after a write to a bool mask, the rule is a dense mask."""
        content, memory = self._content, self._content.memory
        if memory is None or torch.equal(memory, self._from_rule()):
            return content.placed
        placed = content.placed
        # A copy, because the memory may be written to again before the backward pass or a later access.
        return placed._replace(rule=dense_at(memory.clone(), placed.q_positions, placed.kv_positions))

    @property
    def is_in_memory(self) -> bool:
        """Whether memory has been allocated for the lazy mask."""
        return self._content.memory is not None

    @property
    def may_contain_bias(self) -> bool:
        """Whether this is a float mask with allocated memory, which may contain a bias in addition to masked pairs."""
        return self.is_in_memory and self.is_floating_point()

    # A Python method would run on every access, even to the shape.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:
        """The lazy mask, detached from autograd's graph."""
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        raise _refused("other data")

    def share_memory_(self) -> Self:
        """Raise an error, because a lazy mask has no memory, and sharing it would crash the process."""
        raise _refused("sharing memory")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's signature lacks the last two
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(func) in _SAME:
            return args[0]._alias()
        if torch.Tag.inplace_view in func.tags or str(func).startswith(_OTHER_FORM):
            raise _refused(str(func))
        _check_readable(str(func), [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)])
        written_masks = [
            x for value in _written_arguments(func, args, kwargs) for x in tree_iter(value) if isinstance(x, LazyMask)
        ]
        with enable_reentrant_dispatch():  # a rule may be a user's function, called by vmap
            owners = {id(mask._in_memory()): mask for mask in written_masks}
            args, kwargs = tree_map(_written_out, (args, kwargs))
        out = func(*args, **kwargs)
        if any(mask._in_memory().shape != mask.shape for mask in written_masks):
            raise _refused(f"{func} with a different shape")
        return tree_map(lambda x: owners.get(id(x), x), out)

    def written_out(self) -> Tensor:
        """Return the lazy mask as an ordinary dense tensor."""
        memory = self._content.memory
        return self._from_rule() if memory is None else memory

    def _from_rule(self) -> Tensor:
        rule, q, kv = self._content.placed[:3]
        positions = (torch.arange(span.start, span.stop, device=self.device) for span in (q, kv))
        q_index, kv_index = (x[:, None] if axis == 0 else x for axis, x in enumerate(positions))
        b = torch.arange(self.shape[0], device=self.device)[:, None, None, None]
        h = torch.arange(self.shape[1], device=self.device)[None, :, None, None]
        allowed = rule.allows(b, h, q_index, kv_index).broadcast_to(self.shape).contiguous()
        if self.dtype == torch.bool:
            return allowed
        return torch.zeros_like(allowed, dtype=self.dtype).masked_fill_(~allowed, torch.finfo(self.dtype).min)

    def _in_memory(self) -> Tensor:
        """Return the lazy mask's dense memory; once allocated, it is kept, because other tensors may be views of it."""
        content = self._content
        with content.lock:
            if content.memory is None:
                with torch.inference_mode(self.is_inference()):  # like the mask itself, since views of it are returned
                    content.memory = self._from_rule()
            return content.memory

    def _alias(self) -> LazyMask:
        """Return a new lazy mask that shares its rule and memory with this mask."""
        other = LazyMask(self._content.placed, self.shape[0], self.device, self.dtype)
        other._content = self._content
        return other

    def __repr__(self) -> str:  # type: ignore[override]
        written = "" if self._content.memory is None else ", in memory"
        return f"LazyMask({self._content.placed.rule}, shape={list(self.shape)}{written})"


def _check_readable(operation: str, tensors: list[Tensor]) -> None:
    """Raise an error if an operation reads a lazy mask that must not be read, or adds a bool mask to scores."""
    masks = [x for x in tensors if isinstance(x, LazyMask)]
    reasons = [mask._content.not_readable for mask in masks if mask._content.not_readable]
    is_bool = any(mask.dtype == torch.bool for mask in masks)
    if is_bool and operation.startswith(_SUMS) and any(x.is_floating_point() for x in tensors):
        reasons.append("the model adds its mask to its scores, and this mask is bool: True would add 1")
    if reasons:
        raise unsupported(operation, reasons, hint='set_attn_implementation("eager") for this model')


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operation writes to or returns views of."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None:
            yield args[index] if index < len(args) else kwargs.get(argument.name)


def _written_out(x: object) -> object:
    return x.written_out() if isinstance(x, LazyMask) else x


def dense_at(allowed: Tensor, q: range, kv: range) -> Dense:
    """Convert a bool tensor ``[batch | 1, heads | 1, q_len | 1, kv_len]`` to a mask rule at the given positions."""
    if allowed.shape[2] == 1 and len(q) > 1:  # one row for all queries
        return Dense(F.pad(allowed, (kv.start, 0)))
    behind = kv.stop - q.stop  # `Dense` aligns the last row with the last column, and starts at position 0
    return Dense(F.pad(allowed, (kv.start, max(-behind, 0), 0, max(behind, 0))))


def _refused(what: str) -> Exception:
    hint = "mask.clone() is an ordinary tensor, which supports any operation"
    return unsupported(what, ["a lazy mask cannot change its shape or its memory"], hint=hint)


def mask_dtype(config: object, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a model's lazy mask: bool, or ``dtype`` if the model's code may add the mask to scores.

    Models that call the attention interface and support "sdpa" or "flex_attention" pass a mask on unchanged. All other
    models get float masks from transformers and read them: GIT and Falcon add them to their scores, DeepSeek-V4
    combines them with a bias, and Gemma 4's audio encoder compares them with 0.

    Args:
        config: the configuration of the model; None if unknown.
        dtype: the model's dtype.
    """
    return torch.bool if config is None or _takes_bool(type(config)) else dtype


@constant_result
def _takes_bool(kind: type) -> bool:
    return _all_support(kind, len(sys.modules))


@functools.cache
def _all_support(kind: type, num_modules: int) -> bool:
    """Return whether all models with this configuration class pass masks on unchanged; cached per ``num_modules``."""
    del num_modules
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return True
    models = [model for model in _subclasses(modeling.PreTrainedModel) if model.config_class is kind]
    return all(
        model._can_set_attn_implementation() and (model._supports_sdpa or model._supports_flex_attn) for model in models
    )


def _subclasses(kind: Any) -> Iterator[Any]:
    for other in kind.__subclasses__():
        yield other
        yield from _subclasses(other)
