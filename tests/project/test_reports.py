"""Reports: what an interactive session, a debugger or a failed assertion shows of them is the table."""

import dataclasses
import importlib
import pkgutil

import pytest
import torch

import saccade
from saccade.auditing.budget import Budget
from saccade.costs.machine import Seconds

NOT_REPORTS = {"Law", "Case", "Mutant"}  # their text is a name, which the representation has among all fields


def _classes():
    for module in pkgutil.walk_packages(saccade.__path__, "saccade."):
        for one in vars(importlib.import_module(module.name)).values():
            if isinstance(one, type) and one.__module__ == module.name and "__str__" in vars(one):
                yield one


CLASSES = sorted({one for one in _classes() if dataclasses.is_dataclass(one) or hasattr(one, "_fields")}, key=repr)


@pytest.mark.parametrize("kind", [one for one in CLASSES if one.__name__ not in NOT_REPORTS], ids=lambda x: x.__name__)
def test_what_prints_as_a_table_is_shown_as_one(kind):
    assert kind.__repr__ is kind.__str__ or kind.__name__ in AS_INSTANCES


AS_INSTANCES = {  # named tuples, in which a name cannot be assigned
    "Budget": lambda: Budget(8, 64),
    "Seconds": lambda: Seconds(1.0, 3.0, None),
    "Summary": lambda: saccade.AttentionMatrix(*torch.ones(2, 1, 1, 5, 8)).summary(),
}


@pytest.mark.parametrize("name", AS_INSTANCES)
def test_a_named_tuple_is_shown_as_it_prints(name):
    report = AS_INSTANCES[name]()
    assert type(report).__name__ == name
    assert repr(report) == str(report)
    assert f"{name}(" not in repr(report)


def test_there_are_reports():
    names = {one.__name__ for one in CLASSES}
    assert {"Report", "Comparison", "Cost", "Explanation", "Summary", "Exchange"} <= names
