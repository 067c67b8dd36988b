"""Write a counter-example as a script that runs without this library, and check that the script shows the fault."""

from __future__ import annotations

import ast
import base64
import inspect
import textwrap
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.support.errors import escaped
from saccade.testing.adapters import Form
from saccade.testing.judging import script_checks
from saccade.testing.judging.recorded_calls import Call
from saccade.testing.judging.source import Source

_LITERAL = 600  # maximum number of entries that are written as a list; larger tensors are compressed
_MOST = 300_000  # maximum number of characters
_COLUMNS = 110
_HEADER = """
import base64
import ctypes
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

nan, inf = float("nan"), float("inf")
""".strip()
_FOOTER = """
lines = faults(call, right, calls, limits)
print("\\n".join(lines) or "nothing is wrong")
raise SystemExit(bool(lines))
""".strip()


class Script(NamedTuple):
    """A script that consists of comments, code that loads the kernel, and calls with their checks."""

    words: str
    kernel: str
    body: str

    @property
    def text(self) -> str:
        """The source code of the whole script."""
        head = f"{self.words}\nfrom __future__ import annotations"
        return f"{head}\n\n{_HEADER}\n\n{self.kernel}\n\n\n{self.body}\n{_FOOTER}\n"

    def faults(self, kernel: Any) -> list[str]:
        """Run the script on a kernel in this process, and return the faults that the script reports."""
        space: dict[str, Any] = {"__name__": "script", "kernel": kernel}
        code = f"from __future__ import annotations\n{_HEADER}\n{self.body}"
        exec(compile(code, "script", "exec"), space)
        found: list[str] = space["faults"](space["call"], space["right"], space["calls"], space["limits"])
        return found


def packed(text: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Decode a tensor from compressed data in base 85."""
    raw = bytearray(zlib.decompress(base64.b85decode("".join(text.split()))))
    return torch.frombuffer(raw, dtype=dtype).reshape(shape)


def strided(x: Tensor, stride: tuple[int, ...], offset: int) -> Tensor:
    """Return a copy of the tensor with the strides and the offset that it had in the recorded call."""
    if 0 in stride and x.numel():
        first = x[tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)]
        return first.clone().expand(x.shape)
    if not x.numel():
        return x
    room = x.new_zeros(offset + sum((n - 1) * step for n, step in zip(x.shape, stride, strict=True)) + 1)
    return room.as_strided(x.shape, stride, offset).copy_(x)


def script_of(
    form: Form, source: Source | None, calls: Sequence[Call], limits: tuple[float, float], words: Sequence[str]
) -> Script | None:
    """Return a script that repeats calls and prints what is wrong with the results; None if it cannot be written.

    Args:
        form: the kernel under test.
        source: the location of the kernel; None for an object in memory, which no script can load.
        calls: the calls of `RecordedCalls`.
        limits: the largest errors of outputs and of gradients that count as rounding.
        words: lines that describe the counter-example, for a comment.
    """
    settings = dict(form.settings)
    if source is None or not _is_literal(settings):
        return None
    written = [_call_lines(call) for call in calls]
    lines = [line for each in written for line in each or ()]
    if None in written or sum(map(len, lines)) > _MOST:
        return None
    more = "".join(f", {name}={value!r}" for name, value in settings.items())
    truth = script_checks.definition if form.truth is None else form.truth
    parts = [*form.parts, form.run, truth, script_checks.difference, script_checks.faults]
    definitions = [_source(part) for part in (*parts, script_checks.faults_of_result, packed, strided)]
    wide = "query.double(), key.double(), value.double(), mask"
    right = (
        "definition(query, key, value, mask, **options)" if form.truth is None else f"truth({wide}{more}, **options)"
    )
    body = [
        "\n\n\n".join(definitions) + "\n\n",
        "calls = []",
        *lines,
        f"limits = {limits!r}",
        f"call = lambda query, key, value, mask, **options: run(kernel, query, key, value, mask{more}, **options)",
        f"right = lambda query, key, value, mask, **options: {right}",
    ]
    about = textwrap.indent("\n".join(map(escaped, words)), "# ", lambda line: True)
    return Script(about, "\n".join(source.lines()), "\n".join(body))


def _source(part: Any) -> str:
    """Return the source of a function, without comments for linters and type checkers."""
    lines = textwrap.dedent(inspect.getsource(part)).rstrip().splitlines()
    return "\n".join(line.partition("  # noqa")[0].partition("  # type: ignore")[0] for line in lines)


def _call_lines(call: Call) -> list[str] | None:
    """Return the lines that add one call to a script; None if one of its options cannot be written as text."""
    lines = []
    for name, x in call.items():
        if isinstance(x, Tensor):
            lines.append(f"{name} = {_tensor(x)}")
        elif _is_literal(x):
            lines.append(f"{name} = {x!r}")
        else:
            return None
    return [*lines, f"calls.append(dict({', '.join(f'{name}={name}' for name in call)}))"]


def _tensor(x: Tensor) -> str:
    """Return a Python expression that recreates a tensor with its strides."""
    flat = x.detach().cpu().contiguous()
    shape = tuple(x.shape)
    if flat.numel() <= _LITERAL:
        text = f"torch.tensor({flat.flatten().tolist()!r}, dtype={x.dtype}).reshape({shape})"
    else:
        raw = zlib.compress(flat.flatten().view(torch.uint8).numpy().tobytes(), 9)
        coded = base64.b85encode(raw).decode()
        rows = [coded[i : i + _COLUMNS] for i in range(0, len(coded), _COLUMNS)]
        text = 'packed("""\n' + "\n".join(rows) + f'\n""", {shape}, {x.dtype})'
    text += f".to({str(x.device)!r})" if x.device.type != "cpu" else ""
    if not x.is_contiguous() or x.storage_offset():
        text = f"strided({text}, {tuple(x.stride())}, {x.storage_offset()})"
    return text + (".requires_grad_()" if x.requires_grad else "")


def _is_literal(x: object) -> bool:
    try:
        return bool(ast.literal_eval(repr(x)) == x)
    except (ValueError, SyntaxError):
        return False
