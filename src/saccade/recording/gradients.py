"""Gradients of a loss with respect to the attention weights of recorded calls."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from saccade.integrations.call_output import AnyOutput
from saccade.matrix import Matrix
from saccade.recording.derived_matrices import JoinedMatrices, chosen_heads
from saccade.support.errors import unsupported

if TYPE_CHECKING:
    from saccade.recording.layer_record import Run

CALLED_AS = "record"  # in errors

_UNKNOWN = "its values are not available, as in recurrences, with nested tensors or on torch's fast path"


class GradientsOfCalls:
    """The gradients with respect to the attention weights of a run's calls, collected during the backward pass.

    Args:
        name: the name of the layer.
    """

    def __init__(self, name: str):
        self._name = name
        self._first_columns: list[int] = []
        self._gradients: dict[int, Matrix] = {}
        self._refused: dict[int, str] = {}

    def watch(self, output: AnyOutput | None, first_column: int, heads: Sequence[int] | None) -> None:
        """Request the gradient of the next call; it is stored when the backward pass computes it.

        Args:
            output: the output of the call; None if it is unknown.
            first_column: index of the call's first key in the full sequence.
            heads: indices of the recorded heads; None for all.
        """
        index = len(self._first_columns)
        self._first_columns.append(first_column)
        if output is None:
            self._refused[index] = _UNKNOWN
            return
        output.watch(functools.partial(self._receive, index, heads), functools.partial(self._refuse, index))

    def _receive(self, index: int, heads: Sequence[int] | None, gradient: Matrix) -> None:
        before = self._gradients.get(index)  # from an earlier backward pass
        gradient = gradient if heads is None else chosen_heads(gradient, heads)
        self._gradients[index] = gradient if before is None else before + gradient

    def _refuse(self, index: int, reason: str) -> None:
        self._refused[index] = reason

    def matrix(self) -> Matrix:
        """Return the gradient with respect to the weights of all calls as one matrix.

        Raises:
            UnsupportedError: the gradient is unknown, or no backward pass has run.
        """
        reasons = [f"the gradient of {self._name} is unknown: {reason}" for reason in {*self._refused.values()}]
        if not reasons and len(self._gradients) < len(self._first_columns):
            reasons = [f"no backward pass has reached {self._name}"]
        if reasons:
            raise unsupported("the recording", reasons, hint="call loss.backward() after the recorded forward pass")
        gradients = [self._gradients[index] for index in range(len(self._first_columns))]
        return gradients[0] if len(gradients) == 1 else JoinedMatrices(gradients, self._first_columns)


class Gradients(Mapping[str, Matrix]):
    """A mapping from layer names to the gradients with respect to the attention weights of each layer's last run.

    ``gradients[name]`` or ``gradients[index]`` is ``dL/dA``, a lazy matrix with the shape of the run's matrix. The
    gradients of several backward passes are added, as in ``tensor.grad``.

    Args:
        runs: the last run of each layer.
    """

    def __init__(self, runs: Mapping[str, Run]):
        self._runs = runs

    def __getitem__(self, layer: str | int) -> Matrix:
        return self._runs[layer].gradient  # type: ignore[index]  # a recording also accepts indices

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        return f"Gradients of {len(self)} layers"
