"""Call a function in a Python file, both named on the command line as in ``my_setup.py:make``."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from saccade.support.errors import kind, shown, type_error, value_error


def call_setup_function(text: str) -> tuple[nn.Module, Callable[..., Any], Sequence[Any]]:
    """Call a function in a file, and return the model, the collator and the texts that it returns.

    Args:
        text: the file and the function, ``my_setup.py:make``. The file is run.

    Raises:
        TypeError, ValueError: there is no such file or function, or the function returns something else.
    """
    made = _call_function(text, "--trainer")
    if not isinstance(made, tuple) or len(made) != 3 or not isinstance(made[0], nn.Module) or not callable(made[1]):
        raise type_error("--trainer", "return a model, a collator and a list of texts", kind(made))
    return made


def names_a_function(text: str) -> bool:
    """Return whether an argument has the form ``my_model.py:make``."""
    path, _, name = text.rpartition(":")
    return path.endswith(".py") and name.isidentifier()


def call_model_function(text: str) -> nn.Module:
    """Call a function in a file, and return the model that it returns; see `call_setup_function`."""
    made = _call_function(text, "MODEL")
    if not isinstance(made, nn.Module):
        raise type_error("MODEL", "return a torch module", kind(made))
    return made


def _call_function(text: str, argument: str) -> Any:
    """Run a Python file, call the function in it that the argument names, and return its result."""
    path, _, name = text.rpartition(":")
    if not name.isidentifier() or not Path(path).is_file():
        raise value_error(argument, "name a file and its function, as in my_setup.py:make", shown(text))
    make = runpy.run_path(path).get(name)
    if not callable(make):
        raise value_error(argument, f"name a function of {path}", shown(name))
    return make()
