"""The tests that need a GPU, and the laws on a few cases chosen for one: longer than a block, with heads 64 wide."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch

import saccade as sc
from benchmarks.gpu_check.finding import Finding
from benchmarks.gpu_check.steps import ROOT, Context
from saccade import masks, testing
from saccade.masks import Causal, Documents, Padding
from saccade.positions import ALiBi
from saccade.testing import Case, shared_masks
from saccade.testing.kernel_under_test import OPTIONS
from saccade.testing.laws import Law

__all__ = ["CASES", "DTYPES", "KERNELS", "LAWS", "OneKernel", "broken", "measure"]

_SHAPE: dict[str, Any] = {"batch": 2, "num_heads": 4, "num_kv_heads": 2, "q_len": 130, "kv_len": 130}
_SHAPE |= {"head_dim": 64, "value_dim": 64}
_FOUR, _LENGTHS = shared_masks.document_of(70, 1, 59), (130, 60)
CASES = (
    Case("causal", *shared_masks.CAUSAL, **_SHAPE),
    Case("full", masks.Full(), lambda b, h, q, kv: True, **_SHAPE | {"num_kv_heads": 1}),
    Case("window", *shared_masks.window(40, 0), **_SHAPE),
    Case(
        "documents",
        Documents((70, 1, 59), rule=Causal()),
        lambda b, h, q, kv: kv <= q and _FOUR[q] == _FOUR[kv],
        **_SHAPE,
    ),
    Case("padding", Padding(_LENGTHS) & Causal(), lambda b, h, q, kv: kv <= q and kv < _LENGTHS[b], **_SHAPE),
    Case("longformer", *shared_masks.streaming(40, 0), **_SHAPE),
    Case("softcap", *shared_masks.CAUSAL, softcap=5.0, **_SHAPE),
    Case("ALiBi", *shared_masks.CAUSAL, relative=ALiBi(4), **_SHAPE),
    Case("bias of keys", *shared_masks.CAUSAL, bias=(1, 4, 1, 130), **_SHAPE),
    Case("sink", *shared_masks.CAUSAL, sink=True, **_SHAPE),
    Case("decode", *shared_masks.CAUSAL, **_SHAPE | {"q_len": 1, "kv_len": 200}),
)
KERNELS = ("sdpa", "varlen", "tiled", "flex")
_NOT_HERE = ("declined", "offered", "gradcheck")  # about declarations, and about float64
LAWS = [law for law in testing.LAWS if law.cases is None and law.dtypes is None and law.name not in _NOT_HERE]
_COMPILED = ("oracle", "lse", "gradients_of_inputs")  # of flex, which compiles each case anew
_FEWEST = ("oracle", "gradients_of_inputs")
DTYPES = {"sdpa": torch.float32, "varlen": torch.bfloat16, "tiled": torch.float32, "flex": torch.bfloat16}
_QUICK_CASES = 2
_TESTS = {"cuda": None, "cpu": ["tests/testing/test_oracle.py"], "quick": ["tests/testing/test_oracle.py"]}
_SHORTEST = 5.0  # seconds that the tests may take in any case
_RESULT = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)")


class OneKernel:
    """`saccade.attention` by one kernel."""

    def __init__(self, impl: str):
        self.impl = impl

    def __call__(self, *tensors: Any, **options: Any) -> torch.Tensor:
        return sc.attention(*tensors, impl=self.impl, **options)

    def with_lse(self, *tensors: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and lse."""
        return sc.attention_with_lse(*tensors, impl=self.impl, **options)

    def subject(self, device: str) -> testing.Subject:
        """Return it as the laws call it."""
        return testing.Subject(
            self,
            with_lse=None if self.impl == "sdpa" else self.with_lse,
            offers=(*OPTIONS, "q_positions", "kv_positions"),
            masks="objects",
            device=device,
        )


def broken(
    impl: str, laws: Sequence[Law], cases: Sequence[Case], dtype: torch.dtype, device: str
) -> tuple[int, list[str]]:
    """Return how many trials held, and those that did not."""
    subject, held, faults = OneKernel(impl).subject(device), 0, []
    with patch.dict(os.environ, {"SACCADE_FIRST_USE": "off"}):  # the kernel itself is on trial
        for law in laws:
            for case in cases:
                result = testing.try_law(subject, law, case, dtype)
                held += result.verdict == "kept"
                if result.verdict == "broken":
                    faults.append(str(result))
    return held, faults


def measure(context: Context) -> Iterator[Finding]:
    """Yield laws of the kernels that need no compiler, then the tests, then flex case by case."""
    cases = CASES[:_QUICK_CASES] if context.level == "quick" else CASES
    for impl in KERNELS[:-1]:
        for case in cases:
            if context.left() < 0.0:
                return
            laws = LAWS if context.level == "cuda" else [law for law in LAWS if law.name in (*_COMPILED, "rows")]
            yield _judged(context, impl, laws, [case])
    yield from _tests(context)
    names = _FEWEST if context.level == "quick" else _COMPILED
    for case in cases[: 3 if context.level == "cpu" else None]:
        if context.left() < 0.0:
            return
        yield _judged(context, "flex", [law for law in LAWS if law.name in names], [case])


def _judged(context: Context, impl: str, laws: Sequence[Law], cases: Sequence[Case]) -> Finding:
    held, faults = broken(impl, laws, cases, DTYPES[impl], context.device.name)
    name = f"{impl}: laws on {', '.join(map(str, cases))}"
    if faults:
        return Finding(name, f"{len(faults)} broken: {'; '.join(fault[:160] for fault in faults[:4])}", False)
    return Finding(name, f"{held} held" if held else "it refuses this case", True if held else None)


def _tests(context: Context) -> Iterator[Finding]:
    """Yield a finding for each test that carries the mark ``gpu``; the laws, which have run above, are left out."""
    files = _TESTS[context.level] or _marked()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        "--no-header",
        "-o",
        "console_output_style=classic",
    ]
    command += [*files, *(["-m", "gpu"] if context.level == "cuda" else [])]
    seconds = max(_SHORTEST, 0.6 * context.left())
    limit = ["timeout", "--kill-after=2", f"{seconds:.1f}"]
    environment = {**os.environ, "COLUMNS": "250"}  # reasons of failures are cut off at the width of the terminal
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*limit, *command], cwd=ROOT, env=environment, **options) as run:
        assert run.stdout is not None
        lines = []
        for line in run.stdout:
            lines.append(line.rstrip())
            result = _RESULT.match(line)
            if result:
                name, verdict = result.groups()
                yield Finding(f"pytest {name}", verdict.lower(), {"PASSED": True, "SKIPPED": None}.get(verdict, False))
    reasons = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    ended = f"pytest ended with exit status {run.returncode}" + (
        " (124: no time was left)" if run.returncode == 124 else ""
    )
    text = "; ".join([ended, *(reason[:300] for reason in reasons)] if reasons else [ended, *lines[-1:]])
    yield Finding("pytest -m gpu", text, {0: True, 124: None}.get(run.returncode, False), headline=True)


def _marked() -> list[str]:
    """Return the test files that hold such a test, except that of the laws."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [path.relative_to(ROOT).as_posix() for path in files if "mark.gpu" in path.read_text(encoding="utf-8")]
    return [path for path in found if path != "tests/laws/test_laws.py"]
