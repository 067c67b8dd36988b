"""The page of model features shows its stored results, and features are found in models that have them."""

import json
from pathlib import Path

import pytest
from benchmarks.generated_part import generated
from benchmarks.model_features.__main__ import COMMAND, RESULTS, looked_at
from benchmarks.model_features.features import FEATURES
from benchmarks.model_features.table import written
from benchmarks.survey.architectures import Architecture

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_shows_the_stored_results(language):
    page = (DOCS / language / "model-features.md").read_text("utf-8")
    assert generated(page, COMMAND) == written(json.loads(RESULTS.read_text("utf-8")), language)


@pytest.mark.parametrize(
    "name, model, having",
    [
        ("llama", "LlamaForCausalLM", {"rotary positions"}),
        ("gpt2", "GPT2LMHeadModel", {"learned position vectors"}),
        (
            "qwen3",
            "Qwen3ForCausalLM",
            {"rotary positions", "norms of queries and keys"},
        ),
        (
            "gemma2",
            "Gemma2ForCausalLM",
            {
                *("rotary positions", "grouped key heads", "heads whose width is not embed_dim / heads"),
                *("a window in some or all layers", "a cap on scores"),
            },
        ),
        (
            "cohere2",
            "Cohere2ForCausalLM",
            {
                *("rotary positions", "a window in some or all layers"),
                "attention and feed-forward network side by side",
            },
        ),
        ("mamba", "MambaForCausalLM", {"recurrent or linear layers", "short convolutions"}),
    ],
)
def test_features_are_found(name, model, having):
    assert set(looked_at(Architecture(name, model, "causal"))) == having


def test_counts_are_of_known_features():
    results = json.loads(RESULTS.read_text("utf-8"))
    known = {feature.english for feature in FEATURES}
    assert len(results["models"]) > 150
    assert all(set(own) <= known for own in results["models"].values())
