"""StandIn: the base class for classes that make third-party attention modules run on saccade."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Never

from torch import Tensor, nn

from saccade.integrations.redirect_mode import left_to_module
from saccade.integrations.swapped_class import SwappedClass, swap_back, swap_class
from saccade.masks import Full, Mask
from saccade.matrix import Matrix
from saccade.mechanisms import Mechanism, Softmax
from saccade.support.errors import torchscript_unsupported, unsupported

CALLED_AS = "replace_attention"  # the name in error messages


class StandIn(SwappedClass):
    """Base class that computes a module's attention with saccade and the module's own parameters; see `swap_in`.

    Attributes:
        mask: a pattern for self-attention, combined with the masks of each call by ``&``.
        mechanism: the attention mechanism that the module runs.
    """

    mask: Mask | None
    mechanism: Mechanism

    def set_up(self) -> None:
        """Adapt the module once `mask` and `mechanism` are set."""

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
        """Return the attention output ``[batch, len, width]`` and the attention matrix."""
        joined = None if isinstance(rule, Full) else rule
        reasons = self.mechanism.reasons(joined) if joined is not None else ()
        if reasons:
            raise unsupported(type(self.mechanism).__name__, reasons)
        mechanism = self.mechanism if bias is None else self.mechanism.with_bias(bias)
        with left_to_module():
            matrix: Matrix = mechanism(query, key, mask=joined, **positions)
            out = matrix.matmul(value, dropout_p=dropout_p if self.training else 0.0)
        return out.transpose(1, 2).flatten(2), matrix

    def extra_repr(self) -> str:
        return f"mask={self.mask}"

    def __prepare_scriptable__(self) -> Never:
        """Refuse ``torch.jit.script``, which calls this method.

        Raises:
            UnsupportedError: always.
        """
        raise torchscript_unsupported()


def swap_in(module: nn.Module, kind: type[StandIn], mask: Mask | None, mechanism: Mechanism | None) -> None:
    """Make a module run on saccade, using `swap_class`.

    Args:
        module: changed in place.
        kind: the class with the new ``forward``.
        mask: a pattern for self-attention; None for no pattern.
        mechanism: the mechanism to copy; `saccade.mechanisms.Softmax` when None.
    """
    copied = Softmax() if mechanism is None else copy.deepcopy(mechanism)
    like = next(module.parameters(), None)
    if like is not None:  # FullyShardedDataParallel takes the parameters out of the module
        copied.to(like.device, like.dtype)
    copied.train(module.training)
    swap_class(module, kind)
    assert isinstance(module, StandIn)
    module.mask, module.mechanism = mask, copied
    module.set_up()


@contextmanager
def temporarily_swapped(module: nn.Module, kind: type[StandIn]) -> Iterator[None]:
    """Make a module run on saccade within the block only; ``kind`` must not register hooks."""
    swap_in(module, kind, None, None)
    try:
        yield
    finally:
        del module.mask, module.mechanism
        swap_back(module)
