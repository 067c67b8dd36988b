"""`saccade look`: texts from files, numbers for programs, other people's models, and two texts."""

import csv
import io
import json
from pathlib import Path

import matplotlib.image
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BartConfig,
    BartModel,
    GPTNeoXConfig,
    GPTNeoXModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5Model,
)

from saccade.cli.look_formats import PARTS_OF_A_TEXT, SCHEMA
from saccade.models import EncoderDecoder, EncoderDecoderConfig, minilm

TEXT = "the cat sat on the mat"


def save(folder, model):
    """A model and a tokenizer of a few words, as transformers writes them."""
    known = {word: number for number, word in enumerate(["[PAD]", "<s>", "</s>", "<unk>", *sorted(set(TEXT.split()))])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "pad_token": "[PAD]", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **special).save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def neox(tmp_path):
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=12, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=16
    )
    return save(tmp_path / "neox", GPTNeoXModel(config))


def pair_of(kind):
    torch.manual_seed(0)
    if kind == "t5":
        config = T5Config(
            vocab_size=12, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
        return T5Model(config)
    sizes = {f"{side}_{name}": number for side in ("encoder", "decoder") for name, number in (
        ("layers", 2), ("attention_heads", 4), ("ffn_dim", 16),
    )}  # fmt: skip
    return BartModel(BartConfig(vocab_size=12, d_model=16, max_position_embeddings=64, **sizes))


@pytest.mark.ci
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_file_is_a_text(run, tmp_path, encoding):
    (tmp_path / "text.txt").write_text("The cat\nsat.\n", encoding=encoding)
    given, read = run("look", "The cat\nsat.\n"), run("look", "--file", "text.txt")
    assert read.exit_code == 0, read.output
    assert read.output == given.output


def test_statistics_as_json_are_those_of_the_matrices(run):
    result = run("look", "The cat sat.", "--stats", "json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert (told["schema"], told["model"], told["attention"]) == (SCHEMA, "all-MiniLM-L6-v2", "self")
    encoder = minilm()
    tokens, _ = encoder.tokenize(["The cat sat."])
    assert told["queries"] == told["keys"] == tokens.shape[1]
    assert len(told["heads"]) == 72
    units = {measure["name"]: measure["unit"] for measure in told["measures"]}
    assert units["entropy"] == "nats"
    assert all(measure["meaning"] and measure["unit"] for measure in told["measures"])
    with torch.no_grad():
        summaries = [matrix.summary(PARTS_OF_A_TEXT) for matrix in encoder.matrices(tokens)]
    for one in told["heads"]:
        for name, value in one["values"].items():
            measure = summaries[one["layer"]].named(name)
            assert value == pytest.approx(measure.values[0, one["head"]].item(), rel=1e-6)
            assert one["uniform"][name] == pytest.approx(
                measure.uniform[0, one["head"]].item(), rel=1e-6, nan_ok=True
            ) or (one["uniform"][name] is None)
    assert told["heads"][0]["uniform"]["largest_logit"] is None


def test_statistics_as_csv_say_the_same(run, tmp_path):
    told = json.loads(run("look", "The cat sat.", "--stats", "json").output)
    lines = list(csv.DictReader(io.StringIO(run("look", "The cat sat.", "--stats", "CSV").output)))
    assert len(lines) == 72 * len(told["measures"])
    for line in lines:
        head = told["heads"][int(line["layer"]) * 12 + int(line["head"])]
        assert line["schema"] == SCHEMA
        assert float(line["value"]) == head["values"][line["measure"]]
        even = head["uniform"][line["measure"]]
        assert line["uniform"] == ("" if even is None else str(even))
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_ours_is_looked_at_on_its_own_kernels(run, neox):
    result = run("look", "--model", neox, TEXT, "--layer", "1", "--head", "2")
    assert result.exit_code == 0, result.output
    assert "layer 1, head 2 of neox, as requested" in result.output
    model = GPTNeoXModel.from_pretrained(neox, attn_implementation="eager")
    ids = torch.tensor([PreTrainedTokenizerFast.from_pretrained(neox)(TEXT)["input_ids"]])
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[1][0, 2]
    told = json.loads(run("look", "--model", neox, TEXT, "--stats", "json").output)
    own = next(one for one in told["heads"] if (one["layer"], one["head"]) == (1, 2))
    assert own["values"]["largest_weight"] == pytest.approx(weights.amax(-1).mean().item(), rel=1e-4)
    assert own["values"]["entropy"] == pytest.approx(torch.special.entr(weights).sum(-1).mean().item(), rel=1e-4)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_two_texts_show_what_is_looked_at_while_writing(run, tmp_path, kind):
    model = pair_of(kind)
    folder = save(tmp_path / kind, model)
    result = run("look", "--model", folder, TEXT, "--to", "mat the cat", "--layer", "1", "--head", "3")
    assert result.exit_code == 0, result.output
    assert [path.name for path in sorted((tmp_path / "out" / "look").iterdir())] == [
        "heatmap.png",
        "lines.png",
        "mosaic.png",
    ]
    assert min(matplotlib.image.imread("out/look/lines.png").shape[:2]) > 200
    words = [line.split()[1] for line in result.output.splitlines() if line.strip()[:1].isdigit()]
    assert words == ["mat", "the", "cat"]
    assert "the #" in result.output  # the text that is read has two
    told = json.loads(run("look", "--model", folder, TEXT, "--to", "mat the cat", "--stats", "json").output)
    assert (told["attention"], told["queries"], told["keys"], len(told["heads"])) == ("cross", 3, 6, 8)
    source = torch.tensor([PreTrainedTokenizerFast.from_pretrained(folder)(TEXT)["input_ids"]])
    target = torch.tensor([PreTrainedTokenizerFast.from_pretrained(folder)("mat the cat")["input_ids"]])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model.eval()(input_ids=source, decoder_input_ids=target, output_attentions=True, use_cache=False)
    entropy = torch.special.entr(out.cross_attentions[1][0, 3]).sum(-1).mean().item()
    own = next(one for one in told["heads"] if (one["layer"], one["head"]) == (1, 3))
    assert own["values"]["entropy"] == pytest.approx(entropy, rel=1e-4)


def test_an_encoder_decoder_of_ours_is_looked_at_too(run, tmp_path):
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(Path(save(tmp_path / "t5", pair_of("t5"))) / "tokenizer.json"))
    sizes = {"max_len": 64, "embed_dim": 16, "num_heads": 4, "feed_forward_dim": 16}
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 2}
    config = EncoderDecoderConfig(vocab_size=tokenizer.get_vocab_size(), **sizes, **layers)
    model = EncoderDecoder(config, tokenizer).eval()
    model.save_pretrained(tmp_path / "ours")
    given = ("look", "--model", str(tmp_path / "ours"), TEXT)
    result = run(*given, "--to", "mat the cat", "--layer", "1")
    assert result.exit_code == 0, result.output
    assert "layer 1, head" in result.output
    told = json.loads(run(*given, "--to", "mat the cat", "--stats", "json").output)
    source, target = (torch.tensor([tokenizer.encode(text).ids]) for text in (TEXT, "mat the cat"))
    with torch.no_grad():
        entropy = model.cross_matrices(source, target)[1].entropy()[0, 3].mean().item()
    own = next(one for one in told["heads"] if (one["layer"], one["head"]) == (1, 3))
    assert own["values"]["entropy"] == pytest.approx(entropy, rel=1e-4)
    assert json.loads(run(*given, "--stats", "json").output)["attention"] == "self"


def test_two_texts_are_not_cut_into_windows(run, tmp_path):
    folder = save(tmp_path / "t5", pair_of("t5"))
    result = run("look", "--model", folder, " ".join([TEXT] * 12), "--to", "mat the cat")
    assert result.exit_code == 2
    assert (
        result.stderr
        == "saccade look: TEXT must have at most 64 tokens together with another text; got 72, t5 reads no more.\n"
    )
    result = run("look", "--model", folder, TEXT, "--to", " ".join([TEXT] * 12))
    assert "--to must have at most 64 tokens together with another text; got 72" in result.stderr
    result = run("look", "--model", folder, TEXT, "--to", "mat", "--window", "0")
    assert result.stderr == (
        "saccade look: --window must be left out if --to is given, which shows two texts at once.\n"
    )


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["neox", "t5"])
def test_a_model_of_transformers_reads_a_long_text_in_windows(run, tmp_path, neox, kind):
    folder = neox if kind == "neox" else save(tmp_path / "t5", pair_of("t5"))
    tokenizer = json.loads((Path(folder) / "tokenizer.json").read_text())
    tokenizer["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    tokenizer["padding"] = {
        "strategy": {"Fixed": 100}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]",
    }  # fmt: skip
    (Path(folder) / "tokenizer.json").write_text(json.dumps(tokenizer))
    result = run("look", "--model", folder, " ".join([TEXT] * 12), "--window", "1")
    assert result.exit_code == 0, result.output
    assert result.output.startswith(
        f"the text has 72 tokens, {kind} reads 64 at a time; window 1 of 2 is shown (tokens"
    )
    assert "whole.png" in result.output


@pytest.mark.ci
def test_places_behind_that_of_padding_are_fewer(run, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = RobertaConfig(vocab_size=12, max_position_embeddings=34, pad_token_id=0, **sizes)
    folder = save(tmp_path / "roberta", RobertaModel(config))
    result = run("look", "--model", folder, " ".join([TEXT] * 10))
    assert result.exit_code == 0, result.output
    assert "roberta reads 33 at a time" in result.output


def test_unknown_pieces_shown_as_text_are_distinguished_by_number(run, tmp_path):
    folder = save(tmp_path / "t5", pair_of("t5"))
    pieces = [("[PAD]", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁the", -1.0), ("▁cat", -2.0), ("▁", -3.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.save(str(tmp_path / "t5" / "tokenizer.json"))
    result = run("look", "--model", folder, "the cat 小狗 看见 the")
    assert result.exit_code == 0, result.output
    assert "? unknown: 小狗, 看见 - t5 does not know them, or a part of them; it read <unk> instead" in " ".join(
        result.output.split()
    )


def test_an_encoder_decoder_with_one_text_is_its_encoder(run, tmp_path):
    folder = save(tmp_path / "t5", pair_of("t5"))
    told = json.loads(run("look", "--model", folder, TEXT, "--stats", "json").output)
    assert (told["attention"], told["queries"], told["keys"]) == ("self", 6, 6)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([], "TEXT must be given, or a --file; got neither"),
        (["cat", "--file", "x.txt"], "TEXT must be left out if --file is given; got both"),
        (["--file", "no.txt"], "--file must be a file that can be read; got no.txt (No such file or directory)"),
        (["--file", "latin.txt"], "--file must be valid UTF-8; got latin.txt"),
        (["--file", "empty.txt"], "TEXT must have at least one word; got an empty text"),
        (
            ["cat", "--to", "dog"],
            "--to must be left out if the model is not an encoder-decoder; got all-MiniLM-L6-v2",
        ),
    ],
)
def test_bad_arguments_are_one_line(run, tmp_path, arguments, sentence):
    (tmp_path / "latin.txt").write_bytes("Käse".encode("latin-1"))
    (tmp_path / "empty.txt").write_text(" \n")
    result = run("look", *arguments)
    assert result.exit_code == 2
    assert result.stderr == f"saccade look: {sentence}.\n"


@pytest.mark.parametrize("kind", [["x"], {"x": 1}, 5, None, "\x1b[31m"])
def test_a_model_type_that_is_none_is_one_sentence(run, tmp_path, kind):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": kind}))
    result = run("look", "--model", "model", "cat")
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("saccade look: --model must contain a safetensors model and a tokenizer that ")
    assert result.stderr.count("\n") == 1
    assert "\x1b" not in result.stderr


def test_a_folder_without_weights_is_one_sentence(run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text(json.dumps({"model_type": "gpt_neox"}))
    result = run("look", "--model", "empty", "some text")
    assert result.exit_code == 1
    assert result.stderr.startswith("saccade look: --model must contain a safetensors model and a tokenizer")
    assert "Traceback" not in result.output


def test_a_name_from_outside_is_escaped_in_files(run, tmp_path, neox):
    Path(neox).rename(tmp_path / "=1+\x1b[31m")
    result = run("look", "--model", "=1+\x1b[31m", "cat", "--stats", "csv")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert result.output.splitlines()[1].startswith(r"saccade.look/1,'=1+\x1b[31m,self,0,0,entropy,nats,")


@pytest.mark.parametrize("option", [("--layer", "1"), ("--head", "0"), ("--by", "position"), ("--out", "out/look")])
def test_options_that_would_do_nothing_beside_statistics_are_refused(run, tmp_path, option):
    result = run("look", "The cat sat.", "--stats", "csv", *option)
    assert result.exit_code == 2
    expected = f"{option[0]} must be left out if --stats is given, which prints every head and draws nothing"
    assert result.stderr == f"saccade look: {expected}.\n"
    assert result.stdout == ""
    assert not (tmp_path / "out").exists()
