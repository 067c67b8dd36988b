"""The `Claim` class: a statement about attention, its verdict, and a check with seeded random numbers."""

from __future__ import annotations

import dataclasses
import inspect
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from saccade.support.errors import type_error
from saccade.support.validation import check_int
from saccade.theory.measurement import Measurement, Measurements

Verdict = Literal["holds", "holds if", "refuted"]
VERDICTS: tuple[Verdict, ...] = ("holds", "holds if", "refuted")
Check = Callable[..., Measurements]
M = TypeVar("M", bound=nn.Module)


class Draw:
    """The random number generator that draws float64 tensors while one claim is checked with one seed.

    Args:
        seed: the seed of the run.
        name: the name of the claim. Different claims draw independent numbers from the same seed.

    Attributes:
        used: whether any number was drawn. A check without random numbers gives the same result for every seed.
    """

    def __init__(self, seed: int, name: str):
        entropy = np.random.SeedSequence([seed, zlib.crc32(name.encode())])
        self._generator = torch.Generator().manual_seed(int(entropy.generate_state(1, np.uint64)[0]) >> 1)
        self.used = False

    def normal(self, *shape: int) -> Tensor:
        """Draw independent standard normal numbers."""
        self.used = True
        return torch.randn(shape, dtype=torch.float64, generator=self._generator)

    def uniform(self, *shape: int) -> Tensor:
        """Draw independent numbers between 0 and 1."""
        self.used = True
        return torch.rand(shape, dtype=torch.float64, generator=self._generator)

    def permutation(self, n: int) -> Tensor:
        """Draw a permutation of the numbers below n, int64 ``[n]``."""
        self.used = True
        return torch.randperm(n, generator=self._generator)

    def integer(self) -> int:
        """Draw an integer below 2³¹, as the seed of a function with random results."""
        self.used = True
        return int(torch.randint(0, 1 << 31, (), generator=self._generator))

    def module(self, make: Callable[[], M]) -> M:
        """Build a float64 module with random initial parameters, without changing torch's global random generator."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.integer())
            return make().double()


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement that people make about attention, with a verdict that measurements can contradict.

    Attributes:
        name: words joined by hyphens.
        topic: the group that the claim belongs to, such as "softmax".
        statement: the claim in one sentence, as people usually state it, right or wrong.
        latex: the statement as a formula.
        source: a reference that states or corrects the claim.
        verdict: "holds", "holds if" (under the conditions), "refuted" (by a counter-example).
        conditions: when the claim holds; for a refuted claim, the correct statement.
        trial: the function that yields the measurements; `check` calls it.

    Example:
        >>> from saccade import theory
        >>> claim = theory.find("softmax-jacobian-as-printed")
        >>> claim.verdict
        'refuted'
        >>> print(claim.check()[1])
        derivative of weight 1 by score 2, two equal scores: seen -0.25, claimed 0.25 (refuted if more than 0.1 off)
    """

    name: str
    topic: str
    statement: str
    latex: str
    source: str
    verdict: Verdict
    conditions: str
    trial: Check

    @property
    def ingredients(self) -> tuple[str, ...]:
        """Names of the formulas and functions in the claim that can be replaced in `check`."""
        parameters = inspect.signature(self.trial).parameters.values()
        return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)

    def check(self, seed: int = 0, **kwargs: Any) -> tuple[Measurement, ...]:
        """Take the claim's measurements, which confirm or contradict its verdict.

        Args:
            seed: the seed of the random numbers.
            kwargs: replacements for the claim's `ingredients`, by name. If a replacement is wrong, at least one
                measurement disagrees.

        Returns:
            The measurements. They confirm the verdict if all of them agree.

        Raises:
            TypeError: the seed is not an int, or an ingredient is unknown.
        """
        return self.measure(Draw(check_int("seed", seed, 0), self.name), **kwargs)

    def measure(self, draw: Draw, **kwargs: Any) -> tuple[Measurement, ...]:
        """Take the measurements of `check` with random numbers from ``draw``."""
        unknown = sorted(set(kwargs) - set(self.ingredients))
        if unknown:
            rule = f"be among {', '.join(self.ingredients)}" if self.ingredients else "be left out"
            raise type_error(f"ingredients of {self.name}", rule, ", ".join(unknown))
        with _one_thread(), torch.enable_grad():
            return tuple(self.trial(draw, **kwargs))

    def __str__(self) -> str:
        return f"{self.name} ({self.verdict}): {self.statement}"

    __repr__ = __str__


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread within the block, because the tensors of a claim are too small for several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def claim(
    topic: str | None = None, *, latex: str, source: str, verdict: Verdict, conditions: str = ""
) -> Callable[[Check], Claim]:
    """Turn a function into a `Claim`; its docstring becomes the statement, and its module becomes the topic."""

    def make(trial: Check) -> Claim:
        name = trial.__name__.replace("_", "-")
        statement = " ".join((trial.__doc__ or "").split("\n\n")[0].split())
        subject = trial.__module__.rpartition(".")[2].replace("_", "-") if topic is None else topic
        return Claim(name, subject, statement, latex, source, verdict, conditions, trial)

    return make
