"""The survey of packages other than transformers: text that makes each model, and what the audit finds in it."""

import dataclasses

import pytest
from benchmarks.survey.package_models import package_models, versions
from benchmarks.survey.package_result import measure_package
from benchmarks.survey.result import printed
from benchmarks.survey.table import LEAST
from tests.sampled import kept

from saccade.masks import parse

pytestmark = pytest.mark.filterwarnings("ignore")  # those of packages on import
ALL = {one.key: one for one in package_models()}


def test_every_model_is_text_that_runs_without_this_library():
    assert len(ALL) == len(package_models()) > 90
    for one in ALL.values():
        parse(one.rule)
        assert "saccade" not in "\n".join(one.lines())
        assert one.lines()[2].startswith("model = ")


def test_every_package_has_several_models_of_known_versions():
    found = versions(package_models())
    assert found.keys() >= {"x-transformers", "timm", "open_clip_torch", "openai-whisper", "fair-esm", "fla-core"}
    assert all(sum(one.distribution == name for one in ALL.values()) > 1 for name in found)


def test_a_package_that_is_not_installed_gives_the_reason():
    cell = measure_package(dataclasses.replace(ALL["timm: ViT"], imports="import no_such_package"))
    assert cell.unanswered == {"runs": "ModuleNotFoundError: No module named 'no_such_package'"}
    assert cell.model == cell.held == ()


BROKEN = {
    "x-transformers: rotary": set(),
    "x-transformers: encoder, shifted tokens": {"padded at the right", "padded at the left"},
    "local-attention: causal": {"padded at the left"},
    "performer-pytorch: causal": {"reach", "under autocast", "padded at the right", "padded at the left"},
    "performer-pytorch: causal, ReLU features": {"padded at the left"},
    "fla-core: gla.naive_recurrent_gla": set(),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", kept(BROKEN, "local-attention: causal", "fla-core: gla.naive_recurrent_gla"))
def test_lines_show_what_is_broken(name):
    cell = measure_package(ALL[name])
    assert cell.broken.keys() == BROKEN[name]
    assert "batch" in cell.held
    for claim, one in cell.broken.items():
        assert claim == "under autocast" or one.printed > 1e-3, claim
    if ALL[name].step:
        assert "steps: one by one" in cell.held


def test_a_right_model_prints_nothing():
    one = ALL["x-transformers: rotary"]
    assert printed([*one.lines(), "off(torch.cat([run(one) for one in x.split(1)]), run(x))"]) < LEAST
