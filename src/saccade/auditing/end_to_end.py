"""Audit a model end to end: an output may depend on a token only if the rules of all layers together allow it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from saccade.auditing.finding import CounterExample
from saccade.auditing.model_under_test import ModelUnderTest, NoGradientError
from saccade.auditing.probe_sets import GRADIENT_SETS, LONG, Rows, bisect, row_sets, separating_sets
from saccade.auditing.reachability import Reach
from saccade.auditing.rounding_noise import row_differences
from saccade.auditing.zero_gradients import Probe, ZeroGradient, ZeroGradientReport, recheck


class EndToEnd:
    """The end-to-end probes of a model on one input, and their results.

    Every set of tokens is tested with two probes, because each misses leaks that the other detects. In a correct model,
    the gradient of an output with respect to a token that it must not see is exactly 0. Gradients therefore show even
    the smallest leak, but they do not pass through counts, routers or rounding. Changes of the tokens do, but they
    reveal a leak only if their effect exceeds the noise.

    Args:
        subject: the model and its input.
        reach: the declared rules.
        checked_rows: the rows to check, bool ``[batch, length]``: all except padding.
        noise: a function that measures how much noise changes the outputs. It is called only if a forbidden
            change occurs.
        tests: number of sets of rows to test.
        seed: seed of the changes and of the selection of rows.
        required: the rules that define which tokens the outputs must depend on; ``reach`` when None.

    Attributes:
        findings: the first leak, and the first output that ignores a token it should see.
        largest: largest change of a row that must not change, up to the first leak.
        covered: fraction of the forbidden pairs for which some change could have shown a leak; None for 512 tokens or
            more.
        hides_something: whether the rule forbids any pair, so that a leak is possible.
        no_gradient: why the outputs have no gradients; empty if they have gradients.
        zero_gradients: the report on gradients that are 0 but should not be.
        unread: tokens whose embeddings no output reads, bool ``[batch, length]``; determined only if some output sees
            less than it should.
    """

    def __init__(
        self,
        subject: ModelUnderTest,
        reach: Reach,
        checked_rows: Tensor,
        *,
        noise: Callable[[], float],
        tests: int,
        seed: int,
        required: Reach | None = None,
    ):
        self.required = required or reach
        self.subject, self.reach, self.checked_rows, self._noise = subject, reach, checked_rows, noise
        self.findings: list[CounterExample] = []
        self.largest, self.covered = 0.0, None if reach.shape[1] > LONG else 0.0
        self.hides_something, self.no_gradient = False, ""
        self.unread = torch.zeros_like(checked_rows)
        self.zero_gradients = ZeroGradientReport([], [], [])
        self._sets = list(row_sets(reach, checked_rows, tests, seed, subject.borders))
        draw = torch.Generator().manual_seed(seed)
        vectors = subject.vectors
        other = torch.randn(vectors.shape, generator=draw, dtype=torch.float64).to(vectors)
        self._other = vectors + other * vectors.std()

    @cached_property
    def floor(self) -> float:
        """The largest output change due to noise; 0 if it was not measured because no forbidden change occurred."""
        return self._noise() if self.largest else 0.0

    def run(self) -> EndToEnd:
        """Test all sets of tokens with both probes, up to the first finding of each kind."""
        tried: list[tuple[Tensor, Tensor]] = []
        for keys in [*separating_sets(self.reach), *(~row_set.sources for row_set in self._sets)]:
            clean = self.checked_rows & ~self.reach.through(keys)
            if bool(clean.any()) and bool(keys.any()) and not self._found("leak"):
                tried.append((clean, keys))
                self._change(clean, keys)
        self.hides_something = bool(tried)
        self._cover(tried)
        self._gradients()
        return self

    def swapped(self, keys: Tensor) -> Tensor:
        """Return the token embeddings, with those of the tokens ``keys`` replaced."""
        return torch.where(keys.to(self._other.device)[..., None], self._other, self.subject.vectors)

    def effect(self, keys: Tensor) -> Tensor:
        """Return how much each output row changes if the tokens ``keys`` change, ``[batch, length]``."""
        return row_differences(self.subject.run(self.swapped(keys)), self.subject.rows).cpu()

    def _found(self, kind: str) -> bool:
        return any(one.kind == kind for one in self.findings)

    def _change(self, clean: Tensor, keys: Tensor) -> None:
        size = self.effect(keys)
        self.largest = max(self.largest, float(size[clean].max()))
        if not self.largest or not bool((hit := clean & (size > self.floor)).any()):
            return
        item, position = hit.nonzero()[0].tolist()
        key = bisect(keys, lambda half: bool(self.effect(half)[item, position] > self.floor))
        leak = CounterExample(
            "leak", (item, position), key, float(size[item, position]), "", "change", self.subject.passes
        )
        self.findings.append(leak)

    def _gradients(self) -> None:
        try:
            measure = self._gradient_function(self.subject, None)
        except NoGradientError as error:
            self.no_gradient = str(error)
            return
        zeros, sizes = list[ZeroGradient](), dict[Probe, Tensor]()
        for number, row_set in enumerate(self._sets if self.reach.shape[1] <= LONG else self._sets[:GRADIENT_SETS]):
            self._check_clean_gradients(row_set, measure)
            probe = Probe("", 0, number)
            sizes[probe] = measure(row_set.rows)
            zeros += self._zero_gradients(probe, row_set, (sizes[probe] == 0) & row_set.sources & self.checked_rows)
        del measure  # free this graph before building the next
        self.zero_gradients = self._without_unread(recheck(self.subject, zeros, sizes, self._remeasure))
        for one in self.zero_gradients.blind[:1]:
            self.findings.append(CounterExample("blind", one.row, one.first, 0.0, "", "gradient", self.subject.passes))

    def _without_unread(self, report: ZeroGradientReport) -> ZeroGradientReport:
        """Return the report without tokens whose embeddings no output reads, not even the output at the same position.

        The model replaces the embeddings of such tokens, as vision-language models do with image placeholders.
        """
        if not report.blind:
            return report
        self.unread = self._gradient_function(self.subject, None)(torch.ones_like(self.checked_rows)) == 0
        kept = [one._replace(keys=one.keys & ~self.unread) for one in report.blind]
        return report._replace(blind=[one for one in kept if bool(one.keys.any())])

    def _gradient_function(self, subject: ModelUnderTest, vectors: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Return a function that measures the gradient of output rows with respect to each token.

        It returns the largest absolute component of each token's gradient, float64 ``[batch, length]``.
        """
        leaf, out = subject.graph(vectors)
        draw = torch.Generator().manual_seed(1)

        def measure(rows: Tensor) -> Tensor:
            weights = torch.randn(out.shape, generator=draw).to(out)
            weights *= rows.to(out.device).view(*rows.shape, *[1] * (out.dim() - 2))
            subject.passes += 1
            (grad,) = torch.autograd.grad(out, leaf, weights, retain_graph=True)
            return grad.abs().amax(-1).cpu().double().nan_to_num(nan=math.inf)

        return measure

    def _remeasure(self, subject: ModelUnderTest, changed: bool, probes: Collection[Probe]) -> dict[Probe, Tensor]:
        measure = self._gradient_function(subject, self._other.to(subject.vectors) if changed else None)
        return {probe: measure(self._sets[probe.position].rows) for probe in sorted(probes)}

    def _check_clean_gradients(self, row_set: Rows, measure: Callable[[Tensor], Tensor]) -> None:
        clean = self.checked_rows & ~self.reach.through(~row_set.sources)
        if self._found("leak") or not bool(clean.any()):
            return
        size = measure(clean)
        bad = (size > 0) & ~row_set.sources
        if not bool(bad.any()):
            return
        item, position = bad.nonzero()[0].tolist()
        row = bisect(clean, lambda half: bool(measure(half)[item, position] > 0))
        typical = size[row_set.sources].median() if bool(row_set.sources.any()) else size.new_tensor(1.0)
        relative = float(size[item, position] / typical) if float(typical) else math.inf
        self.findings.append(
            CounterExample("leak", row, (item, position), relative, "", "gradient", self.subject.passes)
        )

    def _zero_gradients(self, probe: Probe, row_set: Rows, zero: Tensor) -> Iterator[ZeroGradient]:
        """Yield a `ZeroGradient` for each row with gradient 0 for a required token. The rows must share no source."""
        for item, position in row_set.rows.nonzero().tolist() if bool(zero.any()) else ():
            expected = self.required.sources(self.required.one(item, position))
            if bool((zero & expected).any()):
                yield ZeroGradient(probe, (item, position), expected, zero & expected)

    def _cover(self, tried: Sequence[tuple[Tensor, Tensor]]) -> None:
        if self.covered is None:
            return
        batch, length = self.reach.shape
        seen = torch.zeros(batch, length, batch, length, dtype=torch.bool)
        for clean, keys in tried:
            seen |= clean[:, :, None, None] & keys
        hidden = torch.stack(
            [~self.reach.sources(self.reach.one(item, position)) for item in range(batch) for position in range(length)]
        ).view_as(seen)
        hidden &= self.checked_rows[:, :, None, None]
        self.covered = float((seen & hidden).sum() / hidden.sum().clamp_min(1))
