"""The claim that the loss reads the label of every token except padding and the first token of each document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.auditing.claims.model_measurements import ModelMeasurements, first_of, result
from saccade.auditing.finding import ClaimResult, CounterExample, Kind
from saccade.auditing.runner import Unanswered
from saccade.support.language import Message
from saccade.tasks import IGNORED

_NOUNS = ("the loss at output", "the label of token")
_CLOSE = 1e-4  # relative to the loss; means over different sets of labels differ by more


def loss(measured: ModelMeasurements) -> list[ClaimResult]:
    """Check which labels the loss reads, using its gradient with respect to each row of logits.

    The gradient of the cross-entropy with respect to a row of logits is the softmax, minus 1 at the label. It is
    therefore 0 in rows whose label is ignored; in all other rows, its smallest element is at the label.

    If the inputs have no ``labels``, the ids serve as labels, with -100 for padding and for the first token of each
    document.
    """
    labels = _labels(measured)
    logits, total = _run(measured, labels)
    (grad,) = torch.autograd.grad(total, logits, allow_unused=True)
    if grad is None:
        raise Unanswered("the loss does not depend on the returned logits")
    with torch.no_grad():
        return [result("loss", found, why) for found, why in [_check_rows(labels, logits, grad, total)]]


def _labels(measured: ModelMeasurements) -> Tensor:
    ids, documents = measured.ids, measured.documents
    given = measured.inputs.get("labels") if isinstance(measured.inputs, Mapping) else None
    if isinstance(given, Tensor):
        return given
    if not bool((documents[:, 1:] != documents[:, :-1]).any()):
        documents = torch.arange(3).repeat_interleave(torch.tensor(measured.texts)).expand(ids.shape)
    first = torch.cat([torch.ones(len(ids), 1, dtype=torch.bool), documents[:, 1:] != documents[:, :-1]], 1)
    ignored = first | ~measured.checked_rows
    ignored[-1, -2:] = True  # treat the last two tokens as padding
    return ids.masked_fill(ignored.to(ids.device), IGNORED)


def _run(measured: ModelMeasurements, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Run the model with labels, and return the logits and the loss."""
    given: Any = measured.inputs
    with torch.enable_grad():
        try:
            named = dict(given) | {"labels": labels} if isinstance(given, Mapping) else {}
            out: Any = measured.model(**named) if named else measured.model(given, labels=labels)
        except TypeError as error:
            raise Unanswered("the model takes no labels") from error
    total = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    logits = measured.outputs(out)
    if not isinstance(total, Tensor) or not total.requires_grad:
        raise Unanswered("the model returns no loss")
    return logits, total


def _check_rows(labels: Tensor, logits: Tensor, grad: Tensor, total: Tensor) -> tuple[CounterExample | None, str]:
    """Compare the labels that the loss reads, according to its gradient, with the labels that it should read."""
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    read = grad.flatten(2).abs().amax(-1) > 0
    wanted = following != IGNORED
    if bool((bad := read & ~wanted).any()):
        size = float(grad[bad].norm() / grad.norm())
        return _found("leak", bad, size), "rows whose label is ignored have a gradient"
    if bool((bad := wanted & ~read).any()):
        return _found("blind", bad, 0.0), "rows with a label have no gradient"
    taken = grad.argmin(-1)
    if bool((bad := wanted & (taken != following)).any()):
        return _found("blind", bad, 1.0), "some rows are trained on a label other than the next token"
    mean = F.cross_entropy(logits[wanted].float(), following[wanted])
    apart = abs(float(total / mean) - 1)
    if apart > _CLOSE and not _has_other_terms(total, mean):
        words = "the loss is {times:.3g} times the mean over the labelled rows"
        return _found("blind", wanted, apart), Message(words, times=float(total / mean))
    return None, ""


def _has_other_terms(total: Tensor, mean: Tensor) -> bool:
    """Return whether the total loss may include terms besides cross-entropy, such as an expert-balancing loss.

    This is assumed if it exceeds the mean cross-entropy over the labelled rows, but is less than twice that mean.
    """
    return bool(total > mean) and bool(total < 2 * mean)


def _found(kind: Kind, bad: Tensor, size: float) -> CounterExample:
    row = first_of(bad)
    return CounterExample(kind, row, (row[0], row[1] + 1), size, "", "gradient", 0, _NOUNS)
