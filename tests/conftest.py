"""Shared fixtures: every test starts from the same random state, and uninitialised memory is poisoned."""

import functools
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Tests must not depend on whether saccade-cpu is installed: those of it ask for impl="native". All others pass with
# SACCADE_CPU=on too, where `auto` asks it first: those that are about another kernel ask for that one by name.
os.environ.setdefault("SACCADE_CPU", "off")
# On processors with AVX2, products of MKL depend on the alignment of memory unless told otherwise; tests compare bits.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# A million objects come with the modules and the tests, and stay: no collection of garbage looks through them.
gc.disable()

# Our own plugin by its name too: an environment that was installed before it has no entry point for it.
pytest_plugins = ["pytester", "saccade_pytest"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Refuse parameters in a set: their order differs between processes, and pytest-xdist then runs no test."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        if any(isinstance(values, set | frozenset) for values in (*mark.args[1:2], *mark.kwargs.values())):
            raise pytest.UsageError(f"{metafunc.definition.nodeid}: parameters must NOT be a set. Hint: pass a list.")


@functools.cache
def _names_native(file: Path) -> bool:
    text = file.read_text(encoding="utf-8")
    return "native" in text or "either_way" in text


def pytest_itemcollected(item: pytest.Item) -> None:
    """Refuse a test that ``make levels`` does not find, and one named after a set.

    The order of a set differs between processes, and pytest-xdist then runs no test.
    """
    if item.get_closest_marker("native") is not None and not _names_native(item.path):
        raise pytest.UsageError(f"{item.path} must contain `native` or `either_way`, which `make levels` looks for.")
    parameters = getattr(item, "callspec", None)
    for value in parameters.params.values() if parameters else ():
        if isinstance(value, set | frozenset) and len(value) > 1 and str(value) in item.name:
            message = f"{item.nodeid}: parameters must NOT be sets; got {value}. Hint: pass a list."
            raise pytest.UsageError(message)


def pytest_collection_finish() -> None:
    """Collect garbage again, among what the tests make."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of the compiled kernel if it is not installed."""
    if item.get_closest_marker("native") is None:
        return
    from saccade.engine.kernels.native import abilities  # noqa: PLC0415  tests of cold imports begin without it

    if abilities() is None:
        pytest.skip("needs saccade-cpu, which pip install ./native compiles")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` writes down for each GPU who asked, in a millisecond
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``impl="auto"`` chooses as where saccade-cpu is not installed."""
    from saccade.engine.kernels.native import is_on  # noqa: PLC0415  tests of cold imports begin without it

    monkeypatch.setenv("SACCADE_CPU", "off")
    is_on.cache_clear()  # it is asked once in a process
    yield
    is_on.cache_clear()


@pytest.fixture
def with_native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``impl="auto"`` may choose the compiled kernel; for tests marked with `needs_native`."""
    from saccade.engine.kernels.native import is_on  # noqa: PLC0415

    monkeypatch.setenv("SACCADE_CPU", "on")
    is_on.cache_clear()
    yield
    is_on.cache_clear()


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention without its compiler, which has neither lse nor gradients on a CPU; torch's definition has both."""
    from torch.nn.attention import flex_attention as flex  # noqa: PLC0415  imports a compiler

    torch.compiler.reset()  # all that was traced before is looked through in each call
    monkeypatch.setattr("saccade.engine.kernels.flex.Flex.devices", ("cpu",))
    monkeypatch.setattr("saccade.engine.kernels.flex._NARROWEST", 1)
    monkeypatch.setattr("saccade.engine.kernels.flex.Flex.function", lambda self: flex.flex_attention)
    monkeypatch.setattr(flex, "_validate_device", lambda query, key, value: None)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what ``new_empty`` returns with NaN, so that a cell nobody writes cannot pass for a result."""
    original = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        x = original(self, *args, **kwargs)
        return x.fill_(float("nan")) if x.is_floating_point() and not x.requires_grad else x

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
