"""ObserveAttention: report attention that a model computes with separate operations; the model runs unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from saccade.fusion.arguments import map_nested, tensors_in, writes
from saccade.fusion.mode import is_eager
from saccade.fusion.operations import scores_after
from saccade.fusion.product_spellings import PRODUCTS, product_of, scores_of
from saccade.fusion.recovered_call import AttentionCall, Output, attention_call
from saccade.fusion.repeated_heads import REPEAT_FUNCTIONS, Repeats
from saccade.fusion.row_maximum import RowMaximum
from saccade.fusion.scores import Scores, is_dense, version_of
from saccade.fusion.softmax_tap import Arrange, SoftmaxTap
from saccade.fusion.written_softmax import Exponentials, OfScores
from saccade.support.torch_modes import in_backward


class ObserveAttention(TorchFunctionMode):
    """A mode that reports attention written as matmul, softmax and matmul; the model runs unchanged.

    Args:
        on_attention: called with each attention call, after the model has multiplied weights and values.
        on_weights: called with the dense weights of each softmax that is not part of an attention call; see
            `FuseAttention`.
    """

    def __init__(
        self,
        on_attention: Callable[[AttentionCall], None],
        *,
        on_weights: Callable[[Tensor], None] | None = None,
    ):
        super().__init__()
        self._on_attention, self._on_weights = on_attention, on_weights
        self._tap = SoftmaxTap(self.report_weights, self.report_unknown)
        self._repeats = Repeats()
        self._states: Any = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or in_backward():
            return func(*args, **kwargs)
        is_used = bool(self._states) and any(self._state(x) is not x for x in tensors_in((args, kwargs)))
        states = map_nested(self._state, (args, kwargs)) if is_used else (args, kwargs)
        if is_used and func in PRODUCTS:
            product = product_of(func, *map_nested(self._weights, (args, kwargs)))
            recovered = None if product is None else attention_call(product, self._repeats)
            if recovered is not None:
                out = func(*args, **kwargs)
                self.report_call(*recovered, out)
                return out
        out = self._plain(func, args, kwargs)
        if func in PRODUCTS:
            product = product_of(func, args, kwargs) if is_eager() else None
            self._note(out, None if product is None else scores_of(product, self._repeats), (args, kwargs))
        elif is_used:
            scores = scores_after(func, *states)
            if scores is None and not writes(func):  # of two products, such as in a sum, only the larger is followed
                states = map_nested(self._largest_state(tensors_in((args, kwargs))), (args, kwargs))
                scores = scores_after(func, *states)
            self._note(args[0] if out is None and args else out, scores, states)
        return out

    def report_call(self, call: AttentionCall, output: Output, out: Tensor) -> None:
        """Report an attention call that has just run.

        Args:
            call: the inputs of the call.
            output: the layout of the output.
            out: the output of the model's own product.
        """
        with torch.no_grad():
            self._on_attention(call)

    def report_weights(self, weights: Tensor, arrange: Arrange) -> None:
        """Report dense weights before they are multiplied by values; see `saccade.fusion.softmax_tap.SoftmaxTap`."""
        if self._on_weights is not None:
            with torch.no_grad():
                self._on_weights(arrange(weights.detach()))

    def report_unknown(self) -> None:
        """Handle a product with softmax results of unknown layout; by default, do nothing."""

    def _plain(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = self._tap.run(func, args, kwargs)
        if func in REPEAT_FUNCTIONS:
            self._repeats.record(func, args, kwargs, out)
        return out

    def _note(self, out: Any, scores: Scores | RowMaximum | OfScores | None, tree: Any) -> None:
        if scores is not None and is_dense(out):
            if isinstance(scores, Exponentials):
                self._tap.track_unknown(out)
            scores = scores.with_operands(tensors_in(tree))
            known = replace(scores, dtype=out.dtype) if isinstance(scores, Scores) else scores
            self._states[out] = known, version_of(out)

    def _state(self, x: Any) -> Any:
        """Return the `Scores` or `RowMaximum` that a tensor is known to contain, or else the argument unchanged."""
        if not isinstance(x, Tensor) or x not in self._states:
            return x
        scores, version = self._states[x]
        return scores if version == version_of(x) and scores.is_current else x

    def _largest_state(self, tensors: Iterable[Tensor]) -> Callable[[Any], Any]:
        """Return a function like `_state` that knows the state of the largest tensor only."""
        known = [x for x in tensors if self._state(x) is not x]
        largest = max(known, key=Tensor.numel)
        return lambda x: self._state(x) if x is largest else x

    def _weights(self, x: Any) -> Any:
        """Return the `Scores` of a tensor of attention weights; return any other argument unchanged."""
        state = self._state(x)
        return state if isinstance(state, Scores) and state.softmax is not None else x
