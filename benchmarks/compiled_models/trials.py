"""Columns of the table: each trial runs a model in one form, and raises if a number differs from the model itself."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import ExportedProgram, export

from benchmarks.compiled_models.rows import ROWS, Row

LENGTHS = range(8, 18)
OTHERS = (9, 14)  # lengths at which exported programs run; they are exported at the first
NEW_TOKENS = 8
IMPLEMENTATIONS = ("saccade", "sdpa")

Verdict = list[int] | str | None
"""Numbers of graphs, with saccade and with SDPA; "equal"; or None if the trial does not apply."""


def forward(row: Row) -> Verdict:
    """Return the number of graphs over ten lengths in forward passes."""
    with torch.no_grad():
        return _graphs(row, lambda model, run, arguments: [row.compared(run(*arguments), arguments)])


def training(row: Row) -> Verdict:
    """Return the number of graphs over ten lengths in forward and backward passes."""

    def gradients(model: nn.Module, run: Callable[..., Tensor], arguments: tuple[Tensor, ...]) -> list[Tensor]:
        model.zero_grad()
        row.compared(run(*arguments), arguments).sin().sum().backward()
        return [x.grad.clone() for x in model.parameters() if x.grad is not None]

    return _graphs(row, gradients)


def _graphs(
    row: Row, results: Callable[[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]], list[Tensor]]
) -> list[int]:
    """Count graphs, with saccade and with SDPA, and compare the results of both with each other and with eager runs."""
    counts, found = [], []
    for implementation in IMPLEMENTATIONS:
        model = row.make(implementation)
        compiled, counter = _compiled(model)
        torch.manual_seed(1)
        for n in LENGTHS:
            arguments = row.arguments(n)
            found.append(results(model, compiled, arguments))
            _assert_all_equal(found[-1], results(model, model, arguments))
        counts.append(counter.frame_count)
    for ours, theirs in zip(found[: len(LENGTHS)], found[len(LENGTHS) :], strict=True):
        _assert_all_equal(ours, theirs)
    return counts


def generation(row: Row) -> Verdict:
    """Return the number of graphs for the steps of a static cache, one token each."""
    from transformers.generation.configuration_utils import CompileConfig  # noqa: PLC0415  of this trial alone

    if not row.generates:
        return None
    counts = []
    for implementation in IMPLEMENTATIONS:
        model: Any = row.make(implementation).model
        config = CompileConfig(fullgraph=True, dynamic=False, backend="eager", mode=None)
        config._compile_all_devices = True
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        with torch._dynamo.config.patch(recompile_limit=2 * NEW_TOKENS):
            out = _generated(model, cache_implementation="static", compile_config=config)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        _assert_equal(out, _generated(model, use_cache=False))
    return counts


def _generated(model: Any, **options: Any) -> Tensor:
    torch.manual_seed(1)
    tokens = torch.ones(2, 7, dtype=torch.long)
    tokens[0, :3] = 0
    options = {"attention_mask": tokens, "max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    out: Tensor = model.generate(torch.randint(3, 64, (2, 7)), **options)
    return out


def exported(row: Row) -> Verdict:
    """Run an exported program at another length in a new process."""
    model = row.make("saccade")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        torch.export.save(_program(row, model), Path(folder, "model.pt2"))
        arguments = row.arguments(OTHERS[1])
        torch.save((arguments, model(*arguments)), Path(folder, "expected.pt"))
        subprocess.run([sys.executable, "-c", _RELOADED], cwd=folder, check=True)
    return "equal"


_RELOADED = """
import torch, saccade
program = torch.export.load("model.pt2").module()
arguments, expected = torch.load("expected.pt")
torch.testing.assert_close(program(*arguments), expected, atol=1e-5, rtol=1e-5)
"""


def aot_inductor(row: Row) -> Verdict:
    """Compile an exported program by AOTInductor and run it at two lengths."""
    model = row.make("saccade")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(
            _program(row, model),
            package_path=str(Path(folder, "model.pt2")),
            inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},  # of code that runs once
        )
        run = torch._inductor.aoti_load_package(package)
        for n in OTHERS:
            arguments = row.arguments(n)
            _assert_equal(run(*arguments), model(*arguments))
    return "equal"


def onnx(row: Row) -> Verdict:
    """Run an ONNX model in onnxruntime at two lengths."""
    import onnxruntime  # noqa: PLC0415  of this trial alone

    model = row.make("saccade")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        # Optimized, ONNX's RotaryEmbedding takes the place of products whose angles are those of all batch items, which
        # it does not broadcast; the same happens with SDPA.
        program = torch.onnx.export(
            model,
            row.arguments(OTHERS[0]),
            dynamo=True,
            opset_version=23,
            dynamic_shapes=row.shapes(),
            optimize=False,
            verbose=False,
        )
        assert program is not None
        program.save(Path(folder, "model.onnx"))
        session = onnxruntime.InferenceSession(Path(folder, "model.onnx"), providers=["CPUExecutionProvider"])
        names = [one.name for one in session.get_inputs()]
        for n in OTHERS:
            arguments = row.arguments(n)
            (out,) = session.run(None, dict(zip(names, (x.numpy() for x in arguments), strict=True)))
            _assert_equal(torch.from_numpy(out), model(*arguments))
    return "equal"


def _program(row: Row, model: nn.Module) -> ExportedProgram:
    return export(model, row.arguments(OTHERS[0]), dynamic_shapes=row.shapes(), strict=False)


def _compiled(model: nn.Module) -> tuple[Callable[..., Tensor], CompileCounterWithBackend]:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, backend=counter, fullgraph=True), counter


def _assert_all_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for x, y in zip(ours, theirs, strict=True):
        # Gradients are sums; those of Gemma reach 200, of which float32 holds four digits after the point.
        torch.testing.assert_close(x, y, atol=max(1e-5, 1e-6 * float(y.abs().max())), rtol=1e-5)


def _assert_equal(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


TRIALS: dict[str, Callable[[Row], Verdict]] = {
    "forward": forward,
    "training": training,
    "generation": generation,
    "export": exported,
    "AOTInductor": aot_inductor,
    "ONNX": onnx,
}


def judge(row: str, trial: str) -> Verdict:
    """Run a trial of a model, by their names in the table.

    Raises:
        AssertionError: an output or a gradient differs.
    """
    return TRIALS[trial](ROWS[row])
