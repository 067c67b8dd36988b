"""The class `ModelMeasurements`: the audited model and the results measured so far, as input for the claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saccade.auditing.by_layer import ByLayer
from saccade.auditing.equivalence import runner_of
from saccade.auditing.finding import ClaimResult, CounterExample
from saccade.auditing.model_under_test import ModelUnderTest
from saccade.auditing.rule_composition import Composition
from saccade.auditing.runner import Runner, Unanswered


class ModelMeasurements(NamedTuple):
    """The audited model and everything that the audit has already measured, as input for claims.

    Attributes:
        model: the model, uncompiled.
        given_runner: the runner that the caller passed; None if the audit chooses one.
        subject: the model and its input.
        composed: the composition of the declared rules.
        layered: the modules that mix tokens, each with its measured gradients.
        checked_rows: the rows to check, bool ``[batch, length]``.
        inputs: the inputs of the model.
        outputs: a function that extracts rows from the model's result.
        lengths: lengths of packed texts; empty if the caller passed none.
        noise: a function that measures how much rounding changes the outputs.
        seed: seed of all random changes.
    """

    model: Callable[..., Any]
    given_runner: Runner | None
    subject: ModelUnderTest
    composed: Composition
    layered: ByLayer
    checked_rows: Tensor
    inputs: Tensor | Mapping[str, Any]
    outputs: Callable[[Any], Tensor]
    lengths: Sequence[int]
    noise: Callable[[], float]
    seed: int

    @property
    def documents(self) -> Tensor:
        """The document index of each token, int ``[batch, length]``."""
        return self.composed.declared.components()[0]

    @property
    def ids(self) -> Tensor:
        """The token ids ``[batch, length]``.

        Raises:
            Unanswered: the model takes embeddings, reads two texts, or is not batch first.
        """
        tokens = self.subject.tokens
        if tokens.is_floating_point() or len(self.subject.parts) > 1 or not self.subject.form.batch_first:
            raise Unanswered("it applies only to models of one text of token ids, batch first")
        return tokens

    @property
    def texts(self) -> list[int]:
        """Lengths of texts to pack into one row: `lengths`, or three nearly equal lengths if `lengths` is empty."""
        if self.lengths:
            return list(self.lengths)
        length = self.subject.shape[1]
        if length < 6:
            raise Unanswered("it needs at least six tokens, to form three texts")
        return [length - 2 * (length // 3) + 1, length // 3, length // 3 - 1]

    def runner(self) -> Runner:
        """Return a runner that can run the model in equivalent ways.

        Raises:
            Unanswered: the model is a function.
        """
        if self.given_runner is not None:
            return self.given_runner
        if not isinstance(self.model, nn.Module):
            raise Unanswered("it applies to modules, not to functions")
        return runner_of(self.model, self.outputs)


def result(name: str, finding: CounterExample | None, why: str = "", allowed: float = 0.0) -> ClaimResult:
    """Return the result of a claim, which is broken if there is a counter-example and held otherwise."""
    verdict = "held" if finding is None else "broken"
    return ClaimResult(name, verdict, 0.0 if finding is None else finding.size, allowed, finding, why)  # type: ignore[arg-type]


def first_of(mask: Tensor) -> tuple[int, int]:
    """Return the batch item and the position of the first True in ``mask``, bool ``[batch, length]``."""
    item, position = torch.nonzero(mask)[0].tolist()
    return item, position
