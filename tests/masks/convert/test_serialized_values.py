"""Values as integers and tensors, and back."""

import dataclasses
import math
import sys
from typing import Any

import pytest
import torch

import saccade as sc
from saccade import masks
from saccade.masks.convert import serialize as written
from saccade.masks.convert.serialize import decode, encode


@dataclasses.dataclass(frozen=True)
class Pair:
    """A value of the user's own, with a field that nobody is asked for."""

    first: Any
    second: Any = None
    both: int = dataclasses.field(default=0, init=False)


@dataclasses.dataclass
class Changeable:
    """Not frozen."""

    first: int = 1


class Outer:
    """A class with one inside of it."""

    @dataclasses.dataclass(frozen=True)
    class Inner:
        """Its name has a dot."""

        first: int


def double(x: float) -> float:
    return 2 * x


def Causal(x: float) -> float:  # the name of a mask of saccade
    return -x


def _holding(y: float) -> Any:
    return lambda x: x + y


VALUES = [
    None,
    True,
    False,
    0,
    7,
    -(2**40),
    0.1,
    math.inf,
    -0.0,
    "",
    "seven ll",
    "\x00 é, 注意, \x00\x00",
    "a text of more letters than go into one integer",
    (),
    (1, (2.5, "x", None), True),
    Pair(1, Pair("x", (0.5,))),
    Outer.Inner(3),
    masks.Causal(),
    masks.Causal() & masks.Window(2, 0),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back(value):
    numbers, tensors = encode(value)
    assert tensors == []
    assert {type(number) for number in numbers} == {int}
    assert max(map(abs, numbers)) < 2**63
    back = decode(numbers, tensors)
    assert type(back) is type(value)
    assert repr(back) == repr(value)


@pytest.mark.parametrize("function", [double, Causal, math.sqrt, torch.add], ids=["ours", "like a mask", "C", "torch"])
def test_a_function_comes_back_as_itself(function):
    known = function in (double, Causal)
    assert (encode(function) is not None) is known
    if known:
        assert decode(*encode(function)) is function
        assert decode(*encode((function, torch.ones(1))))[0] is function


def test_tensors_come_back_as_themselves():
    tensors = torch.arange(3), torch.rand(2)
    back = decode(*encode((Pair(tensors[1], 3), tensors[0], tensors[1])))
    assert back[0].first is back[2] is tensors[1]
    assert back[0].second == 3
    assert back[1] is tensors[0]


def test_programs_without_tensors_are_read_once():
    program, _ = encode(masks.Window(5, 1))
    assert decode(program, []) is decode(list(program), [])


def test_names_of_ours_are_those_that_users_write():
    program, _ = encode(masks.Causal())
    assert len(program) == 3  # a tag, the number of integers, and a name that fits into one
    assert len(encode(Causal)[0]) > 3


@pytest.mark.parametrize(
    "value",
    [
        Changeable(),
        (1, Changeable()),
        Pair(1, Changeable()),
        Pair,
        [1],
        {1: 2},
        masks.Predicate(lambda b, h, q, kv: q == kv),
        _holding(1),
    ],
    ids=["changeable", "in a tuple", "in a value", "a class", "a list", "a dict", "a predicate", "a closure"],
)
def test_values_that_cannot_be_serialized(value):
    assert encode(value) is None
    assert encode((value, 1)) is None


def test_a_name_that_was_given_again_is_another_one():
    made = []
    for reach in range(4):

        @dataclasses.dataclass(frozen=True)
        class Near:
            first: int
            reach = None

        Near.reach = reach
        made.append(Near(1))
    programs = [encode(value) for value in made]
    assert len({tuple(program) for program, _ in programs}) == 4
    for value, program in zip(made, programs, strict=True):
        assert type(decode(*program)) is type(value)
        assert encode(value) == program


@pytest.mark.parametrize(
    "value", [Pair(2, "x"), Outer.Inner(3), masks.Window(4, 4), double], ids=["value", "inside", "ours", "function"]
)
def test_values_from_another_process_are_resolved_by_name(monkeypatch, value):
    program, tensors = encode(value)
    monkeypatch.setattr(written, "_registry", {})
    written._cached.cache_clear()
    assert decode(program, tensors) == value


def test_missing_classes_are_named(monkeypatch):
    program, tensors = encode(Pair(1))
    monkeypatch.setattr(written, "_registry", {})
    written._cached.cache_clear()
    with monkeypatch.context() as changed:
        changed.delattr(sys.modules[__name__], "Pair")
        with pytest.raises(sc.UnsupportedError, match=f"it uses Pair of {__name__}, which is not defined in this"):
            decode(program, tensors)
    with monkeypatch.context() as changed:
        changed.delitem(sys.modules, __name__)
        with pytest.raises(sc.UnsupportedError, match="import that module before the program runs"):
            decode(program, tensors)
    with monkeypatch.context() as changed:
        changed.setattr(sys.modules[__name__], "Pair", Changeable)
        with pytest.raises(sc.UnsupportedError, match="which is not defined in this process"):
            decode(program, tensors)
