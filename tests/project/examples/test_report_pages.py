"""Pages of an encoder, a language model and an encoder-decoder are written, of models that run and one that learns."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[3] / "examples" / "report_pages.py"


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location("report_pages", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_dates_are_read_in_every_form(pages):
    texts, positions, written = pages.batch(50)
    assert texts.shape == positions.shape
    assert bool(((texts == 0) == (positions < 0)).all())
    letters = "".join(pages.LETTERS[number - 3] for number in written[0, 1:-1])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", letters)
    assert {len(pages.date()[1]) for _ in range(50)} == {10}


@pytest.mark.ci
def test_pages_are_written(pages, tmp_path):
    pages.encoder_page(tmp_path / "encoder.html")
    pages.language_model_page(tmp_path / "model.html", 300)
    pages.dates_page(tmp_path / "dates.html", steps=2)
    assert all(path.stat().st_size > 100_000 for path in tmp_path.glob("*.html"))


@pytest.mark.slow
def test_dates_are_learned(pages):
    model = pages.reader_of_dates(800)
    texts, positions, written = pages.batch(200)
    with torch.no_grad():
        found = model(texts, written[:, :-1], source_positions=positions).argmax(-1)
    assert (found == written[:, 1:]).float().mean() > 0.95
