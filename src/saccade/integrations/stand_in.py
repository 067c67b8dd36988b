"""StandIn: base class for third-party attention modules that are made to run on saccade."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn

from saccade.masks import Full, Mask
from saccade.matrix import Matrix
from saccade.mechanisms import Mechanism, Softmax
from saccade.support.errors import unsupported

CALLED_AS = "replace_attention"  # the name in error messages


class StandIn(nn.Module):
    """Saccade's attention on the parameters of the module whose class it extends; created by `put_in`.

    Attributes:
        mask: a pattern for self-attention, combined with the masks of each call by ``&``.
        mechanism: the attention mechanism that the module runs.
    """

    mask: Mask | None
    mechanism: Mechanism
    stand_in_of: ClassVar[tuple[type[Any], type[Any]]]

    def __getattr__(self, name: str) -> Any:  # attributes of the module's original class
        return super().__getattr__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle the replaced module by the two classes that its class combines."""
        if "stand_in_of" not in vars(type(self)):  # a further subclass
            return super().__reduce_ex__(protocol)
        reduced = super().__reduce_ex__(protocol)
        assert not isinstance(reduced, str)  # the name of a global variable, whose value is never a module
        return (_blank, type(self).stand_in_of, *reduced[2:])

    def set_up(self) -> None:
        """Adapt the replaced module after `mask` and `mechanism` have been set."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: Mask,
        bias: Tensor | None,
        dropout_p: float,
        **positions: Tensor,
    ) -> tuple[Tensor, Matrix]:
        """Return the attention output ``[batch, len, width]`` and its matrix."""
        joined = None if isinstance(rule, Full) else rule
        reasons = self.mechanism.reasons(joined) if joined is not None else ()
        if reasons:
            raise unsupported(type(self.mechanism).__name__, reasons)
        mechanism = self.mechanism if bias is None else self.mechanism.with_bias(bias)
        matrix: Matrix = mechanism(query, key, mask=joined, **positions)
        out = matrix.matmul(value, dropout_p=dropout_p if self.training else 0.0)
        return out.transpose(1, 2).flatten(2), matrix

    def extra_repr(self) -> str:
        return f"mask={self.mask}"


def put_in(module: nn.Module, kind: type[StandIn], mask: Mask | None, mechanism: Mechanism | None) -> None:
    """Make a module run on saccade by changing its class to a subclass of the original class.

    The module remains the same object, so ``isinstance``, parameters, buffers, hooks, attributes and references to it
    are unaffected.

    Args:
        module: changed in place.
        kind: the class with the new forward pass.
        mask: a pattern for self-attention; None for no pattern.
        mechanism: the mechanism, which is copied; `saccade.mechanisms.Softmax` when None.
    """
    copied = Softmax() if mechanism is None else copy.deepcopy(mechanism)
    like = next(module.parameters())
    copied.to(like.device, like.dtype).train(module.training)
    module.__class__ = _class_of(kind, type(module))
    assert isinstance(module, StandIn)
    module.mask, module.mechanism = mask, copied
    module.set_up()


@contextmanager
def tried(module: nn.Module, kind: type[StandIn]) -> Iterator[None]:
    """Make a module run on saccade within the block only; ``kind`` must not register hooks."""
    before = type(module)
    put_in(module, kind, None, None)
    try:
        yield
    finally:
        del module.mask, module.mechanism
        module.__class__ = before


_classes: dict[Any, type[StandIn]] = {}


def _class_of(kind: type[StandIn], before: type[nn.Module]) -> type[StandIn]:
    parts = (kind, before)
    if parts not in _classes:
        names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "stand_in_of": parts}
        _classes.setdefault(parts, type(kind.__name__, parts, names))
    return _classes[parts]


def _blank(kind: type[StandIn], before: type[nn.Module]) -> StandIn:
    subclass = _class_of(kind, before)
    module: StandIn = subclass.__new__(subclass)
    return module
