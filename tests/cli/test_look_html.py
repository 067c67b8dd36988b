"""`saccade look --html`: one page of every head, for one text or two, of any length."""

import pytest
import torch
from tests.cli.test_look_options import TEXT, neox, pair_of, save
from tests.viz.page.page_reader import Page
from transformers import PreTrainedTokenizerFast

from saccade import viz

__all__ = ["neox"]


def page_of(tmp_path, name="page.html"):
    return Page(tmp_path / name)


def test_a_page_of_every_head_is_written(run, tmp_path, encoder):
    result = run("look", TEXT, "--html", "page.html")
    assert result.exit_code == 0, result.output
    assert result.output == "wrote page.html  (every head of every layer; open it in a browser)\n"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]  # no pictures
    page = page_of(tmp_path)
    assert page.tokens()[1] == ["[CLS]", *TEXT.split(), "[SEP]"]
    assert page.side()["texts"][0]["special"] == [0, 7]
    assert [layer["heads"] for layer in page.side()["layers"]] == [12] * 6
    encoding = encoder.tokenizer.encode(TEXT)
    with torch.no_grad():
        dense = encoder.matrices(torch.tensor([encoding.ids]))[4].to_dense()[0, 7]
    torch.testing.assert_close(torch.from_numpy(page.small(4, 7)[0]), dense.double(), rtol=0.06, atol=1e-6)


def test_its_folder_is_made(run, tmp_path):
    result = run("look", TEXT, "--html", "out/of/page.html")
    assert result.exit_code == 0, result.output
    assert page_of(tmp_path, "out/of/page.html").tokens()[1][1] == "the"


def test_a_page_is_written_anew(run, tmp_path):
    (tmp_path / "page.html").write_text("what was there")
    assert run("look", TEXT, "--html", "page.html").exit_code == 0
    assert page_of(tmp_path).index["title"]


@pytest.mark.parametrize(
    "other", [("--stats", "json"), ("--layer", "1"), ("--head", "2"), ("--by", "position"), ("--out", "x")]
)
def test_options_that_would_do_nothing_beside_it_are_refused(run, tmp_path, other):
    result = run("look", TEXT, "--html", "page.html", *other)
    assert result.exit_code == 2
    assert result.stderr == (
        f"saccade look: {other[0]} must be left out if --html is given, which shows every head in one page.\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written(run, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for path in ("folder", "."):
        result = run("look", TEXT, "--html", path)
        assert result.exit_code == 2
        assert (
            result.stderr == f"saccade look: --html must be a file that can be written; got {path} (Is a directory).\n"
        )
    result = run("look", TEXT, "--html", "file/page.html")
    assert result.exit_code == 2
    assert result.stderr == "saccade look: --html must be a folder that can be written; got file (File exists).\n"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


def test_a_folder_that_was_made_for_nothing_goes_again(run, tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(viz, "report", full)
    result = run("look", TEXT, "--html", "new/folder/page.html")
    assert result.exit_code == 1
    assert "--html must be a file that can be written; got new/folder/page.html (No space left" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_two_texts_stand_side_by_side(run, tmp_path, kind):
    folder = save(tmp_path / kind, pair_of(kind))
    result = run("look", "--model", folder, TEXT, "--to", "mat the cat", "--html", "page.html")
    assert result.exit_code == 0, result.output
    page = page_of(tmp_path)
    assert page.tokens() == (["mat", "the", "cat"], TEXT.split())
    assert len(page.side()["texts"]) == 2
    model = pair_of(kind).eval()
    model.set_attn_implementation("eager")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    source, target = (torch.tensor([tokenizer(text)["input_ids"]]) for text in (TEXT, "mat the cat"))
    with torch.no_grad():
        out = model(input_ids=source, decoder_input_ids=target, output_attentions=True, use_cache=False)
    weights = out.cross_attentions[1][0, 3].double()
    torch.testing.assert_close(torch.from_numpy(page.small(1, 3)[0]), weights, rtol=0.06, atol=1e-6)


def test_windows_of_a_long_text(run, tmp_path, neox):
    result = run(
        "look", "--model", neox, " ".join([TEXT] * 4), "--at-once", "10", "--window", "1", "--html", "page.html"
    )
    assert result.exit_code == 0, result.output
    assert "window 1" in result.output
    assert page_of(tmp_path).layer()["keys"] <= 10


def test_a_text_that_is_too_long_to_be_drawn_has_a_page(run, tmp_path, neox, monkeypatch):
    monkeypatch.setattr("saccade.cli.look._MOST_WEIGHTS", 1000)
    refused = run("look", "--model", neox, TEXT, TEXT)
    assert refused.exit_code == 2
    assert "TEXT must be shorter to be drawn" in refused.stderr
    assert "--html" in refused.stderr
    assert run("look", "--model", neox, TEXT, TEXT, "--html", "page.html").exit_code == 0
    assert page_of(tmp_path).layer()["keys"] == 12


def test_a_model_with_nan_outputs_is_reported(run, tmp_path, encoder, monkeypatch):
    matrices = encoder.matrices

    def broken(tokens):
        found = matrices(tokens)
        query = found[2].inputs.query.clone()
        query[:, 3] = float("nan")
        found[2] = type(found[2])(query, found[2].inputs.key)
        return found

    monkeypatch.setattr(encoder, "matrices", broken)
    result = run("look", TEXT, "--html", "page.html")
    assert result.exit_code == 0
    assert page_of(tmp_path).layer(2)["values"]["entropy"][3] is None
