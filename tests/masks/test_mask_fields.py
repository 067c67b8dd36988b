"""Masks refuse arguments of wrong types and sizes with an error, and accept all others.

Every argument of every mask and recipe is tried with every value of one list, against a table of accepted values.
"""

import functools
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.masks.mask_arguments import CONSTRUCTORS, VALUES

import saccade as sc
from saccade import masks

_SENTENCE = re.compile(r"(?P<where>[\w.]+): (?P<argument>.+?) must (?P<rule>.+); got (?P<got>.+)\.")


def _outcome(name: str, argument: str, call: Callable[[], Any]) -> str:
    """Return "taken" if the made mask works, "refused" if the error is one of our sentences, or else the message."""
    try:
        mask = call()
    except (ValueError, TypeError, sc.UnsupportedError) as refusal:
        line = str(refusal).splitlines()[0]
        found = _SENTENCE.fullmatch(line)
        is_ours = found and found["where"] == name and argument in found["argument"].replace(",", "").split()
        is_short = len(line) < 200 and not re.search(r"\b(tensor|array)\(", line)
        return "refused" if is_ours and is_short else line
    _answers(mask)
    return "taken"


def _answers(mask: masks.Mask) -> None:
    """Check that a mask can be read, also by way of its plan, and has a name."""
    assert str(mask)
    if any(tensor.is_meta for tensor in mask.tensors()):
        assert mask.shape == (1, 1)
    else:
        dense = mask.to_dense(5)
        assert dense.dtype == torch.bool
        assert mask.density(5) == pytest.approx(dense.double().mean().item())


@pytest.mark.parametrize(
    "name, argument", [(name, argument) for name, (_, _, taken) in CONSTRUCTORS.items() for argument in taken]
)
def test_an_argument_is_taken_or_refused(name: str, argument: str) -> None:
    constructor, right, taken = CONSTRUCTORS[name]
    where = name.partition(",")[0]
    outcomes = {
        value: _outcome(where, argument, lambda make=make: constructor(**(right | {argument: make()})))  # type: ignore[misc]
        for value, make in VALUES.items()
    }
    assert outcomes == {value: "taken" if value in taken[argument] else "refused" for value in VALUES}


# The methods of a mask that tells two batch items and three heads apart, and what their arguments take.
_TWO_BY_THREE = masks.Dense(torch.ones(2, 3, 5, 5, dtype=torch.bool))
_LENGTHS = {"0", "1", "3", "np.int64"}
METHODS: dict[str, tuple[dict[str, Any], dict[str, set[str]]]] = {
    "to_dense": (
        {"q_len": 2},
        {
            "q_len": _LENGTHS,
            "kv_len": _LENGTHS | {"None"},
            "batch": {"0", "1", "None"},
            "heads": {"0", "1", "3", "np.int64", "None"},
            "q_positions": {"(2, 1)", "int tensor", "int tensor, 2-D", "negative tensor", "None"},
            "kv_positions": {"(2, 1)", "int tensor", "int tensor, 2-D", "negative tensor", "None"},
        },
    ),
    "plan": (
        {"q_len": 2},
        {"q_len": _LENGTHS, "kv_len": _LENGTHS | {"None"}, "batch": {"0", "1", "None"}, "heads": _LENGTHS},
    ),
    "density": (
        {"q_len": 2},
        {
            "q_len": _LENGTHS,
            "kv_len": _LENGTHS | {"None"},
            "batch": {"0", "1", "None"},
            "heads": {"0", "1", "3", "np.int64", "None"},
        },
    ),
    "picture": (
        {"q_len": 2},
        {"q_len": _LENGTHS, "kv_len": _LENGTHS | {"None"}, "batch": {"0", "1"}, "head": {"0", "1"}},
    ),
}
_HUGE = {"2**21", "2**35"}  # for lengths: no mistake, but more than is to be computed here


@pytest.mark.parametrize(
    "name, argument", [(name, argument) for name, (_, taken) in METHODS.items() for argument in taken]
)
def test_an_argument_of_a_method_is_taken_or_refused(name: str, argument: str) -> None:
    right, taken = METHODS[name]
    values = {value: make for value, make in VALUES.items() if value not in _HUGE or name == "picture"}
    outcomes = {}
    for value, make in values.items():
        call = functools.partial(getattr(_TWO_BY_THREE, name), **(right | {argument: make()}))
        try:
            call()
            outcomes[value] = "taken"
        except (ValueError, TypeError) as refusal:
            found = _SENTENCE.fullmatch(str(refusal).splitlines()[0])
            is_ours = found and found["where"] == f"Dense.{name}" and argument in found["argument"].split()
            outcomes[value] = "refused" if is_ours else str(refusal)
    assert outcomes == {value: "taken" if value in taken[argument] else "refused" for value in values}


@pytest.mark.parametrize("value", [5, True, None, "abc", {1}, torch.ones(2, 2, dtype=torch.bool), masks.Causal])
@pytest.mark.parametrize("sign", ["&", "|"])
def test_only_masks_are_joined(value: Any, sign: str) -> None:
    join = operator.and_ if sign == "&" else operator.or_
    for call in (lambda: join(masks.Causal(), value), lambda: join(value, masks.Causal())):
        with pytest.raises(TypeError, match=rf"Causal: \{sign} must join two masks; got .+\."):
            call()


@pytest.mark.parametrize(
    "answer, got",
    [(lambda q: 1, "int"), (lambda q: None, "NoneType"), (lambda q: q, "int64"), (lambda q: q.float(), "float32")],
)
def test_a_function_answers_with_a_bool_tensor(answer: Callable[[torch.Tensor], Any], got: str) -> None:
    mask = masks.Predicate(lambda b, h, q, kv: answer(q))
    rule = f"Predicate: function must return a bool tensor, True = may attend; got {got}\\."
    with pytest.raises(TypeError, match=rule):
        mask.to_dense(3)
    x = torch.zeros(1, 1, 3, 8)
    with pytest.raises(TypeError, match=rule):
        sc.attention(x, x, x, mask=mask)


def test_classes_are_refused_as_masks() -> None:
    with pytest.raises(TypeError, match=r"attention: mask must be None, .*; got the class Causal\."):
        sc.attention(*[torch.zeros(1, 1, 3, 8)] * 3, mask=masks.Causal)


@pytest.mark.parametrize("shape", [None, 5, (1, 2, 3), [1, 1, 3, 3], "abcd", torch.ones(4)])
def test_a_mask_is_made_to_fit_four_sizes(shape: Any) -> None:
    with pytest.raises(TypeError, match=r"as_mask: shape must be a tuple \(batch, heads, q_len, kv_len\); got .+\."):
        masks.as_mask(None, shape)


def test_sums_and_products_of_sizes_stay_within_what_is_counted() -> None:
    with pytest.raises(ValueError, match=r"Axial: height and width must make fewer than 2\*\*40 cells; got 1048576"):
        masks.Axial(2**20, 2**20)
    with pytest.raises(ValueError, match=r"bigbird: global_blocks must hold fewer than 2\*\*20 tokens; got 2 of 5242"):
        masks.bigbird(2**19)
    with pytest.raises(ValueError, match=r"Documents: lengths must add up to less than 2\*\*31; got \[\[1073741824"):
        masks.Documents([2**30, 2**30])


def test_errors_shorten_long_lists_and_tensors() -> None:
    with pytest.raises(ValueError, match=r"got \[0, 1, 2, 3, 4, 5, \.\.\.\]\.$"):
        masks.Padding([*range(1000), -1])
    with pytest.raises(ValueError, match=r"Padding: lengths must .*; got tensor \[3\] float32\.") as refused:
        masks.Padding(torch.full((3,), 7.0))
    assert "7" not in str(refused.value)


def test_every_mask_and_recipe_is_in_the_table() -> None:
    tried = {constructor for constructor, _, _ in CONSTRUCTORS.values()}
    without_sizes = {masks.Mask, masks.Full, masks.Causal, masks.as_mask, masks.parse}
    assert {getattr(masks, name) for name in masks.__all__} <= tried | without_sizes
