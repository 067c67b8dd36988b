"""The claim that a learned sink works: each head's sink takes weight from every key and contributes no value."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from saccade.auditing.claims.model_measurements import ModelMeasurements, first_of, result
from saccade.auditing.finding import ClaimResult, CounterExample
from saccade.auditing.replay import replaying
from saccade.auditing.rounding_noise import row_differences
from saccade.support.language import Message

_LARGE = 80.0  # a sink with this logit takes all weight, in float32 and in bfloat16
_EQUAL = 1e-2  # smaller differences, relative to all rows, count as rounding


def sinks(measured: ModelMeasurements) -> list[ClaimResult]:
    """Check each learned sink, a module's parameter with "sink" in its name and one logit for each head.

    - A larger logit takes weight from all keys: with a logit of 80, every row equals the module's output
      for an empty set of keys.
    - Each head's logit has a gradient; an implementation that ignores the logit fails this check.
    """
    owners = _sink_parameters(measured)
    if not owners:
        return [ClaimResult("sinks", "not answered", why="no sink parameter was found")]
    found = [one for name, own in owners.items() if (one := _check_sink(measured, name, own)) is not None]
    heads = sum(own.numel() for own in owners.values())
    where = Message("{heads} sinks in {modules} modules", heads=heads, modules=len(owners))
    return [result("sinks", found[0] if found else None, where)]


def _sink_parameters(measured: ModelMeasurements) -> dict[str, nn.Parameter]:
    """Return the sink parameter of each module that mixes tokens, including parameters of its submodules."""
    found = dict[str, nn.Parameter]()
    for name in measured.layered.mixed:
        for inner, own in measured.subject.modules[name].named_parameters():
            if "sink" in inner.rpartition(".")[2].lower() and own.numel():
                found.setdefault(name, own)
    return found


def _check_sink(measured: ModelMeasurements, name: str, sink: nn.Parameter) -> CounterExample | None:
    """Return a counter-example if a module's sink does not work, otherwise None."""
    found: list[CounterExample] = []
    subject, module = measured.subject, measured.subject.modules[name]

    def visit(_: str, rerun: Callable[[Tensor], Tensor], hidden: Tensor, out: Tensor) -> None:
        if found:
            return
        row = (0, out.shape[1] - 1)
        with torch.enable_grad():
            rows = rerun(hidden)
            grads = (
                torch.autograd.grad(rows.float().square().sum(), sink, allow_unused=True)
                if rows.requires_grad
                else [None]
            )
        if grads[0] is None or not bool((grads[0] != 0).all()):
            found.append(_blind(row, name, subject.passes))
            return
        original = sink.detach().clone()
        try:
            sink.data.fill_(_LARGE)
            large = rerun(hidden)
        finally:
            sink.data.copy_(original)
        apart = row_differences(large - large[:, :1] + out, out)  # without keys, all rows are the same constant
        if float(apart.max()) > _EQUAL:
            at = first_of(apart == apart.max())
            nouns = ("output", "the keys although the sink takes all weight, at token")
            found.append(CounterExample("leak", at, at, float(apart.max()), name, "sink", subject.passes, nouns))

    with torch.no_grad(), replaying(subject, {name: module}, visit):
        subject.run()
    return found[0] if found else None


def _blind(row: tuple[int, int], name: str, passes: int) -> CounterExample:
    return CounterExample("blind", row, row, 0.0, name, "sink", passes, ("output", "the sink of some head at token"))
