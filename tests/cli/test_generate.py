"""``saccade generate`` with a small model that the tests write to a folder."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner, Result

from saccade.cli.app import app
from saccade.cli.generate import TextPrinter, visible_text
from saccade.models import Decoder, DecoderConfig, Sampler
from saccade.models import beam_search as search
from saccade.models import generate as continued

PROMPT = "the cat"


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=256, max_len=64, embed_dim=16, num_heads=4, num_kv_heads=2, num_layers=2, feed_forward_dim=32
    )
    model = Decoder(config, _tokenizer()).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return model


@pytest.fixture
def folder(decoder: Decoder, tmp_path) -> str:
    decoder.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["generate", *arguments])


def _said(decoder: Decoder, new: list[int]) -> str:
    ids = decoder.tokenizer.encode(PROMPT).ids
    return visible_text(decoder.tokenizer.decode([*ids, *new])) + "\n"


def _ids(decoder: Decoder) -> list[list[int]]:
    return [decoder.tokenizer.encode(PROMPT).ids]


def test_the_likeliest_text_goes_to_the_standard_output(decoder: Decoder, folder: str) -> None:
    result = _run("the", "cat", "--model", folder, "--max-new-tokens", "9")
    assert result.exit_code == 0, result.output
    assert result.stdout == _said(decoder, continued(decoder, _ids(decoder), 9)[0])


def test_draws_are_those_of_the_seed(decoder: Decoder, folder: str) -> None:
    options = ("--temperature", "1.3", "--top-k", "20", "--top-p", "0.9", "--seed", "4")
    result = _run(PROMPT, "--model", folder, "--max-new-tokens", "9", *options)
    expected = continued(decoder, _ids(decoder), 9, sampler=Sampler(1.3, 20, 0.9), seed=4)[0]
    assert result.stdout == _said(decoder, expected)


def test_beams_are_searched(decoder: Decoder, folder: str) -> None:
    result = _run(PROMPT, "--model", folder, "--max-new-tokens", "6", "--beams", "3")
    assert result.stdout == _said(decoder, search(decoder, _ids(decoder), 6, beams=3)[0][0].tokens)


def test_a_trace_says_what_each_step_took(folder: str) -> None:
    result = _run(PROMPT, "--model", folder, "--max-new-tokens", "4", "--trace")
    lines = [line.split() for line in result.stderr.splitlines() if line.strip()]
    assert lines[0][:4] == ["step", "phase", "tokens", "K,V"]
    token = 2 * 2 * 2 * 4 * 4  # layers, key and value, kv heads, width, bytes
    steps = [line for line in lines[1:] if line[1:2] in (["prefill"], ["decode"])]
    assert [line[:3] for line in steps] == [["0", "prefill", "7"], *([str(i), "decode", "1"] for i in (1, 2, 3))]
    assert steps[0][3:7] == [str(7 * token), "B", str(7 * token), "B"]
    assert steps[1][3:5] == ["1.0", "kB"]
    assert steps[1][5:7] == [str(token), "B"]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (("--beams", "2", "--top-k", "3"), "--beams must be 1 if tokens are sampled"),
        (("--beams", "2", "--trace"), "--trace must be used with one beam"),
        (("--seed", "2"), "--seed must be used with --temperature, --top-k or --top-p"),
        (("--temperature", "1", "--seed", str(10**23)), "--seed must be at most 9223372036854775807; got 1000"),
        (("--max-new-tokens", str(10**24)), "--max-new-tokens must be at most 9223372036854775807; got 1000"),
        (("--max-new-tokens", str(10**24), "--beams", "2"), "--max-new-tokens must be at most"),
        (("--temperature", "0"), "Sampler: temperature must be a finite number above 0; got 0.0."),
    ],
)
def test_options_that_do_not_go_together_are_one_line(folder: str, arguments: tuple[str, ...], sentence: str) -> None:
    result = _run(PROMPT, "--model", folder, *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("saccade generate: ")
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def _told(*text: str | int) -> Tokenizer:
    """A tokenizer of words of its own."""
    return Tokenizer(models.WordLevel({str(word): i for i, word in enumerate(text)}))


SPEAKING = {
    "bytes": _tokenizer(),
    "words": _told(*range(256)),
    "pieces": _told(*(f"##{i}" if i % 3 else str(i) for i in range(256))),
    "marks": _told(*("n't" if i % 5 == 0 else "." if i % 3 == 0 else f"w{i}" for i in range(256))),
    "fallback": _told(*(f"<0x{i:02X}>" for i in range(256))),
}
SPEAKING["pieces"].decoder = decoders.WordPiece()
SPEAKING["marks"].decoder = decoders.WordPiece(cleanup=True)
SPEAKING["fallback"].decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])


@pytest.mark.parametrize("length", [1, 40, 1300])
@pytest.mark.parametrize("kind", SPEAKING)
def test_streamed_pieces_make_the_text(kind: str, length: int, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = SPEAKING[kind]
    numbers = torch.randint(tokenizer.get_vocab_size(), (length,)).tolist()
    letters = "".join(
        map(chr, numbers)
    ).encode()  # where bytes are no letters, this decoder takes back what came before
    tokens = [*"多字节 é".encode(), *numbers] if kind == "bytes" else [*letters] if kind == "fallback" else numbers
    printer, said = TextPrinter(tokenizer, tokens[:1]), []
    for token in tokens[1:]:
        printer.add(token)
        said.append(capsys.readouterr().out)
    printer.finish()
    said.append(capsys.readouterr().out)
    assert "".join(said) == visible_text(tokenizer.decode(tokens)) + "\n"
    assert length == 1 or sum(map(bool, said)) > length / 8


def test_revised_text_is_printed_again_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    class Fickle:
        def decode(self, tokens: list[int]) -> str:
            return ["a", "a b", "ab c"][len(tokens) - 1]

    printer = TextPrinter(Fickle(), [0])
    printer.add(1)
    printer.add(2)
    printer.finish()
    assert capsys.readouterr().out == "a b\nab c\n"


def test_a_text_is_shown_while_it_is_made(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command, seen = importlib.import_module("saccade.cli.generate"), []
    steps = command.stream

    def watched(*arguments: object, **options: object) -> Iterator[object]:
        for step in steps(*arguments, **options):
            seen.append(len(sys.stdout.buffer.getvalue()))
            yield step

    monkeypatch.setattr(command, "stream", watched)
    result = _run(PROMPT, "--model", folder, "--max-new-tokens", "30")
    assert result.exit_code == 0
    assert seen[0] == 0
    assert len(set(seen)) > 3  # bytes come one by one, and letters are said whole
    assert seen == sorted(seen)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::saccade.models.UntrainedLengthWarning")  # the text is longer than the model knows
def test_a_text_that_fails_is_printed_up_to_the_failure(folder: str) -> None:
    result = _run(PROMPT, "--model", folder, "--max-new-tokens", "300", "--seed", "1", "--top-k", "9")
    assert result.exit_code == 0
    config = json.loads((Path(folder) / "config.json").read_text())
    assert config["max_position_embeddings"] == 64  # rotations go on; positions that are learned do not
    learned = DecoderConfig(
        vocab_size=256, max_len=64, embed_dim=16, num_heads=4, num_layers=1, feed_forward_dim=8,
        position_encoding="learned",
    )  # fmt: skip
    Decoder(learned, _tokenizer()).save_pretrained(folder)
    result = _run(PROMPT, "--model", folder, "--max-new-tokens", "300", "--seed", "1", "--top-k", "9")
    assert result.exit_code == 2
    assert result.stdout.startswith(PROMPT)
    assert result.stdout.endswith("\n")
    assert result.stderr.strip() == "saccade generate: Decoder.hidden: text must be at most 64 long; got 65."


@pytest.mark.parametrize("options", [(), ("--trace",)])
def test_an_interrupted_text_is_printed_up_to_the_interruption(
    decoder: Decoder, folder: str, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    command = importlib.import_module("saccade.cli.generate")
    steps = command.stream

    def interrupted(*arguments: object, **named: object) -> Iterator[object]:
        for number, step in enumerate(steps(*arguments, **named)):
            if number == 7:
                raise KeyboardInterrupt
            yield step

    monkeypatch.setattr(command, "stream", interrupted)
    result = _run(PROMPT, "--model", folder, "--max-new-tokens", "30", *options)
    assert result.exit_code == 130
    ids, new = _ids(decoder)[0], continued(decoder, _ids(decoder), 7)[0]
    assert result.stdout == visible_text(decoder.tokenizer.decode([*ids, *new]).rstrip("\ufffd")) + "\n"
    assert "Traceback" not in result.stderr


def test_an_early_interrupt_prints_nothing(folder: str, monkeypatch) -> None:
    def interrupted(*arguments: object, **named: object) -> Iterator[object]:
        raise KeyboardInterrupt

    monkeypatch.setattr("saccade.cli.generate.beam_search", interrupted)
    result = _run(PROMPT, "--model", folder, "--beams", "2")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "")


def test_a_prompt_without_tokens_is_one_line(folder: str) -> None:
    result = _run("", "--model", folder)
    assert result.exit_code == 2
    assert result.stderr == "saccade generate: PROMPT must have at least one token; got none.\n"
    result = _run("\udcff", "--model", folder)
    assert "PROMPT must be valid UTF-8" in result.stderr


def test_a_folder_without_a_model_is_refused(tmp_path, decoder: Decoder) -> None:
    result = _run(PROMPT, "--model", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.startswith("saccade generate: --model must be ")
    assert "Traceback" not in result.output
    Decoder(decoder.config).save_pretrained(tmp_path / "mute")
    result = _run(PROMPT, "--model", str(tmp_path / "mute"))
    assert result.exit_code == 2
    assert "--model must have a tokenizer.json" in result.stderr


def test_text_is_text_and_not_an_order_to_the_terminal(folder: str) -> None:
    result = _run("\x1b[31m[red]a", "--model", folder, "--max-new-tokens", "3")
    assert "\x1b" not in result.stdout
    assert result.stdout.startswith(r"\x1b[31m[red]a")


def test_the_model_that_comes_with_the_package_goes_on_from_both_languages():
    for prompt in ("The import statement", "此选项"):
        result = _run(prompt, "--max-new-tokens", "12")
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith(prompt)
        assert len(result.stdout.strip()) > len(prompt)


def test_an_encoder_does_not_generate():
    result = _run(PROMPT, "--model", "all-MiniLM-L6-v2")
    assert result.exit_code == 2
    assert "--model must be a language model; got all-MiniLM-L6-v2, an encoder" in result.stderr
