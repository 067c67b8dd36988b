"""The `Subject` of a conformance check: the attention function under test, and how to call it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import torch
from torch import Tensor

from saccade.support.errors import type_error, unsupported, value_error
from saccade.support.language import Message
from saccade.support.validation import check_bool, check_choice
from saccade.testing.case import Case
from saccade.testing.global_state import Surroundings
from saccade.testing.problem import Problem

OPTIONS = ("bias", "scale", "softcap", "dropout_p", "sink_logit", "score", "relative")
_POSITIONS = ("q_positions", "kv_positions")
_LACKS = {"lse": "returns no lse", "gqa": "takes no grouped heads", "relative": "takes no relative bias"}


@dataclasses.dataclass(frozen=True)
class Claims:
    """Claims about the memory of an attention function, which are tested in addition to the laws.

    Attributes:
        memory_exponent: the size of the largest intermediate tensor grows as the length to this power; 1.0 means
            linear memory.
    """

    memory_exponent: float | None = None


class Subject:
    """The attention function under test, in the calling convention of `saccade.testing`.

    Args:
        function: ``function(query, key, value, mask, **options) -> out``. Options (``bias``, ``scale``,
            ``softcap``, ``dropout_p``, ``sink_logit``, ``score``) are passed only if they are used. ``q_positions``
            and ``kv_positions`` are passed with ``masks="objects"`` or with a relative bias, if they are used. A
            relative bias is a `saccade.positions.Bias`, passed as ``bias``.
        call, with_lse, offers, reasons, gqa, gradients, masks, claims, device: see `saccade.testing.check`.

    Attributes:
        has_gradients: whether the function has a backward pass.
        offers: names of accepted options, including "lse" and "gqa". The function must refuse all other options.
        undeclared: options that the function may or may not accept; they are not tried.
        surroundings: functions and torch settings as they were before the first call.
        declares_options: whether the user declared the accepted options. If so, the function must not refuse them.

    Raises:
        TypeError: the function, or another argument that must be callable, is not callable.
        ValueError: ``offers`` contains an unknown option, or ``masks`` is unknown.
        RuntimeError, AssertionError: torch cannot use the device on this machine.
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
        gradients: bool = True,
        masks: Literal["dense", "objects"] = "dense",
        claims: Claims | None = None,
        device: torch.device | str = "cpu",
    ):
        callables = {"call": call, "with_lse": with_lse, "reasons": reasons}
        for name, target in [("function", function), *callables.items()]:
            if not callable(target) and (target is not None or name not in callables):
                raise type_error(name, "be callable", type(target).__name__)
        check_choice("masks", masks, ("dense", "objects"))
        unknown = set(offers or ()) - {*OPTIONS, *_POSITIONS}
        if unknown:
            rule = f"be among {', '.join((*OPTIONS, *_POSITIONS))}"
            raise value_error("offers", rule, ", ".join(sorted(unknown)))
        self.function, self.call, self.lse_function, self.reasons = function, call, with_lse, reasons
        torch.empty(0, device=device)  # raise now if the device is missing, which is not the function's fault
        self.masks, self.device, self.has_gradients = masks, device, check_bool("gradients", gradients)
        self.surroundings = Surroundings()
        self.claims = Claims() if claims is None else claims
        options = _signature_offers(call or function) if offers is None else frozenset(offers)
        besides = {"lse": with_lse is not None, "gqa": gqa}
        self.offers = (options or frozenset()) | {name for name, offered in besides.items() if offered}
        self.undeclared = frozenset((*OPTIONS, *_POSITIONS) if options is None else ())
        if offers is None and "bias" in self.offers:
            self.undeclared = frozenset(["relative"])
        self.declares_options = offers is not None or reasons is not None

    def output(self, problem: Problem) -> Tensor:
        """Return the subject's output for a problem."""
        out = self._call_if_offered(self.function, problem)
        if not isinstance(out, Tensor):
            hint = "pass call= to pick the output, or with_lse= if it returns (out, lse)"
            raise type_error("function", "return one tensor", type(out).__name__, hint=hint)
        return out

    def output_in_thread(self, problem: Problem) -> Tensor:
        """Compute the subject's output in a new thread, so that this package is not on the call stack."""
        if "gqa" not in self.offers:
            problem = problem.ungrouped()
        mask, options = self._arguments(problem)
        tensors = (problem.query, problem.key, problem.value)
        with ThreadPoolExecutor(1) as threads:
            if self.call is None:
                out: Tensor = threads.submit(self.function, *tensors, mask, **options).result()
            else:
                out = threads.submit(self.call, self.function, *tensors, mask, **options).result()
        return out

    def output_and_lse(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """Return the subject's output for a problem, and the log-sum-exp of each row."""
        out, lse = self._call_if_offered(self.lse_function, problem)
        return out, lse

    def lacks(self, case: Case, needed: Collection[str]) -> tuple[str, ...]:
        """Return a reason for each option that the case or the law needs but the subject does not offer."""
        reads_positions = self.masks == "objects" or case.relative is not None
        return self.missing([*needed, *case.needs, *(case.explicit_positions if reads_positions else ())])

    def missing(self, needed: Collection[str]) -> tuple[str, ...]:
        """Return a reason for each option in ``needed`` that the subject does not offer."""
        return tuple(
            _LACKS.get(name, Message("takes no {name}", name=name))
            for name in dict.fromkeys(needed)
            if name not in self.offers
        )

    def needed(self, problem: Problem) -> tuple[str, ...]:
        """Return the names of the options and positions that the subject needs for a problem."""
        return (*problem.in_use, *(problem.positions if self._reads_positions(problem) else ()))

    def apply(self, function: Callable[..., Any] | None, problem: Problem) -> Any:
        """Call the subject's ``function`` or ``lse_function`` on a problem, even with options that are not offered."""
        if function is None:
            raise value_error("with_lse", "be given to compute the lse", None)
        tensors = (problem.query, problem.key, problem.value)
        mask, options = self._arguments(problem)
        if self.call is None:
            return function(*tensors, mask, **options)
        return self.call(function, *tensors, mask, **options)

    def reasons_against(self, problem: Problem) -> tuple[str, ...]:
        """Return the reasons, declared in advance, why the subject cannot run a problem; empty if it can."""
        if self.reasons is None:
            return ()
        mask, options = self._arguments(problem)
        return tuple(self.reasons(problem.query, problem.key, problem.value, mask, **options))

    def _call_if_offered(self, function: Callable[..., Any] | None, problem: Problem) -> Any:
        lacks = self.missing(self.needed(problem))
        if not self.has_gradients and torch.is_grad_enabled() and problem.requires_grad:
            lacks = (*lacks, "has no backward pass")
        if lacks:  # possible if a law derived this problem from an accepted one
            raise unsupported("the function", lacks)
        return self.apply(function, problem if "gqa" in self.offers else problem.ungrouped())

    def _arguments(self, problem: Problem) -> tuple[object, dict[str, Any]]:
        """Convert the mask and the options of a problem to the form that the subject takes."""
        options = problem.options | (problem.positions if self._reads_positions(problem) else {})
        return problem.allowed if self.masks == "dense" else problem.mask, options

    def _reads_positions(self, problem: Problem) -> bool:
        return self.masks == "objects" or "relative" in problem.in_use


def _signature_offers(function: Callable[..., Any]) -> frozenset[str] | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin has no signature
        return None
    named = {parameter.name for parameter in parameters}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    visible = (name for name in (*OPTIONS, *_POSITIONS) if name != "relative")  # not a parameter's name
    return frozenset(name for name in visible if takes_all or name in named)
