"""`saccade look` shows what the trained model attends to, and says plainly what it cannot do."""

import re

import matplotlib.image
import pytest
import torch

from saccade import __version__, viz
from saccade.cli import loading
from saccade.models import minilm
from saccade.models.bundled import MINILM_SHA256
from saccade.statistics.information import position_information, unexplained_information
from saccade.text import merge, words

SENTENCE = "The cat, which was very hungry, ate the fish."


def rows(output):
    """The table, number -> what stands behind it."""
    found = re.findall(r"^ *(\d+) {2,}(.*?) *$", output, re.MULTILINE)
    return {int(number): line for number, line in found}


def word_weights(encoder, text):
    encoding = encoder.tokenizer.encode(text)
    found = words(encoding, text)
    with torch.no_grad():
        matrices = encoder.matrices(torch.tensor([encoding.ids]))
    return found, torch.stack([merge(matrix.to_dense()[0], found) for matrix in matrices])


@pytest.mark.ci
def test_the_demo_shows_words_and_writes_pictures(run, tmp_path):
    result = run("look", SENTENCE, "--out", "pictures")
    assert result.exit_code == 0, result.output
    assert len(rows(result.output)) == 14
    assert rows(result.output)[8].startswith("hungry")
    for name in ("heatmap.png", "mosaic.png"):
        assert f"wrote pictures/{name}" in result.output
        height, width, _ = matplotlib.image.imread(tmp_path / "pictures" / name).shape
        assert min(height, width) > 500
    assert result.output.rstrip().splitlines()[-1].startswith("wrote ")


@pytest.mark.ci
@pytest.mark.parametrize(
    "options, name, statistic",
    [
        ((), "unexplained information", unexplained_information),
        (("--by", "position"), "position mutual information", position_information),
    ],
)
def test_the_most_telling_head_is_the_one_it_says(run, encoder, options, name, statistic):
    found, weights = word_weights(encoder, SENTENCE)
    ordinary = [n for n, word in enumerate(found) if not word.special]
    values, order = statistic(weights[:, :, ordinary][..., ordinary]).flatten().sort(descending=True)
    (layer, head), (layer2, head2) = (divmod(int(n), 12) for n in order[:2])
    output = run("look", SENTENCE, *options).output
    assert f"layer {layer}, head {head} of all-MiniLM-L6-v2, the most informative of 72" in output
    assert f"{name}: {values[0]:.2f} nats" in output
    assert f"runner-up: layer {layer2}, head {head2} with {values[1]:.2f} nats" in output


@pytest.mark.ci
def test_percentages_are_the_models_weights(run, encoder):
    found, weights = word_weights(encoder, SENTENCE)
    output = run("look", SENTENCE, "--layer", "0", "--head", "10").output
    assert "layer 0, head 10 of all-MiniLM-L6-v2, as requested" in output
    assert "runner-up" not in output
    ate = [word.text for word in found].index("ate")
    row = weights[0, 10, ate]
    first, second = row.topk(2).indices.tolist()
    shown = f"{found[first].text} {row[first]:.0%}  {found[second].text} {row[second]:.0%}"
    assert shown in rows(output)[ate + 1]
    assert shown.startswith("fish 41%  cat 27%")


@pytest.mark.slow
def test_one_option_leaves_the_other_to_the_statistic(run):
    assert "layer 3, head" in run("look", SENTENCE, "--layer", "3").output
    assert re.search(r"layer \d, head 7 of .*, the most informative of 6", run("look", SENTENCE, "--head", "7").output)


@pytest.mark.slow
def test_another_statistic_finds_what_words_mean_to_each_other(run):
    output = run("look", "The trophy does not fit in the suitcase because it is too big.", "--by", "unexplained").output
    assert "unexplained information: 0.2" in output
    it = next(line for line in rows(output).values() if line.startswith("it "))
    assert re.search(r"^it +trophy \d\d%", it)


@pytest.mark.ci
def test_given_words_stay_whole_and_unknown_ones_are_pointed_out(run):
    result = run("look", "--model", "all-MiniLM-L6-v2", "--tokens", "小狗", "看见", "了", "一只", "猫")
    assert result.exit_code == 0, result.output
    table = rows(result.output)
    assert [table[n].split()[0] for n in range(1, 8)] == ["[CLS]", "小狗", "看见", "了", "一只", "猫", "[SEP]"]
    assert table[2].split()[1] == "?"
    assert "? unknown: 小狗, 看见" in result.output
    assert "[UNK]" in result.output


@pytest.mark.ci
@pytest.mark.parametrize(
    "given, words",
    [(["小狗看见了一只猫"], [*"小狗看见了一只猫"]), (["--tokens", "小狗", "看见", "猫"], ["小狗", "看见", "猫"])],
    ids=["one text", "words"],
)
def test_chinese_is_read_by_an_encoder_that_knows_it(run, given, words):
    result = run("look", *given)
    assert result.exit_code == 0, result.output
    assert "of chinese-encoder, the most informative of 16" in result.output
    assert "unknown" not in result.output
    table = rows(result.output)
    assert [table[n].split()[0] for n in range(1, len(table) + 1)] == ["[CLS]", *words, "[SEP]"]


@pytest.mark.ci
def test_a_missing_font_is_noted_once(run, monkeypatch):
    monkeypatch.setattr("saccade.viz.fonts._known_faces", list)
    monkeypatch.setattr("saccade.viz.fonts._new_faces", list)
    output = run("look", "--tokens", "小狗", "猫").output
    assert output.count("apt install fonts-noto-cjk") == 1
    assert "note: no installed font has 小, 狗, 猫" in " ".join(output.split())


@pytest.mark.slow
def test_several_arguments_are_one_text(run):
    apart, together = run("look", "The", "cat", "sat."), run("look", "The cat sat.")
    assert rows(apart.output) == rows(together.output)
    assert len(rows(apart.output)) == 6


@pytest.mark.ci
def test_repeated_words_are_distinguished(run):
    output = run("look", "the cat and the dog", "--layer", "0", "--head", "2").output
    assert "the #2" in output
    assert "the #5" in output
    assert "cat #" not in output


@pytest.mark.slow
def test_text_is_text_and_not_markup(run):
    result = run("look", "--tokens", "[/red]", "[bold]x[/bold]", ":smile:", "[CLS]", "a\x1b[31mb")
    assert result.exit_code == 0, result.output
    table = rows(result.output)
    assert [table[n].split("  ")[0] for n in (2, 3, 4, 5)] == ["[/red]", "[bold]x[/bold]", ":smile:", "[CLS]"]
    assert table[6].startswith(r"a\x1b[31mb")
    assert "\x1b" not in result.output


@pytest.mark.ci
def test_a_folder_is_named_as_it_is(run, tmp_path):
    assert "wrote [bold]x:smile:/heatmap.png" in run("look", "cat", "--out", "[bold]x:smile:").output
    assert (tmp_path / "[bold]x:smile:" / "mosaic.png").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("width", ["20", "40", "300"])
def test_any_width_will_do(run, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    result = run("look", SENTENCE, "--out", "a/rather/long/folder/name/for/so/narrow/a/terminal")
    assert result.exit_code == 0
    assert "wrote a/rather/long/folder/name/for/so/narrow/a/terminal/heatmap.png" in result.output
    assert max(map(len, result.output.split("wrote")[0].splitlines())) <= int(width)


# The long one takes seconds: windows of as many tokens stand for it in every run.
@pytest.mark.parametrize("text", ["hi", pytest.param("word " * 500, id="long", marks=pytest.mark.slow)])
def test_short_and_long_texts(run, text):
    result = run("look", text)
    assert result.exit_code == 0, result.output
    assert len(rows(result.output)) == len(text.split()) + 2


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([""], "TEXT must have at least one word; got an empty text"),
        (["  ", "\n"], "TEXT must have at least one word; got an empty text"),
        (["\u200b"], "TEXT must have at least one word; got only characters that the model does not read"),
        (["\udcff"], "TEXT must be valid UTF-8; got bytes that are not"),
        (["word " * 511, "--window", "2"], "--window must be from 0 to 1 for this text; got 2"),
        (["cat", "--window", "1"], "--window must be from 0 to 0 for this text; got 1"),
        (["--tokens", "cat", ""], "words: every given word must leave at least one token; got nothing for '' (word 2)"),
        (["cat", "--layer", "6"], "--layer must be from 0 to 5; got 6"),
        (["cat", "--layer", "-1"], "--layer must be from 0 to 5; got -1"),
        (["cat", "--head", "12"], "--head must be from 0 to 11; got 12"),
        (["cat", "--out", "file"], "--out must be a folder that can be written; got file (File exists)"),
        (
            ["cat", "--out", "file/below"],
            "--out must be a folder that can be written; got file/below (Not a directory)",
        ),
        (["cat", "--out", "file/\x1b"], r"--out must be a folder that can be written; got file/\x1b (Not a directory)"),
    ],
)
def test_bad_arguments_are_one_line_and_no_traceback(run, tmp_path, arguments, sentence):
    (tmp_path / "file").write_text("in the way")
    result = run("look", *arguments)
    assert result.exit_code == 2
    assert result.stderr == f"saccade look: {sentence}.\n"
    assert result.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "arguments", [["look"], ["look", "cat", "--unknown"], ["look", "cat", "--layer", "x"], ["watch"]]
)
def test_arguments_that_cannot_be_read(run, arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_a_model_that_cannot_be_loaded_is_one_sentence(run, monkeypatch):
    def tampered():
        raise ValueError(f"minilm: model.safetensors must have sha256 {MINILM_SHA256}; got 00.")

    monkeypatch.setitem(loading.NAMED, loading.MINILM, tampered)
    result = run("look", "cat")
    assert result.exit_code == 1
    assert result.stderr.startswith("saccade look: minilm: model.safetensors must have sha256 53aa")


def test_a_disk_that_is_full_is_one_sentence(run, monkeypatch):
    def full(figure, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("saccade.viz.save", full)
    result = run("look", "cat")
    assert result.exit_code == 1
    assert "(No space left on device)" in result.stderr


def test_version(run):
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"saccade {__version__}\n")


@pytest.mark.parametrize("text", ["Return a new list.", "显示帮助信息"])
def test_a_language_model_is_looked_at_too(run, text):
    result = run("look", "--model", "small-decoder", text)
    assert result.exit_code == 0, result.output
    assert "of small-decoder, the most informative of" in result.output
    assert "[CLS]" not in result.output
    assert len(rows(result.output)) >= 4


@pytest.mark.parametrize(
    "name, end",
    [
        (
            "Qwen/Qwen3-0.6B",
            "got Qwen/Qwen3-0.6B, but there is no such folder.\nHint: saccade downloads nothing; if it is on the "
            "Hugging Face hub, `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B` downloads it into a folder\n",
        ),
        (
            "bert-base-uncased",
            "got bert-base-uncased, but there is no such folder.\nHint: saccade downloads nothing; if it is on the "
            "Hugging Face hub, `hf download bert-base-uncased --local-dir bert-base-uncased` downloads it into a "
            "folder\n",
        ),
        (
            "sentence-transformers/all-minilm-l6-v2",
            "got sentence-transformers/all-minilm-l6-v2, but there is no such folder.\n"
            "Hint: it comes with the package: --model all-MiniLM-L6-v2\n",
        ),
        ("./model", "got ./model, but there is no such folder.\n"),
        ("a/b/c", "got a/b/c, but there is no such folder.\n"),
        ("a b; rm", "got a b; rm, but there is no such folder.\n"),
        ("empty", "got empty, which has no config.json.\n"),
        ("weights", "got weights, a file.\n"),
    ],
)
@pytest.mark.parametrize("command", ["look", "compare", "generate"])
def test_a_model_that_is_neither_a_name_nor_a_folder_is_a_sentence_and_a_hint(run, tmp_path, command, name, end):
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights").write_bytes(b"")
    result = run(command, "--model", name, "some text")
    assert result.exit_code == 2
    known = "all-MiniLM-L6-v2, chinese-encoder, small-decoder"
    rule = f"--model must be {known}, or a folder with config.json, safetensors and tokenizer.json"
    assert result.stderr == f"saccade {command}: {rule}; {end}"
    assert result.stdout == ""


def test_line_breaks_and_tabs_are_signs_in_table_and_pictures(run, monkeypatch):
    drawn = []
    monkeypatch.setattr("saccade.viz.heatmap", lambda *_, **given: drawn.append(given) or viz.mosaic([[[1.0]]]))
    result = run("look", "--model", "small-decoder", "one\ttab.\n\nThe   end")
    assert result.exit_code == 0, result.output
    table = rows(result.output)
    shown = [table[number].split()[0] for number in sorted(table)]
    assert shown == ["one", "⇥", "tab", ".", "↵", "↵", "The", "␣␣", "end"]
    assert drawn[0]["x_labels"] == drawn[0]["y_labels"] == shown


def test_chinese_is_cut_by_the_tokenizer_and_reported_as_unknown(run):
    result = run("look", "--model", "all-MiniLM-L6-v2", "小狗 看见 了 一只 猫")
    assert result.exit_code == 0, result.output
    table = rows(result.output)
    assert [table[n].split()[0] for n in range(2, 10)] == [*"小狗看见了一只猫"]
    unknown = [table[n].split()[0] for n in table if table[n].split()[1] == "?"]
    ids = minilm().tokenizer.encode("小狗看见了一只猫").ids[1:-1]
    assert unknown == [character for character, number in zip("小狗看见了一只猫", ids, strict=True) if number == 100]
    said = " ".join(result.output.split())
    assert f"? unknown: {', '.join(unknown)} - all-MiniLM-L6-v2 does not know them, or a part of them; it read" in said
    assert "it read [UNK] instead, so the attention of these words means little" in said
    assert said.index("? unknown") < said.index("[CLS] [CLS]")


@pytest.mark.ci
def test_many_unknown_words_are_counted(run):
    characters = [chr(0x4E00 + number) for number in range(0x500, 0x514)]
    said = " ".join(run("look", " ".join(characters)).output.split())
    assert re.search(r"\? unknown: (\S, ){11}\S and \d more - ", said)
