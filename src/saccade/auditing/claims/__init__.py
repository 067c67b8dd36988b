"""Claims that are checked only on request, such as those about states, windows, sinks, training and the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from saccade.auditing.claims.batch import batch
from saccade.auditing.claims.compiled import compiled
from saccade.auditing.claims.loss import loss
from saccade.auditing.claims.model_measurements import ModelMeasurements
from saccade.auditing.claims.positions import positions
from saccade.auditing.claims.sinks import sinks
from saccade.auditing.claims.states import states
from saccade.auditing.claims.training_runs import training
from saccade.auditing.claims.window import window
from saccade.auditing.finding import ClaimResult
from saccade.auditing.float64 import describe_error
from saccade.auditing.runner import Unanswered, WrongArgument
from saccade.support.errors import shown, value_error

CLAIMS: Mapping[str, Callable[[ModelMeasurements], Iterable[ClaimResult]]] = {
    "states": states,
    "positions": positions,
    "window": window,
    "sinks": sinks,
    "training": training,
    "compiled": compiled,
    "batch": batch,
    "loss": loss,
}
"""The functions that check the claims, by the names that users pass to `audit`."""


def checked_names(claims: Sequence[str]) -> tuple[str, ...]:
    """Validate the names of requested claims, and return them in the order of `CLAIMS`; "all" requests every claim.

    Raises:
        ValueError: a name is not the name of a claim.
    """
    names = (claims,) if isinstance(claims, str) else tuple(claims)
    for name in names:
        if name not in (*CLAIMS, "all"):
            raise value_error("claims", f"be among {', '.join(CLAIMS)}, all", shown(name))
    return tuple(name for name in CLAIMS if name in names or "all" in names)


def check_claims(measured: ModelMeasurements, names: Sequence[str]) -> Iterator[ClaimResult]:
    """Check the named claims; if the model raises an error, the claim is "not answered"."""
    for name in names:
        try:
            yield from CLAIMS[name](measured)
        except WrongArgument:
            raise
        except Unanswered as answer:
            yield ClaimResult(name, "not answered", why=answer.args[0])
        except Exception as error:  # a model may raise any error, which does not prove it wrong
            yield ClaimResult(name, "not answered", why=describe_error(error))
