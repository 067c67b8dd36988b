"""Mistakes in what an implementation says of itself."""

from typing import Any

import torch
from torch import Tensor

from saccade.support.errors import unsupported
from saccade.testing import Stepwise


class DropoutSwallowed(Stepwise, caught_by=("declined",)):
    """A dropout that is declined is accepted and not applied."""

    def refuse(self, softcap: float | None, dropout_p: float) -> None:
        return None


class NeedlessReason(Stepwise, caught_by=("declined",)):
    """A reason is given against a softcap, which is then applied as if nothing had been said."""

    def reasons(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: object) -> tuple[str, ...]:
        own = super().reasons(query, key, value, mask, **kwargs)
        return (*own, "it has no softcap") if "softcap" in kwargs else own


class OtherReason(NeedlessReason, caught_by=("declined",)):
    """A softcap is refused for another reason than the one given beforehand."""

    def refuse(self, softcap: float | None, dropout_p: float) -> None:
        super().refuse(None, dropout_p)
        if softcap is not None:
            raise unsupported("stepwise", "it", ("it wants another scale",))


class UnknownSwallowed(Stepwise, caught_by=("declined",)):
    """Options that it does not know vanish in a `**kwargs`."""

    def with_lse(self, *tensors: Tensor, dropout_p: float = 0.0, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().with_lse(*tensors, **kwargs)

    def reasons(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: object) -> tuple[str, ...]:
        return ()


class EmptyPromise(Stepwise, caught_by=("offered",)):
    """A softcap is offered, and refused when asked for."""

    def refuse(self, softcap: float | None, dropout_p: float) -> None:
        super().refuse(softcap, dropout_p)
        if softcap is not None:
            raise unsupported("stepwise", "it", ("it has no softcap",))


class LateRefusal(Stepwise, caught_by=("offered",)):
    """The gradient of a bias is refused, but only once it is asked for."""

    def add(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        return scores if bias is None else super().add(scores, _NoGradient.apply(bias))


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        raise unsupported("stepwise", "it", ("it has no gradient for bias",))
