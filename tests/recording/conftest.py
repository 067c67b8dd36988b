"""Models of several files."""

import pytest
from tests.integrations import model_zoo as zoo


@pytest.fixture
def llama():
    return zoo.model("llama", "sdpa")
