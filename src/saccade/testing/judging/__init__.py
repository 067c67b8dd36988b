"""`judge`: try all laws on an attention kernel with any calling convention, and shrink the inputs that break them.

In a shell, use ``saccade judge`` or ``pytest --saccade-kernel``.
"""

from saccade.testing.judging.counter_example import CounterExample
from saccade.testing.judging.counter_example_search import counter_example
from saccade.testing.judging.declaration import Declaration, read_claims
from saccade.testing.judging.first_calls import first_calls
from saccade.testing.judging.judge import judge
from saccade.testing.judging.judgement import Judgement
from saccade.testing.judging.kernel import Kernel
from saccade.testing.judging.source import Source, check_interpreter

__all__ = [
    "CounterExample",
    "Declaration",
    "Judgement",
    "Kernel",
    "Source",
    "counter_example",
    "check_interpreter",
    "first_calls",
    "judge",
    "read_claims",
]
