"""An example as a module, from its file: they are no package."""

import importlib.util
import sys

import pytest
import torch


@pytest.fixture(scope="module")
def example(request: pytest.FixtureRequest):
    """The file at ``PATH`` of the test module."""
    path = request.module.PATH
    name = path.stem.replace("__main__", "examples_main")  # pytest has a __main__ of its own
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    # As dataclasses and forward references want it: found by its name.
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)  # where an example finds what it shares with others
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(autouse=True)
def _threads():
    """Examples choose how many threads they run on."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
