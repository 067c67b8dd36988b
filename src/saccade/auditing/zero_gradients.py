"""Decide whether a gradient is 0 because an output ignores a token, or because of dead units, saturation or decay.

An output that does not depend on a token has gradient 0 on every input and in every dtype. So a gradient of 0 is
measured again on a different input, and then on both inputs in true float64. If it is still 0, the output ignores the
token, unless the gradients of tokens nearer to the output shrink to the smallest floats. Recurrences forget in this
way, and such forgetting cannot be distinguished from masking.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.auditing.finding import CounterExample
from saccade.auditing.float64 import TrueFloat64
from saccade.auditing.model_under_test import ModelUnderTest
from saccade.support.language import Message, joined


class Probe(NamedTuple):
    """An output whose gradients are measured: a row of one call of a module or, end to end, a set of rows."""

    module: str
    call: int
    position: int


MeasureGradients = Callable[[ModelUnderTest, bool, Collection[Probe]], dict[Probe, Tensor]]
"""A function that measures gradients ``[batch, length]`` by probe.

Its arguments are a model, whether to change the model's input, and the probes.
"""


class ZeroGradient(NamedTuple):
    """An output, and the tokens that it should depend on although its gradient with respect to them is 0.

    Attributes:
        probe: the probe that can measure the gradient again.
        row: batch item and position of the output.
        expected: the tokens that the output should depend on, bool ``[batch, length]``.
        keys: the expected tokens with gradient 0.
    """

    probe: Probe
    row: tuple[int, int]
    expected: Tensor
    keys: Tensor

    @property
    def first(self) -> tuple[int, int]:
        """The batch item and the position of the first token with gradient 0."""
        item, position = self.keys.nonzero()[0].tolist()
        return item, position


class ZeroGradientReport(NamedTuple):
    """Gradients that are 0 but should not be, sorted by cause.

    Attributes:
        blind: gradients that are 0 because the output does not depend on the token.
        decayed: gradients that are too small for float64, or for the model's dtype if it has no float64 copy.
        unsure: gradients that could not be checked because there is no float64 copy.
        why: why there is no float64 copy.
    """

    blind: list[ZeroGradient]
    decayed: list[ZeroGradient]
    unsure: list[ZeroGradient]
    why: str = ""

    def describe(self, subject: ModelUnderTest) -> str:
        """Return a one-line description of the zero gradients that do not prove that an output ignores a token."""
        parts = list[str]()
        if self.decayed:
            decayed = "{pairs} decayed below the range of float64 and not checked"
            if self.why:
                decayed = "{pairs} decayed below the range of its dtype, without float64 ({why}), and not checked"
            parts.append(Message(decayed, pairs=_pairs(subject, self.decayed), why=self.why))
        if self.unsure:
            unsure = "{pairs} of gradient 0, not checked without float64: {why}"
            parts.append(Message(unsure, pairs=_pairs(subject, self.unsure), why=self.why))
        return joined(parts)


def recheck(
    subject: ModelUnderTest, zeros: Sequence[ZeroGradient], sizes: dict[Probe, Tensor], measure: MeasureGradients
) -> ZeroGradientReport:
    """Measure zero gradients again, and report which of them show that the output ignores the token.

    Args:
        subject: the model and its input.
        zeros: outputs and tokens with gradient 0.
        sizes: the gradients by probe, float64 ``[batch, length]``.
        measure: a function that measures the gradients again.

    Cost: nothing if no gradient was 0; otherwise a backward pass for each of these outputs. If a gradient is 0 again,
        also a float64 copy of the model, and two more measurements with the copy.
    """
    remaining, sizes = _still_zero(zeros, sizes, subject, True, measure)
    if not remaining:
        return ZeroGradientReport([], [], [])
    wide, why = subject.in_float64
    dtype = subject.vectors.dtype if wide is None else torch.float64
    if wide is not None:
        with TrueFloat64():
            remaining, sizes = _still_zero(remaining, {}, wide, False, measure)
            remaining, sizes = _still_zero(remaining, sizes, wide, True, measure)
        subject.passes, wide.passes = subject.passes + wide.passes, 0
    exact: list[ZeroGradient] = []
    decayed: list[ZeroGradient] = []
    for zero in remaining:
        decayed_keys = _decayed(torch.where(zero.expected, sizes[zero.probe], 0.0), zero, dtype)
        exact += [zero._replace(keys=zero.keys & ~decayed_keys)] if bool((zero.keys & ~decayed_keys).any()) else []
        decayed += [zero._replace(keys=decayed_keys)] if bool(decayed_keys.any()) else []
    return ZeroGradientReport([], decayed, exact, why) if wide is None else ZeroGradientReport(exact, decayed, [])


def _still_zero(
    zeros: Sequence[ZeroGradient],
    sizes: dict[Probe, Tensor],
    subject: ModelUnderTest,
    changed: bool,
    measure: MeasureGradients,
) -> tuple[list[ZeroGradient], dict[Probe, Tensor]]:
    """Measure zero gradients again; return those that are still 0, and the largest gradients so far."""
    if not zeros:
        return [], sizes
    more = measure(subject, changed, {one.probe for one in zeros})
    again = [one._replace(keys=one.keys & (more[one.probe] == 0)) for one in zeros]
    largest = {probe: torch.maximum(size, sizes.get(probe, size)) for probe, size in more.items()}
    return [one for one in again if bool(one.keys.any())], largest


def _decayed(size: Tensor, zero: ZeroGradient, dtype: torch.dtype) -> Tensor:
    """Return the tokens whose gradient is 0 because it decays with distance, as small gradients of other tokens show.

    Each side of the row is examined separately. A token that is nearer than a token with a large gradient was masked,
    not forgotten. A gradient is small if it is near the smallest numbers of the dtype, or near the rounding error of
    larger gradients, which may cancel in their sum.
    """
    item, position = zero.row
    info = torch.finfo(dtype)
    decayed_keys = torch.zeros_like(zero.keys)
    for side in (range(position - 1, -1, -1), range(position + 1, size.shape[1])):
        order = torch.tensor(side, dtype=torch.long)
        along = size[item, order]
        for least in (info.tiny ** (2 / 3), 100 * info.eps * float(size[item].max())):
            if bool(((along > 0) & (along <= least)).any()):
                large = (along > least).nonzero()
                beyond = order[int(large.max()) + 1 if len(large) else 0 :]
                decayed_keys[item, beyond] = zero.keys[item, beyond]
                break
    return decayed_keys


def _pairs(subject: ModelUnderTest, zeros: Sequence[ZeroGradient]) -> str:
    finding = subject.renumbered(CounterExample("blind", zeros[0].row, zeros[0].first, 0.0))
    assert finding.key is not None
    row, key = finding.nouns
    pair = Message("{row} {i} and {key} {j}", row=Message(row), i=finding.row[1], key=Message(key), j=finding.key[1])
    if zeros[0].probe.module:
        pair = Message("{pair} in {module}", pair=pair, module=zeros[0].probe.module)
    more = sum(int(zero.keys.sum()) for zero in zeros) - 1
    return Message("{pair}, and {more} more pairs,", pair=pair, more=more) if more else pair
