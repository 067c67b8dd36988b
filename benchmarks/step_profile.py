"""The parts of a training step and their times, from a profile of its operators."""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

Scope = tuple[Any, str, str]
"""An object, the name of its function whose operators form a part of the step, and the name of the part."""

MATMUL, ATTENTION, OPTIMIZER, PYTHON, REST = "matmul", "attention", "optimizer", "Python and autograd", "the rest"
_PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "mkldnn_linear"))
_NODE, _MARK = "autograd::engine::evaluate_function", "part: "


def profiled(step: Callable[[], object], scopes: Sequence[Scope], attention: Sequence[str]) -> dict[str, float]:
    """Run a step under the profiler and return the seconds of each of its parts.

    Args:
        step: runs forward, backward and optimizer in this thread.
        scopes: the functions whose operators belong to a part, and the operators of their backward pass with them.
        attention: the first letters of the operators that compute attention, all that they call included.
    """
    with _marked(scopes), profile(activities=[ProfilerActivity.CPU]) as run, record_function("step"):
        step()
    return parts(run.events() or [], attention)


def parts(events: Sequence[FunctionEvent], attention: Sequence[str]) -> dict[str, float]:
    """Divide the self time of events into parts, in seconds; see `profiled`."""
    found: dict[int, str] = {}
    of_node: dict[int, str] = {}  # by the number that the forward operator shares with its node of the backward pass
    seconds: defaultdict[str, float] = defaultdict(float)
    for event in sorted(events, key=lambda event: event.time_range.start):
        parent = event.cpu_parent
        inherited = REST if parent is None else found.get(parent.id, REST)
        if event.name.startswith(_NODE):
            inherited = of_node.get(event.sequence_nr, inherited)
        part = found[event.id] = _part(event.name, inherited, attention)
        if event.sequence_nr >= 0 and event.scope == 0 and not event.name.startswith(_NODE):
            of_node[event.sequence_nr] = REST if part == MATMUL else part
        is_operator = part in (MATMUL, ATTENTION) or event.name.startswith("aten::")
        seconds[part if is_operator else PYTHON] += event.self_cpu_time_total * 1e-6
    return dict(seconds)


def _part(name: str, inherited: str, attention: Sequence[str]) -> str:
    if inherited in (MATMUL, ATTENTION):
        return inherited
    if name.startswith(tuple(attention)):
        return ATTENTION
    if name in _PRODUCTS:
        return MATMUL
    if name.startswith("Optimizer."):
        return OPTIMIZER
    return name.removeprefix(_MARK) if name.startswith(_MARK) else inherited


@contextmanager
def _marked(scopes: Sequence[Scope]) -> Iterator[None]:
    """Mark the calls of functions in the profile, each as the part to which it belongs."""

    def marked(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with record_function(_MARK + part):
                return function(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for its, name, part in scopes:
            stack.enter_context(patch.object(its, name, marked(getattr(its, name), part)))
        yield
