"""``saccade compare`` as a user runs it."""

import pytest

from saccade.learning import QUESTIONS
from saccade.learning.training import Outcome

TEXT = "A lizard is not a snake, although a slow worm looks like one and is a lizard."


@pytest.fixture
def compare(run, monkeypatch):
    monkeypatch.setattr("saccade.mechanisms.comparison._ROUNDS", 1)
    return lambda *arguments: run("compare", *arguments)


@pytest.mark.ci
def test_it_prints_a_table_and_what_to_think_of_it(compare, encoder):
    result = compare("--landmarks", "4", "--features", "8", TEXT)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    count = len(encoder.tokenizer.encode(TEXT).ids)
    assert lines[0] == f"layer 0 of all-MiniLM-L6-v2, {count} tokens"
    assert lines[1] == f"batch 1, 12 heads, {count} queries, {count} keys; errors relative to exact attention"
    names = [line.split("  ")[0] for line in lines[3:13]]
    assert names == [
        "exact",
        "torch SDPA",
        "Window(64, 64)",
        "Window(64, 64) | Global((0,))",
        "Linear",
        "Performer(8)",
        "Performer(8, kind='hyperbolic')",
        "Linformer",
        "Nystrom(4, iterations=6)",
        "Nystrom(4, iterations=None)",
    ]
    assert "Performer(8): too far off to replace" in result.output


@pytest.mark.ci
def test_masks_are_rows(compare):
    result = compare("--landmarks", "4", "--features", "8", "--mask", "sliding(3)", "--mask", "full", TEXT)
    assert result.exit_code == 0, result.output
    rows = {line.split("  ")[0]: line for line in result.output.splitlines()}
    assert "Window(64, 64)" not in rows
    assert rows["Full()"].split()[1:5] == ["0.000"] * 4
    assert "Window(2, 0): too far off to replace" in result.output


@pytest.mark.ci
def test_a_text_beyond_the_models_length_is_said_to_be_cut(compare, encoder):
    text = "word " * 600
    total = len(encoder.tokenizer.encode(text.strip()).ids)
    result = compare("--landmarks", "4", "--features", "8", "--mask", "sliding(600)", text)
    assert result.exit_code == 0, result.output
    assert result.output.startswith(
        f"layer 0 of all-MiniLM-L6-v2, the first 512 of {total} tokens: the model reads no more"
    ), result.output[:200]


@pytest.mark.ci
def test_quality_is_that_of_trained_models(compare, monkeypatch):
    asked = []
    monkeypatch.setattr("saccade.learning.quality.train", lambda *given: asked.append(given) or Outcome(0.5, 1, 1.0, 1))
    result = compare("--quality", "MQAR", "--landmarks", "4", "--features", "8", TEXT)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[2].split()[-1] == "quality"
    assert result.output.splitlines()[3].split()[-1] == "0.500"
    assert len(asked) == 9  # exact attention, two masks and six mechanisms
    assert {question for _, question, _, _ in asked} == {QUESTIONS["MQAR"]}


@pytest.mark.ci
def test_as_many_landmarks_as_tokens_are_exact(compare):
    result = compare("--landmarks", "600", "--layer", "3", TEXT)
    assert "Nystrom(600, iterations=None): close to exact attention" in result.output
    assert "Linformer: close to exact attention" in result.output


@pytest.mark.ci
def test_a_language_model_is_compared_with_later_tokens_hidden(compare):
    result = compare("--model", "small-decoder", "--layer", "2", "--features", "512", TEXT)
    assert result.exit_code == 0, result.output
    first, second = result.output.splitlines()[:2]
    assert first.startswith("layer 2 of small-decoder, ")
    assert second.startswith("batch 1, 5 heads, ")
    assert "Linformer: refused: " in result.output
    assert "Causal lets queries see different keys" in result.output
    assert "Performer(512): refused" not in result.output


@pytest.mark.slow
def test_a_long_text_is_cut_to_what_the_model_reads(compare):
    result = compare(*["word"] * 700)
    assert "512 queries, 512 keys" in result.output


@pytest.mark.ci
def test_it_draws_error_against_time(compare, tmp_path):
    result = compare("--out", "tradeoff.png", TEXT)
    assert result.exit_code == 0, result.output
    assert "wrote tradeoff.png" in result.output
    assert (tmp_path / "tradeoff.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([" "], "saccade compare: TEXT must have at least one word; got an empty text."),
        (["--layer", "6", TEXT], "saccade compare: --layer must be from 0 to 5; got 6."),
        (["--model", "small-decoder", "--layer", "4", TEXT], "saccade compare: --layer must be from 0 to 3; got 4."),
        (
            ["--quality", "MQR", TEXT],
            "saccade compare: --quality must be one of MQAR, induction, selective copying, ListOps, passkey; got MQR.",
        ),
        (["--layer", "-1", TEXT], "saccade compare: --layer must be from 0 to 5; got -1."),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(compare, arguments, sentence):
    result = compare(*arguments)
    assert result.exit_code == 2
    assert result.output.strip() == sentence


def test_a_mask_that_cannot_be_read(compare):
    result = compare("--mask", "windw(2)", TEXT)
    assert result.exit_code == 2
    assert result.output.startswith("saccade compare: --mask must name known masks; got windw.")


@pytest.mark.ci
def test_a_picture_that_cannot_be_written(compare):
    result = compare("--out", "picture.xyz", TEXT)
    assert result.exit_code == 2
    assert "--out must be a picture file that can be written; got picture.xyz" in result.output


def test_another_model_is_one_that_exists(compare):
    result = compare("--model", "no\x1b[31m-such", TEXT)
    assert result.exit_code == 2
    assert (
        "saccade compare: --model must be all-MiniLM-L6-v2, chinese-encoder, small-decoder, or a folder"
        in result.output
    )
    assert "\x1b" not in result.output
