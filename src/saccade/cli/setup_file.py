"""Call a function of a Python file that the command line names, as in ``my_setup.py:make``."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from saccade.support.errors import kind, shown, type_error, value_error


def made_by(text: str) -> tuple[nn.Module, Callable[..., Any], Sequence[Any]]:
    """Return the model, the collator and the texts that a function of a file returns.

    Args:
        text: the file and the function, ``my_setup.py:make``. The file runs.

    Raises:
        TypeError, ValueError: there is no such file or function, or it returns something else.
    """
    path, _, name = text.rpartition(":")
    if not name.isidentifier() or not Path(path).is_file():
        raise value_error("--trainer", "name a file and its function, as in my_setup.py:make", shown(text))
    make = runpy.run_path(path).get(name)
    if not callable(make):
        raise value_error("--trainer", f"name a function of {path}", shown(name))
    made = make()
    if not isinstance(made, tuple) or len(made) != 3 or not isinstance(made[0], nn.Module) or not callable(made[1]):
        raise type_error("--trainer", "return a model, a collator and a list of texts", kind(made))
    return made
