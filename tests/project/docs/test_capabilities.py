"""The page of capabilities says what the library says, and what it says of kernels is what happens."""

import re
from pathlib import Path

import pytest
import torch
from tests.sampled import kept

import saccade as sc
from saccade import caches, masks, mechanisms
from saccade.engine.dispatch import KERNELS
from saccade.engine.kernels import native

DOCS = Path(__file__).parents[3] / "docs"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(DOCS / "site")  # where the script finds what it tells
    import capabilities as script
    from answers.caches import caches_run
    from answers.examples import CACHES, MASKS, MECHANISMS, WIDTH, missing
    from answers.inputs import inputs
    from answers.kernels import kernels_of_inputs, kernels_of_masks
    from answers.markdown import code
    from answers.mechanisms import mechanisms_told
    from answers.words import EQUALS, RULES, in_language

PAGES = {language: (DOCS / language / "capabilities.md").read_text(encoding="utf-8") for language in script.LANGUAGES}
SLOW = ("_costs_of_mechanisms",)  # three dry runs of each
both = pytest.mark.parametrize("language", script.LANGUAGES)


def makers():
    return [
        pytest.param(place, id=made.__name__, marks=[pytest.mark.slow] if made.__name__ in SLOW else [])
        for place, made in enumerate(script.TABLES)
    ]


@pytest.mark.ci
@pytest.mark.parametrize("language", kept(script.LANGUAGES, "en"))
@pytest.mark.parametrize("place", makers())
def test_each_table_is_that_of_the_library(place, language):
    stated = script.tables_in(PAGES[language])
    assert len(stated) == len(script.TABLES)
    assert stated[place] == script.TABLES[place](language), "run: python docs/site/capabilities.py"


def test_all_that_is_exported_has_a_row():
    assert missing() == []
    shown = [*MASKS.values(), *MECHANISMS.values(), *CACHES.values()]
    for page in PAGES.values():
        for own in (*shown, *(kernel.name for kernel in KERNELS)):
            assert code(own) in page


@pytest.mark.parametrize(
    "package, kind", [(masks, masks.Mask), (mechanisms, mechanisms.Mechanism), (caches, caches.LayerCache)]
)
def test_a_missing_row_is_detected(package, kind, monkeypatch):
    monkeypatch.setattr(package, "New", type("New", (kind,), {}), raising=False)
    monkeypatch.setattr(package, "__all__", [*package.__all__, "New"])
    assert missing() == ["New"]
    with pytest.raises(ValueError, match=r"no example in answers/examples\.py of: New"):
        script.tables("en")


def test_a_stale_row_is_detected(monkeypatch):
    monkeypatch.setattr(masks, "__all__", [name for name in masks.__all__ if name != "Strided"])
    assert missing() == ["Strided"]


@pytest.mark.parametrize("told", [None, 0], ids=["not installed", "an old processor"])
def test_the_compiled_kernel_answers_alike_everywhere(told, monkeypatch):
    before = kernels_of_inputs(), kernels_of_masks()
    monkeypatch.setattr(native, "abilities", lambda: told)
    assert (kernels_of_inputs.__wrapped__(), kernels_of_masks.__wrapped__()) == before


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("kernel", ["fused", "tiled", "reference"])
def test_refused_cells_are_refused_and_the_rest_runs(kernel):
    for one in inputs():
        dtype = one.dtype or torch.float32
        query, key = (torch.randn(1, 2, 64, WIDTH, dtype=dtype, requires_grad=True) for _ in range(2))

        def run(query, key=key, one=one):
            matrix = sc.AttentionMatrix(query, key, impl=kernel, **one.given)
            return matrix.lse if one.needs_lse else matrix.matmul(key, dropout_p=one.dropout_p)

        if kernels_of_inputs()[one.en][kernel]:
            with pytest.raises(sc.UnsupportedError, match=re.escape(kernels_of_inputs()[one.en][kernel][0])):
                torch.func.jvp(run, (query,), (query,)) if one.forwards else run(query)
        elif one.forwards:
            assert torch.func.jvp(run, (query,), (query,))[1].isfinite().all()
        else:
            run(query).sum().backward()
            assert query.grad.isfinite().all()


def test_approximate_rows_are_the_known_ones():
    """Few bits round; landmarks are means of the queries that come together; a context has no distances to queries."""
    wrong = {
        (name, own)
        for name, row in caches_run().items()
        for own, said in row.items()
        if not isinstance(said, str) and said > 1e-11
    }
    assert {pair for pair in wrong if pair[0] not in ("Int8Cache", "QuantizedCache")} == {
        ("CrossCache", "Nystrom"),
        ("CrossCache", "ShortConvolution"),
    }
    assert len(wrong) > 1


def test_every_reason_that_is_given_has_its_chinese():
    kernels = [*kernels_of_masks().values(), *kernels_of_inputs().values()]
    given = {reason for row in kernels for reasons in row.values() for reason in reasons}
    refused = [said for row in caches_run().values() for said in row.values() if isinstance(said, str)]
    refused += [one.reason for one in mechanisms_told().values() if one.reason]
    assert set(RULES) <= set(refused)
    assert set(EQUALS) == {getattr(caches, name).equivalent_run for name in CACHES}
    told = [*(in_language(reason, "zh") for reason in (*given, *refused)), *EQUALS.values()]
    assert all(re.search(r"[\u4e00-\u9fff]", text) for text in told)
