"""Names of other libraries: the errors say what they are called here."""

import importlib
import re

import pytest

import saccade as sc
from saccade import masks, positions, vision
from saccade.support.name_hints import OTHER_NAMES

EVERY = [(package, name) for package, names in OTHER_NAMES.items() for name in names]


@pytest.mark.parametrize("package, name", EVERY, ids=lambda x: x or "saccade")
def test_a_name_from_elsewhere_is_answered_with_one_that_exists(package, name):
    module = importlib.import_module(f"saccade.{package}".rstrip("."))
    with pytest.raises(AttributeError, match=rf"^module '{module.__name__}' has no attribute '{name}'\.\n    Hint: ."):
        getattr(module, name)
    hint = OTHER_NAMES[package][name]
    written = re.findall(r"saccade(?:\.\w+)+|\b[A-Z]\w+|\b[a-z0-9_]+(?=\()", hint)
    assert written or hint == "a mask: see saccade.masks"
    for word in written:
        owner = sc if word.startswith("saccade.") else module
        for part in word.removeprefix("saccade.").split("."):
            owner = getattr(owner, part)


def test_other_names_are_refused_as_python_does():
    for module in (sc, masks, positions, vision):
        with pytest.raises(AttributeError, match=rf"^module '{module.__name__}' has no attribute 'nothing_like_it'$"):
            module.nothing_like_it  # noqa: B018
        assert not hasattr(module, "nothing_like_it")
