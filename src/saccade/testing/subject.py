"""The function under test, and how it is called."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection
from typing import Any, Literal

import torch
from torch import Tensor

from saccade.support.errors import type_error, unsupported, value_error
from saccade.support.validation import check_choice
from saccade.testing.case import Case
from saccade.testing.problem import Problem

__all__ = ["OPTIONS", "Claims", "Subject"]

OPTIONS = ("bias", "scale", "softcap", "dropout_p", "sink_logit", "score", "relative")
_POSITIONS = ("q_positions", "kv_positions")
_LACKS = {"lse": "gives no lse", "gqa": "takes no grouped heads", "relative": "takes no relative bias"}


@dataclasses.dataclass(frozen=True)
class Claims:
    """What an author says about a function beyond what every function must keep. A claim is tested.

    Attributes:
        memory_exponent: the largest tensor on the way grows as length to this power; 1.0 is linear memory.
    """

    memory_exponent: float | None = None


class Subject:
    """An attention function in the kit's calling convention.

    Args:
        function: ``function(query, key, value, mask, **options) -> out``. Options (``bias``, ``scale``,
            ``softcap``, ``dropout_p``, ``sink_logit``, ``score``) are passed only where they are used, and so are
            ``q_positions`` and ``kv_positions``, where something is read at positions: a mask with
            ``masks="objects"``, or a relative bias. Such a bias is a `saccade.positions.Bias`, passed as ``bias``.
        call, with_lse, offers, reasons, gqa, masks, claims, device: see `saccade.testing.check`.

    Attributes:
        offers: names of what it takes: options, "lse" and "gqa". Asked for anything else, it must refuse.
        unsaid: options of which nobody says whether it takes them; it is not asked for these.
        promises: it is said beforehand what it answers: asked for that, it must not refuse.

    Raises:
        TypeError: not callable.
        ValueError: an unknown option among the offers, or masks handed over in an unknown form.
        RuntimeError, AssertionError: torch has no such device here.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        call: Callable[..., Any] | None = None,
        with_lse: Callable[..., Any] | None = None,
        offers: Collection[str] | None = None,
        reasons: Callable[..., tuple[str, ...]] | None = None,
        gqa: bool = True,
        masks: Literal["dense", "objects"] = "dense",
        claims: Claims | None = None,
        device: torch.device | str = "cpu",
    ):
        callables = {"call": call, "with_lse": with_lse, "reasons": reasons}
        for name, given in [("function", function), *callables.items()]:
            if not callable(given) and (given is not None or name not in callables):
                raise type_error(name, "be callable", type(given).__name__)
        check_choice("masks", masks, ("dense", "objects"))
        unknown = set(offers or ()) - {*OPTIONS, *_POSITIONS}
        if unknown:
            rule = f"be among {', '.join((*OPTIONS, *_POSITIONS))}"
            raise value_error("offers", rule, ", ".join(sorted(unknown)))
        self.function, self.call, self.lse_function, self.reasons = function, call, with_lse, reasons
        torch.empty(0, device=device)  # a device that is not there is no fault of the function
        self.masks, self.device = masks, device
        self.claims = Claims() if claims is None else claims
        options = _signature_offers(call or function) if offers is None else frozenset(offers)
        besides = {"lse": with_lse is not None, "gqa": gqa}
        self.offers = (options or frozenset()) | {name for name, offered in besides.items() if offered}
        self.unsaid = frozenset((*OPTIONS, *_POSITIONS) if options is None else ())
        if offers is None and "bias" in self.offers:
            self.unsaid = frozenset(["relative"])
        self.promises = offers is not None or reasons is not None

    def output(self, problem: Problem) -> Tensor:
        """The function's answer to a problem."""
        out = self._answer(self.function, problem)
        if not isinstance(out, Tensor):
            hint = "pass call= to pick the output, or with_lse= if it returns (out, lse)"
            raise type_error("function", "return one tensor", type(out).__name__, hint=hint)
        return out

    def output_and_lse(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """The function's answer with the log-sum-exp of each row."""
        out, lse = self._answer(self.lse_function, problem)
        return out, lse

    def lacks(self, case: Case, needed: Collection[str]) -> tuple[str, ...]:
        """Why a case cannot be tried: a reason for each thing that it or the law needs and nobody offers."""
        reads_positions = self.masks == "objects" or case.relative is not None
        return self.missing([*needed, *case.needs, *(case.explicit_positions if reads_positions else ())])

    def missing(self, needed: Collection[str]) -> tuple[str, ...]:
        """A reason for each thing that is needed and not offered."""
        return tuple(_LACKS.get(name, f"takes no {name}") for name in dict.fromkeys(needed) if name not in self.offers)

    def needed(self, problem: Problem) -> tuple[str, ...]:
        """What it must offer to answer a problem: options and positions by name."""
        return (*problem.in_use, *(problem.positions if self._reads_positions(problem) else ()))

    def ask(self, function: Callable[..., Any] | None, problem: Problem) -> Any:
        """What ``self.function`` or ``self.lse_function`` says to a problem as it stands, whatever is offered."""
        if function is None:
            raise value_error("with_lse", "be given to ask for the lse", None)
        tensors = (problem.query, problem.key, problem.value)
        mask, options = self._spoken(problem)
        if self.call is None:
            return function(*tensors, mask, **options)
        return self.call(function, *tensors, mask, **options)

    def reasons_against(self, problem: Problem) -> tuple[str, ...]:
        """The reasons that the function gives beforehand not to answer a problem; empty if it will."""
        if self.reasons is None:
            return ()
        mask, options = self._spoken(problem)
        return tuple(self.reasons(problem.query, problem.key, problem.value, mask, **options))

    def _answer(self, function: Callable[..., Any] | None, problem: Problem) -> Any:
        lacks = self.missing(self.needed(problem))
        if lacks:  # a law has made this problem of one that the function takes
            raise unsupported("the function", lacks)
        return self.ask(function, problem if "gqa" in self.offers else problem.ungrouped())

    def _spoken(self, problem: Problem) -> tuple[object, dict[str, Any]]:
        """The mask and the options of a problem in the form that the function wants."""
        options = problem.options | (problem.positions if self._reads_positions(problem) else {})
        return problem.allowed if self.masks == "dense" else problem.mask, options

    def _reads_positions(self, problem: Problem) -> bool:
        return self.masks == "objects" or "relative" in problem.in_use


def _signature_offers(function: Callable[..., Any]) -> frozenset[str] | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin does not say what it takes
        return None
    named = {parameter.name for parameter in parameters}
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    said = (name for name in (*OPTIONS, *_POSITIONS) if name != "relative")  # a parameter does not say what it takes
    return frozenset(name for name in said if anything or name in named)
