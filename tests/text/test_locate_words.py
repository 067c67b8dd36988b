"""Find the tokens of a word: in every spelling of vocabularies, and nowhere inside another word."""

import pytest

from saccade.text import locate


@pytest.mark.parametrize(
    ("tokens", "word", "place"),
    [
        (["The", "Ġcam", "era", "Ġis", "Ġit", "."], "camera", range(1, 3)),
        (["The", "Ġcam", "era", "Ġis", "Ġit", "."], "The", range(1)),
        (["The", "Ġcam", "era", "Ġis", "Ġit", "."], "it", range(4, 5)),
        (["The", "Ġcam", "era", "Ġis", "Ġit", "."], "it.", range(4, 6)),
        (["The", "Ġcam", "era", "Ġand", "Ġcam"], "cam", range(4, 5)),
        (["[CLS]", "the", "cam", "##era", "it", "[SEP]"], "camera", range(2, 4)),
        (["[CLS]", "the", "cam", "##era", "it", "[SEP]"], "Camera", range(2, 4)),
        (["[CLS]", "the", "cam", "##era", "it", "[SEP]"], "[SEP]", range(5, 6)),
        (["[CLS]", "it", "sees", "[SEP]"], "it", range(1, 2)),
        (["▁The", "▁cam", "era", "▁It"], "It", range(3, 4)),
        (["<s>", "▁It", "▁is", "▁it"], "It", range(1, 2)),
        (["you", "can", "look", "it", "up"], "it", range(3, 4)),
        (["小", "狗", "看", "见", "猫"], "小狗", range(2)),
        (["å°ı", "çĭĹ", "çľĭ", "è§ģ"], "狗", range(1, 2)),
        (["New", "ĠYork", "Ġcity"], "New York", range(2)),
    ],
    ids=lambda one: one if isinstance(one, str) else None,
)
def test_which_tokens_a_word_has(tokens, word, place):
    assert locate(word, tokens) == place


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("the", r"occur once in the text; got 'the' at tokens 0, 3.*\nHint: name one by its token: 3"),
        ("dog", "'dog', which does not"),
        ("at", "'at', which does not"),
        ("", "'', which does not"),
    ],
)
def test_a_word_that_is_not_there_once_is_refused(word, told):
    with pytest.raises(ValueError, match=told):
        locate(word, ["the", "Ġc", "at", "Ġthe"])


def test_what_is_no_text_is_refused():
    with pytest.raises(TypeError, match="locate: word must be a string; got int"):
        locate(3, ["a"])
    with pytest.raises(TypeError, match="locate: tokens must be a list of strings; got str"):
        locate("a", "a text")
