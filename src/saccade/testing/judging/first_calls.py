"""`first_calls`: try the capabilities that a kernel does not declare, and exclude those that fail from its claims."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from saccade.masks import Causal, Documents, Mask, Padding, Strided, Window
from saccade.support.language import Message
from saccade.testing import oracle
from saccade.testing.case import Case
from saccade.testing.cases import CASES
from saccade.testing.judging.declaration import DTYPES, listed
from saccade.testing.judging.fitting import fitted
from saccade.testing.judging.kernel import USUAL_DTYPES, Kernel
from saccade.testing.size_cases import SIZE_CASES
from saccade.testing.tolerances import error, tolerance

_LENGTHS, _WIDTHS, _DTYPES = (7, 16, 64, 128), (8, 64), ("float32", "float64", "bfloat16", "float16")
_MASKS: dict[str, Callable[[int], Mask]] = {
    "causal": lambda length: Causal(),
    "window": lambda length: Causal() & Window(2, 0),
    "padding": lambda length: Padding((length, length - 2)),
    "documents": lambda length: Documents((3, length - 3)),
    "any": lambda length: Causal() & Strided(2),
}


@dataclasses.dataclass(frozen=True)
class _Choices:
    """A claim tried value by value, such as dtypes.

    Attributes:
        claim: the field of `Declaration`.
        every: all values to try.
        words: a template of the note about values that the kernel lacks.
        demand: the value of ``--claim`` that claims all values.
    """

    claim: str
    every: tuple[Any, ...]
    words: str
    demand: str


_CHOICES = (
    _Choices("dtypes", tuple(DTYPES), "takes no {names}", "dtypes=[{}]".format(", ".join(f'"{x}"' for x in DTYPES))),
    _Choices("masks", tuple(_MASKS), "takes no {names} masks", 'masks=["any"]'),
    _Choices(
        *("widths", tuple(sorted({case.head_dim for case in (*CASES, *SIZE_CASES)}))),
        *("takes no width {names}", 'widths="any"'),
    ),
)


@dataclasses.dataclass(frozen=True)
class _Capability:
    """A capability that a kernel may lack, the claim that excludes it, and calls that require it.

    Attributes:
        claim, without: the field of `Declaration`, and its value without the capability.
        what: a phrase that says what the kernel lacks, for the note.
        demand: the value of ``--claim`` that claims the capability.
        calls: function of a supported case that returns the changes to the case for each call.
        gradients: whether the calls need the backward pass.
    """

    claim: str
    without: object
    what: str
    demand: str
    calls: Callable[[Case], Iterable[dict[str, Any]]]
    gradients: bool = False


_DECODING = _Capability(
    *("decoding", False, "takes only as many queries as keys", "decoding=true"),
    lambda case: [{"kv_len": 2 * case.q_len, "mask": mask} for mask in (None, Causal())],
)
_CAPABILITIES = (
    _Capability("full", False, "takes no full attention", "full=true", lambda case: [{"mask": None}]),
    _Capability(
        *("groups", False, "takes no grouped heads", "groups=true"), lambda case: [{"num_heads": 4, "num_kv_heads": 2}]
    ),
    _DECODING,
    _Capability(
        *("value_widths", "same", "takes only values as wide as keys", 'value_widths="any"'),
        lambda case: [{"value_dim": 2 * case.head_dim}],
    ),
    _Capability(*("gradients", False, "has no backward pass", "gradients=true"), lambda case: [{}], gradients=True),
    _Capability(
        *("empty", False, "takes no empty inputs", "empty=true"),
        lambda case: [{"batch": 0}, {"q_len": 0}, {"kv_len": 0}, {"q_len": 0, "kv_len": 0}],
    ),
)


def first_calls(
    kernel: Kernel,
    device: torch.device | str = "cpu",
    dtypes: Sequence[torch.dtype] | None = None,
) -> Kernel:
    """Use small calls to try the capabilities that a kernel does not declare; return the kernel with new claims.

    If a call raises an error, the claims of the returned kernel exclude the capability, and a note says so. A kernel
    that takes none of the simplest inputs is returned unchanged, and so is a function in a shared library, because an
    unsupported call could crash the process. Cost: about 30 calls on 7 tokens.

    Args:
        kernel: the kernel; capabilities that it declares are not tried, and stay unchanged.
        device: device of the inputs.
        dtypes: dtypes that count as declared.
    """
    if kernel.source is not None and kernel.source.is_library:
        return kernel
    calls = _Calls(kernel, device)
    declared = [name for name in DTYPES if name in (kernel.declaration.dtypes or ()) or DTYPES[name] in (dtypes or ())]
    if calls.find_simplest([name for name in _DTYPES if name in declared or not declared]):
        calls.try_lengths()
        for choices in _CHOICES:
            calls.try_choices(choices, declared)
        for capability in _CAPABILITIES:
            calls.try_capability(capability)
        calls.compare_alignment()
    return calls.kernel


class _Calls:
    """The first calls of a kernel, with its claims so far and the simplest inputs that it takes."""

    def __init__(self, kernel: Kernel, device: torch.device | str):
        self.kernel, self.device = kernel, device
        self.case, self.dtype = Case("first-call", num_heads=2, num_kv_heads=2), torch.float32

    def find_simplest(self, dtypes: Sequence[str]) -> bool:
        """Find inputs that the kernel takes, by trying dtypes, lengths, widths and masks; return whether any exist."""
        for name, length, width, mask in itertools.product(dtypes, _LENGTHS, _WIDTHS, (None, Causal())):
            changes: dict[str, Any] = {
                "q_len": length,
                "kv_len": length,
                "head_dim": width,
                "value_dim": width,
                "mask": mask,
            }
            case = fitted(dataclasses.replace(self.case, **changes), self.kernel.declaration)
            if self._error(case, DTYPES[name]) == "":
                self.case, self.dtype = case, DTYPES[name]
                return True
        return False

    def try_lengths(self) -> None:
        """If the shortest length raises an error, claim only multiples of the length of the simplest inputs."""
        shortest, length = _LENGTHS[0], self.case.q_len
        why = None
        if length > shortest and not self.kernel.declaration.lengths:
            why = self._error(dataclasses.replace(self.case, q_len=shortest, kv_len=shortest))
        if why:
            what = Message("takes only lengths that are multiples of {length}", length=length)
            self._leave_out("lengths", {"multiple": length}, what, why, "lengths={multiple=1}")

    def try_choices(self, choices: _Choices, declared: Sequence[object] = ()) -> None:
        """Call the kernel with each value of a claim, such as each dtype; if some fail, claim only the others."""
        claims = self.kernel.declaration
        if getattr(claims, choices.claim) is not None or (choices.claim == "masks" and claims.mask_objects):
            return
        errors = {x: self._error_of_choice(choices.claim, x) for x in choices.every if x not in declared}
        lacks = {x: why for x, why in errors.items() if why}
        if lacks:
            taken = tuple(x for x in choices.every if x not in lacks and x != "any")
            what = Message(choices.words, names=listed(map(str, lacks)))
            self._leave_out(choices.claim, taken, what, next(iter(lacks.values())), choices.demand)

    def try_capability(self, capability: _Capability) -> None:
        """Exclude a capability from the claims if one of the calls that require it raises an error."""
        if getattr(self.kernel.declaration, capability.claim) is not None:
            return
        cases = (dataclasses.replace(self.case, **changes) for changes in capability.calls(self.case))
        errors = (self._error(case, gradients=capability.gradients) for case in cases)
        why = next(filter(None, errors), "")
        if why:
            what = Message(capability.what)
            self._leave_out(capability.claim, capability.without, what, why, capability.demand)

    def compare_alignment(self) -> None:
        """Claim only equal numbers of queries and keys if the causal flag aligns the first query with the first key."""
        kernel, claim = self.kernel, _DECODING.claim
        case = dataclasses.replace(self.case, mask=Causal(), kv_len=2 * self.case.q_len)
        is_flag = kernel.form.truth is None and kernel.form.settings.get("masks") in ("causal", "window")
        if not is_flag or kernel.declaration.decoding is not None or self._error(case) != "":
            return
        problem = case.problem(self.dtype, self.device)
        out = kernel.subject(kernel, self.device).output(problem)
        from_first = torch.ones_like(problem.allowed).tril()
        want = oracle.attention(problem.query, problem.key, problem.value, from_first)[0]
        if out.shape == want.shape and error(out, want) <= tolerance(self.dtype, "output"):
            why = "with fewer queries than keys, the first query sees the first key alone, as with torch's is_causal"
            self._leave_out(claim, _DECODING.without, Message(_DECODING.what), Message(why), _DECODING.demand)

    def _error_of_choice(self, claim: str, choice: Any) -> str | None:
        case = self.case
        if claim == "dtypes":
            return self._error(case, DTYPES[choice])
        if claim == "masks":
            return self._error(dataclasses.replace(case, mask=_MASKS[choice](case.q_len)))
        return self._error(dataclasses.replace(case, head_dim=choice, value_dim=choice))

    def _error(self, case: Case, dtype: torch.dtype | None = None, *, gradients: bool = False) -> str | None:
        """Return the error of one call: "" if it raises none, None if the claims or the form exclude the call."""
        subject = self.kernel.subject(self.kernel, self.device)
        problem = case.problem(dtype or self.dtype, self.device)
        problem = problem.leaves() if gradients else problem
        if subject.reasons_against(problem):
            return None
        try:
            out = subject.output(problem)
            if gradients:
                torch.autograd.grad(out.sum(), (problem.query, problem.key, problem.value), allow_unused=True)
        except Exception as raised:  # a kernel may raise any error
            return f"{type(raised).__name__}: {' '.join(str(raised).split())[:120]}"
        return ""

    def _leave_out(self, claim: str, without: Any, what: str, why: str, demand: str) -> None:
        changes: dict[str, Any] = {claim: without}
        self.kernel = dataclasses.replace(
            self.kernel, declaration=dataclasses.replace(self.kernel.declaration, **changes)
        )
        if claim == "dtypes":  # otherwise, all laws would also be tried in half precision
            usual = tuple(name for name in USUAL_DTYPES if name in without)
            self.kernel = dataclasses.replace(self.kernel, dtypes=usual or without)
        words = "{what} (declared for you: {error}); claim it with --claim {claim}"
        self._note(Message(words, what=what, error=why, claim=shlex.quote(demand)))

    def _note(self, note: str) -> None:
        self.kernel = dataclasses.replace(self.kernel, notes=(*self.kernel.notes, note))
