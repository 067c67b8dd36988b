"""The command line with a model that is loaded once."""

import pytest
from typer.testing import CliRunner

from saccade.cli import loading
from saccade.cli.app import app
from saccade.models import minilm
from saccade.viz import fonts


@pytest.fixture(scope="session")
def encoder():
    return minilm()


@pytest.fixture
def run(encoder, monkeypatch, tmp_path):
    """Run ``saccade look`` in an empty folder; whatever fonts are missing, nobody has warned of them yet."""
    monkeypatch.setitem(loading.NAMED, loading.MINILM, lambda: encoder)
    monkeypatch.setattr(fonts, "_warned", False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *arguments: CliRunner().invoke(app, list(arguments))
