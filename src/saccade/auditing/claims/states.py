"""The claim that every state (recurrent, convolutional or attention) starts afresh with each document."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.auditing.by_layer import ByLayer, mixers
from saccade.auditing.claims.model_measurements import ModelMeasurements, first_of, result
from saccade.auditing.finding import ClaimResult, CounterExample
from saccade.auditing.leak_location import SavedRuns
from saccade.auditing.measured_rules import grouped
from saccade.auditing.model_under_test import ModelUnderTest
from saccade.auditing.probe_sets import bisect
from saccade.auditing.replay import replaying
from saccade.auditing.rounding_noise import FACTOR, row_differences
from saccade.auditing.runner import Unanswered
from saccade.support.language import Message, joined

_ROUNDING = 64  # in units of eps; a smaller change may be rounding, so gradients decide


def states(measured: ModelMeasurements) -> list[ClaimResult]:
    """Check each module that mixes tokens on packed documents, and the whole model on two consecutive texts."""
    return [_packed(measured), _between_calls(measured)]


def _packed(measured: ModelMeasurements) -> ClaimResult:
    """Check that, in a packed run, no row of a module depends on tokens of another document."""
    try:
        subject, documents, separators = _in_documents(measured)
        checked_rows = (
            measured.checked_rows if subject is measured.subject else torch.ones(subject.shape, dtype=torch.bool)
        )
    except Unanswered as answer:
        return ClaimResult("states", "not answered", why=answer.args[0])
    mixed = mixers(subject)
    if not mixed:
        return ClaimResult("states", "not answered", why="no module that mixes tokens was found")
    borders = (documents[:, 1:] != documents[:, :-1]).any(0).nonzero().flatten().tolist()
    layered = ByLayer(subject, mixed, checked_rows)
    layered.measure({row for border in borders for row in (border, border + 1)})
    leaks = _by_changes(layered, documents) | _by_gradients(layered, documents)
    first = next((leaks[name] for name in layered.mixed if name in leaks), None)
    others = "; ".join(grouped(dict.fromkeys((name for name in layered.mixed if name in leaks), "across documents")))
    return result("states", first, joined((separators, others)))


def _in_documents(measured: ModelMeasurements) -> tuple[ModelUnderTest, Tensor, str]:
    """Return the model on packed documents, each token's document index, and a description of the packing.

    The description has the lengths of the documents and the arguments that separate them. It is empty if the audited
    input is already packed.
    """
    documents = measured.documents
    if bool((documents[:, 1:] != documents[:, :-1]).any()):
        return measured.subject, documents, ""
    ids, runner, lengths = measured.ids[:1], measured.runner(), measured.texts
    inputs, separators = runner.packed_inputs(ids, lengths)
    subject = ModelUnderTest(measured.model, inputs, measured.outputs, measured.subject.group)
    label = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    words = "documents of {lengths} tokens, separated by {names}"
    return subject, label, Message(words, lengths=", ".join(map(str, lengths)), names=separators)


def _by_gradients(layered: ByLayer, documents: Tensor) -> dict[str, CounterExample]:
    found = dict[str, CounterExample]()
    for name in layered.mixed:
        for one in layered.measured_rows(name):
            item, position = one.row
            across = one.seen & (documents[item] != documents[item, position])
            if bool(across.any()) and name not in found:
                key = (item, int(across.nonzero()[-1]))
                found[name] = CounterExample("leak", one.row, key, 1.0, name, "replay", layered.subject.passes)
    return found


def _by_changes(layered: ByLayer, documents: Tensor) -> dict[str, CounterExample]:
    """Change every second document in each module's input, and report modules in which rows of other documents change.

    This also detects leaks through operations that have no gradient.
    """
    found, subject = dict[str, CounterExample](), layered.subject

    def visit(name: str, rerun: Callable[[Tensor], Tensor], hidden: Tensor, out: Tensor) -> None:
        draw = torch.Generator().manual_seed(0)
        other = torch.randn(hidden.shape, generator=draw, dtype=torch.float64).to(hidden) * hidden.std()
        for odd in (0, 1):
            chosen = (documents % 2 == odd).expand(len(hidden), -1)
            if (
                name not in found
                and (one := _changed_row(rerun, hidden, other, out, chosen, layered.checked_rows)) is not None
            ):
                found[name] = CounterExample("leak", *one, name, "change", subject.passes)

    with torch.no_grad(), replaying(subject, {name: subject.modules[name] for name in layered.mixed}, visit):
        subject.run()
    return found


def _changed_row(
    rerun: Callable[[Tensor], Tensor], hidden: Tensor, other: Tensor, out: Tensor, chosen: Tensor, checked_rows: Tensor
) -> tuple[tuple[int, int], tuple[int, int], float] | None:
    """Return a row that changes with another document's token, that token, and the size of the change; or None.

    Only tokens in ``chosen`` are changed, and only rows in ``checked_rows`` are checked.
    """

    def sizes(keys: Tensor) -> Tensor:
        changed = torch.where(keys.to(hidden.device)[..., None], other, hidden)
        return row_differences(rerun(changed), out).cpu().masked_fill(chosen | ~checked_rows, 0)

    size, least = sizes(chosen), _ROUNDING * torch.finfo(out.dtype).eps
    if float(size.max()) <= least:
        return None
    row = first_of(size == size.max())
    return row, bisect(chosen, lambda keys: bool(sizes(keys)[row] > least)), float(size.max())


def _between_calls(measured: ModelMeasurements) -> ClaimResult:
    """Check that a text gives the same rows even if the model has read another text before."""
    subject, name = measured.subject, "states between calls"
    draw = torch.Generator().manual_seed(measured.seed)
    other = torch.randn(subject.vectors.shape, generator=draw, dtype=torch.float64).to(subject.vectors)
    other *= subject.vectors.std()

    subject.run()
    first, second = subject.run(), subject.run()
    subject.run(other)
    moved = row_differences(subject.run(), second).cpu().masked_fill(~measured.checked_rows, 0)
    size, allowed = float(moved.max()), FACTOR * float(row_differences(first, second).max())
    if size <= allowed:
        return result(name, None)
    # Two runs on the same text: the first follows a run on this text, the second a run on the other text.
    subject.run()
    recorder = SavedRuns(subject)
    recorder.run()
    subject.run(other)
    recorder.run()
    row = first_of(moved > allowed)
    found = CounterExample("differs", row, None, size, recorder.first_difference(), "change", subject.passes)
    return result(name, found, allowed=allowed)
