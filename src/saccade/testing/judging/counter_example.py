"""`CounterExample`: the smallest input found that breaks a law, and the script that shows the fault."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class CounterExample:
    """The smallest input found that breaks a law.

    Attributes:
        law: the name of the law.
        message: the counter-example in one sentence.
        inputs: the shapes, the dtype and the mask, in one line.
        shows: the lines that the script prints.
        script: a script that shows the fault without this library; empty if none can be written (see ``no_script``).
        no_script: the reason why there is no script; empty if there is one.
    """

    law: str
    message: str
    inputs: str
    shows: tuple[str, ...] = ()
    script: str = ""
    no_script: str = ""
