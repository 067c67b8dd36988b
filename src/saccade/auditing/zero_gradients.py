"""Blind, said only where it is sure: a gradient of 0 may also be a dead unit, a saturated softmax, or decay.

An output that does not depend on a token has gradient 0 on every input and in every dtype. So a 0 is looked at again on
other vectors, then on both in true float64. What is 0 even there is blind, unless it lies behind gradients that shrink
until float64 holds them no more: a recurrence forgets like that, and what it forgot cannot be told from what it hid.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.auditing.finding import Finding
from saccade.auditing.float64 import TrueFloat64
from saccade.auditing.model_under_test import Subject


class Probe(NamedTuple):
    """What is pulled: a row of what a module gives in one of its calls; or, end to end, a set of rows by its number."""

    module: str
    call: int
    place: int


Pull = Callable[[Subject, bool, Collection[Probe]], dict[Probe, Tensor]]
"""Gradients ``[batch, length]`` by what was pulled: of a subject, on its own vectors or on others."""


class Unseen(NamedTuple):
    """An output, and tokens that the rule shows it and of which its gradient is 0.

    Attributes:
        probe: what is pulled to see it again.
        row: batch item and place of the output.
        shown: what the rule shows it, bool ``[batch, length]``.
        keys: of these, the ones of gradient 0.
    """

    probe: Probe
    row: tuple[int, int]
    shown: Tensor
    keys: Tensor

    @property
    def first(self) -> tuple[int, int]:
        """The first of the tokens."""
        item, place = self.keys.nonzero()[0].tolist()
        return item, place


class Doubts(NamedTuple):
    """What became of gradients of 0.

    Attributes:
        blind: surely not seen.
        decayed: too small for float64, or for the model's own dtype where it has no other.
        unsure: could not be judged in float64.
        why: why not.
    """

    blind: list[Unseen]
    decayed: list[Unseen]
    unsure: list[Unseen]
    why: str = ""

    def told(self, subject: Subject) -> str:
        """What is to be said of those that are not blind, in a line."""
        floats = "float64 holds" if not self.why else f"floats hold, without float64 ({self.why}),"
        parts = [f"{_pairs(subject, self.decayed)} decayed below what {floats} and not judged"] if self.decayed else []
        if self.unsure:
            parts.append(f"{_pairs(subject, self.unsure)} of gradient 0, not judged without float64: {self.why}")
        return "; ".join(parts)


def looked_at_again(subject: Subject, unseen: Sequence[Unseen], sizes: dict[Probe, Tensor], pull: Pull) -> Doubts:
    """Which gradients of 0 are blindness.

    Args:
        subject: the model and its input.
        unseen: outputs and tokens with gradient 0.
        sizes: the gradients by probe, float64 ``[batch, length]``.
        pull: measures them again.

    Cost: nothing where nothing was 0; else a pull of the same rows, and where it stays 0, a copy of the model in
        float64 and two pulls of that.
    """
    left, sizes = _narrowed(unseen, sizes, subject, True, pull)
    if not left:
        return Doubts([], [], [])
    wide, why = subject.in_float64
    dtype = subject.vectors.dtype if wide is None else torch.float64
    if wide is not None:
        with TrueFloat64():
            left, sizes = _narrowed(left, {}, wide, False, pull)
            left, sizes = _narrowed(left, sizes, wide, True, pull)
        subject.passes, wide.passes = subject.passes + wide.passes, 0
    found: list[Unseen] = []
    decayed: list[Unseen] = []
    for one in left:
        faded = _faded(torch.where(one.shown, sizes[one.probe], 0.0), one, dtype)
        found += [one._replace(keys=one.keys & ~faded)] if bool((one.keys & ~faded).any()) else []
        decayed += [one._replace(keys=faded)] if bool(faded.any()) else []
    return Doubts([], decayed, found, why) if wide is None else Doubts(found, decayed, [])


def _narrowed(
    unseen: Sequence[Unseen], sizes: dict[Probe, Tensor], subject: Subject, changed: bool, pull: Pull
) -> tuple[list[Unseen], dict[Probe, Tensor]]:
    """Those that are 0 here too, and the largest gradients so far."""
    if not unseen:
        return [], sizes
    more = pull(subject, changed, {one.probe for one in unseen})
    again = [one._replace(keys=one.keys & (more[one.probe] == 0)) for one in unseen]
    largest = {probe: torch.maximum(size, sizes.get(probe, size)) for probe, size in more.items()}
    return [one for one in again if bool(one.keys.any())], largest


def _faded(size: Tensor, one: Unseen, dtype: torch.dtype) -> Tensor:
    """Of the tokens of gradient 0, those behind all that is plainly held, on a side where what is held fades first.

    A token nearer than one that is plainly seen was hidden, whatever fades behind both. What fades passes by the least
    numbers of the dtype; or by the rounding of larger ones, where gradients are sums in which these cancel.
    """
    item, place = one.row
    info = torch.finfo(dtype)
    faded = torch.zeros_like(one.keys)
    for side in (range(place - 1, -1, -1), range(place + 1, size.shape[1])):
        order = torch.tensor(side, dtype=torch.long)
        along = size[item, order]
        for least in (info.tiny ** (2 / 3), 100 * info.eps * float(size[item].max())):
            if bool(((along > 0) & (along <= least)).any()):
                plain = (along > least).nonzero()
                behind = order[int(plain.max()) + 1 if len(plain) else 0 :]
                faded[item, behind] = one.keys[item, behind]
                break
    return faded


def _pairs(subject: Subject, unseen: Sequence[Unseen]) -> str:
    one = subject.told(Finding("blind", unseen[0].row, unseen[0].first, 0.0))
    where = f" in {unseen[0].probe.module}" if unseen[0].probe.module else ""
    count = sum(int(one.keys.sum()) for one in unseen)
    assert one.key is not None
    pair = f"{one.nouns[0]} {one.row[1]} and {one.nouns[1]} {one.key[1]}"
    return pair + where + (f", and {count - 1} more pairs," if count > 1 else "")
