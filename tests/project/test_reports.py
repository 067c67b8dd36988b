"""Reports: what an interactive session, a debugger or a failed assertion shows of them is the table."""

import dataclasses
import importlib
import pkgutil

import pytest

import saccade

NOT_REPORTS = {"Law", "Case"}  # their text is a name, which the representation has among all fields


def _classes():
    for module in pkgutil.walk_packages(saccade.__path__, "saccade."):
        for one in vars(importlib.import_module(module.name)).values():
            if isinstance(one, type) and one.__module__ == module.name and "__str__" in vars(one):
                yield one


CLASSES = sorted({one for one in _classes() if dataclasses.is_dataclass(one) or hasattr(one, "_fields")}, key=repr)


@pytest.mark.parametrize("kind", [one for one in CLASSES if one.__name__ not in NOT_REPORTS], ids=lambda x: x.__name__)
def test_what_prints_as_a_table_is_shown_as_one(kind):
    assert kind.__repr__ is kind.__str__


def test_there_are_reports():
    names = {one.__name__ for one in CLASSES}
    assert {"Report", "Comparison", "Cost", "Explanation", "Summary", "ExchangePlan"} <= names
