"""The generation question, with a tiny model."""

import pytest

from benchmarks import generation

SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def its() -> generation.Case:
    pytest.importorskip("transformers")
    return generation.Case(24, 6, SIZES)


def test_both_choose_the_same_tokens_and_time_each(its: generation.Case) -> None:
    generation.check(its)
    run = its.ours()
    assert len(run.steps) == its.new - 1
    assert min(run.steps) > 0


def test_other_tokens_are_noticed(its: generation.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    run = its.ours()
    monkeypatch.setattr(its, "ours", lambda: run._replace(tokens=[*run.tokens[:-1], run.tokens[-1] ^ 1]))
    with pytest.raises(AssertionError, match="tokens must agree"):
        generation.check(its)


def test_a_token_without_a_time_is_noticed(its: generation.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    run = its.ours()
    monkeypatch.setattr(its, "ours", lambda: run._replace(times=run.times[1:]))
    with pytest.raises(AssertionError, match="every token must have its time"):
        generation.check(its)
