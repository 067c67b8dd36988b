"""Right models of random architectures are not accused by any claim."""

import pytest
from tests.auditing.random_models import draw

from saccade import audit
from saccade.auditing.claims import CLAIMS

ASKED = [name for name in CLAIMS if name != "compiled"]  # tracing takes seconds a model


def accused(seed):
    """Return how a right model was drawn and the report, if some claim is broken."""
    drawn = draw(seed)
    report = audit(drawn.model, drawn.rule, inputs=drawn.inputs, claims=ASKED, tests=4, seed=seed)
    assert report.ok or report.findings
    return [(seed, drawn.words, str(report))] if report.findings else []


@pytest.mark.parametrize("seed", range(6))
def test_a_right_model_is_not_accused(seed):
    assert accused(seed) == []


@pytest.mark.slow
def test_250_right_models_are_not_accused():
    assert [one for seed in range(250) for one in accused(seed)] == []


def test_architectures_are_of_every_kind():
    words = " ".join(draw(seed).words for seed in range(60))
    for kind in ("convolution", "shift", "recurrence", "experts", "beside", "images", "Window", "Documents"):
        assert kind in words
