"""LazyMask: a rule that travels through other people's models as a tensor, and is never written out on the way."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_iter, tree_map

from saccade.errors import unsupported
from saccade.masks import Dense, Mask

__all__ = ["LazyMask", "Placed"]

_SAME = ("aten.detach.default", "aten.alias.default", "aten.lift_fresh.default")
# What gives a tensor other memory, or another form, under the hands of those who hold it.
_OTHER_FORM = ("aten.set_", "aten.resize", "aten.squeeze_", "aten.unsqueeze_")


class Placed(NamedTuple):
    """A mask, and where the tokens of one call stand.

    Attributes:
        rule: who may attend to whom, read at positions.
        q_positions, kv_positions: where queries and keys stand, step 1.
    """

    rule: Mask
    q_positions: range
    kv_positions: range


class _Content:
    """What a mask and its detached copies share: the rule, and the memory that someone may have written into."""

    def __init__(self, placed: Placed):
        self.placed = placed
        self.memory: Tensor | None = None
        self.lock = threading.Lock()


class LazyMask(Tensor):
    """A bool tensor ``[batch, 1, q_len, kv_len]`` without memory that stands for a rule on positions.

    Handed on as it is, it costs nothing. Any operation on it is done on the mask written out, and gives an ordinary
    tensor: slower, and never wrong. What writes into it, or takes a part that could be written into, gives it memory
    for good, and from then on it stands for what is in there.

    Args:
        placed: the rule, and where the tokens stand.
        batch: number of batch items.
        device: where the model computes.

    Raises:
        UnsupportedError: an operation that would give it another form in place, such as ``unsqueeze_``.

    Cost: no memory. An operation costs batch × q_len × kv_len bytes.
    """

    _content: _Content

    @staticmethod
    def __new__(cls, placed: Placed, batch: int, device: torch.device) -> Self:
        shape = (batch, placed.rule.shape[1], len(placed.q_positions), len(placed.kv_positions))
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        made._content = _Content(placed)
        return made

    @property
    def placed(self) -> Placed:
        """The rule, and where the tokens stand; what is in its memory, where that says something else by now."""
        content, memory = self._content, self._content.memory
        if memory is None or torch.equal(memory, self._said_by_rule()):
            return content.placed
        _, q, kv = content.placed
        # A copy: whoever wrote into it once may do so again, before the backward pass or a later question.
        return Placed(_at_positions(memory.clone(), q, kv), q, kv)

    @property
    def is_in_memory(self) -> bool:
        """Whether somebody did more with it than handing it on."""
        return self._content.memory is not None

    # Not by a method of this name: each look at a shape would go through it.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:
        """The same content, as `detach` gives it."""
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        raise _refused("other data")

    def share_memory_(self) -> Self:
        """Refused: sharing memory that is not there ends the process."""
        raise _refused("sharing memory")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves the last two out, too
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(func) in _SAME:
            return args[0]._again()
        if torch.Tag.inplace_view in func.tags or str(func).startswith(_OTHER_FORM):
            raise _refused(str(func))
        reached = [x for given in _reached(func, args, kwargs) for x in tree_iter(given) if isinstance(x, LazyMask)]
        owners = {id(mask._in_memory()): mask for mask in reached}
        args, kwargs = tree_map(_written_out, (args, kwargs))
        out = func(*args, **kwargs)
        if any(mask._in_memory().shape != mask.shape for mask in reached):
            raise _refused(f"{func} of another shape")
        return tree_map(lambda x: owners.get(id(x), x), out)

    def written_out(self) -> Tensor:
        """The mask as an ordinary bool tensor."""
        memory = self._content.memory
        return self._said_by_rule() if memory is None else memory

    def _said_by_rule(self) -> Tensor:
        rule, q, kv = self._content.placed
        positions = (torch.arange(span.start, span.stop, device=self.device) for span in (q, kv))
        q_index, kv_index = (x[:, None] if axis == 0 else x for axis, x in enumerate(positions))
        b = torch.arange(self.shape[0], device=self.device)[:, None, None, None]
        h = torch.arange(self.shape[1], device=self.device)[None, :, None, None]
        return rule.allows(b, h, q_index, kv_index).broadcast_to(self.shape).contiguous()

    def _in_memory(self) -> Tensor:
        """The memory, from now on for good: others may hold parts of it."""
        content = self._content
        with content.lock:
            if content.memory is None:
                content.memory = self._said_by_rule()
            return content.memory

    def _again(self) -> LazyMask:
        """Another tensor with the same content, which is changed when this one is."""
        other = LazyMask(self._content.placed, self.shape[0], self.device)
        other._content = self._content
        return other

    def __repr__(self) -> str:  # type: ignore[override]
        written = "" if self._content.memory is None else ", in memory"
        return f"LazyMask({self._content.placed.rule}, shape={list(self.shape)}{written})"


def _reached(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Arguments that an operation writes into, or whose memory it hands out."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None:
            yield args[number] if number < len(args) else kwargs.get(argument.name)


def _written_out(x: object) -> object:
    return x.written_out() if isinstance(x, LazyMask) else x


def _at_positions(allowed: Tensor, q: range, kv: range) -> Mask:
    """A tensor as a rule that is read where these queries and keys stand."""
    behind = kv.stop - q.stop  # `Dense` takes the last row and the last column for one position, and begins at 0
    return Dense(F.pad(allowed, (kv.start, max(-behind, 0), 0, max(behind, 0))))


def _refused(what: str) -> Exception:
    hint = "mask.clone() is an ordinary tensor, with which anything can be done"
    return unsupported("LazyMask", what, ["a mask that is not written out keeps its form and its memory"], hint=hint)
