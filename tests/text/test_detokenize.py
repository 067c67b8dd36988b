"""Tokens are spelled readably for every kind of vocabulary, and none is lost."""

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from saccade.text import spelled
from saccade.text.detokenize import is_special

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
ANY = st.text(min_size=1)


def pieces_of(text):
    return [piece for piece, _ in BYTES.pre_tokenize_str(text)]


def is_told(text):
    """Return whether a text shows how its bytes are written."""
    return " " in text or "\n" in text or not text.isascii()


def parts_of(text):
    """Return the spelling of each byte: a character of several bytes is shown for each of them, with a number."""
    shown = []
    for character in text:
        count = len(character.encode())
        shown += [character] if count == 1 else [f"{character}({own + 1}/{count})" for own in range(count)]
    return shown


@pytest.mark.ci
@given(ANY)
@example("你好，世界")
@example("naïve")
@example("    return 1\n\n\tx")
@example("Ġ▁##")
@example("\u00ad\u00a0\x7f ")
def test_pieces_of_bytes_are_the_text_again(text):
    assume(is_told(text))
    assert "".join(spelled(pieces_of(text))) == text


@given(ANY)
@example("한국어 a 🎉")
def test_each_byte_shows_its_character(text):
    assume(is_told(text))
    assert list(spelled([letter for piece in pieces_of(text) for letter in piece])) == parts_of(text)


@given(st.lists(st.text(alphabet=LETTERS, min_size=1), min_size=1))
def test_bytes_that_make_no_characters_are_named(tokens):
    shown = spelled(["Ġ", *tokens])
    assert len(shown) == len(tokens) + 1
    "".join(shown).encode()  # no half of a character is left


@given(st.lists(st.text(), max_size=8))
@example(["Ġ", "<0x80>", "▁"])
@example(["Ġa", "\ud800"])
@example(["▁", "\ud800", "<0xED>", "<0xA0>"])
@example(["##", "###", "[CLS]"])
@example([""])
@example([])
def test_there_are_as_many_as_before(tokens):
    assert len(spelled(tokens)) == len(tokens)
    assert all(isinstance(own, str) for own in spelled(tuple(tokens)))


@given(st.lists(st.tuples(st.characters(exclude_characters="▁", codec="utf-8"), st.booleans()), min_size=1))
def test_bytes_of_sentencepiece_make_characters(given_characters):
    tokens, shown = [], []
    for character, is_bytes in given_characters:
        tokens += [f"<0x{byte:02X}>" for byte in character.encode()] if is_bytes else [character.replace(" ", "▁")]
        shown += parts_of(character) if is_bytes else [character]
    assert list(spelled(["▁", *tokens])) == [" ", *shown]


@pytest.mark.parametrize(
    "tokens, shown",
    [
        (["<s>", "▁The", "▁cat", "'", "s"], ["<s>", " The", " cat", "'", "s"]),
        (["[CLS]", "the", "cat", "##s", ".", "[SEP]"], ["[CLS]", " the", " cat", "s", " .", "[SEP]"]),
        (["The", "Ġcat", "<|im_end|>", "Ċ"], ["The", " cat", "<|im_end|>", "\n"]),
        (["<｜begin▁of▁sentence｜>", "ä½łå¥½", "ä¸ĸ"], ["<｜begin▁of▁sentence｜>", "你好", "世"]),
        (["Ġif", "        ", "Ġx"], [" if", "        ", " x"]),  # spaces that were added to the vocabulary
        (["Ġa", "ä½", "<|x|>", "ł"], [" a", r"\xe4\xbd", "<|x|>", r"\xa0"]),
        (["ł", "å¥½", "ä¸"], [r"\xa0", "好", r"\xe4\xb8"]),  # cut out of the middle of a text
        (["▁a", "<0xE4>", "<0xBD>", "b"], [" a", r"\xe4", r"\xbd", "b"]),
        (["Ġ", "Ġä½", "łx"], [" ", " 你x(1/2)", "你x(2/2)"]),
        (["caf", "é"], ["caf", "é"]),
        (["był", "łódź"], ["był", "łódź"]),
        (["naïve", "Ñandú"], ["naïve", "Ñandú"]),
        (["你", "好"], ["你", "好"]),
        (["a", "b"], ["a", "b"]),
        (["##", "x"], ["##", "x"]),
    ],
)
def test_known_forms(tokens, shown):
    assert list(spelled(tokens)) == shown


@pytest.mark.parametrize(
    "token", ["[CLS]", "[unused1]".upper(), "<s>", "</s>", "<|endoftext|>", "<｜User｜>", "<pad>", "<start_of_turn>"]
)
def test_special_tokens_are_known(token):
    assert is_special(token)
    assert spelled(["Ġa", token, "b"])[1] == token
    assert spelled(["▁a", token, "b"])[1] == token


@pytest.mark.parametrize("token", ["[", "[cls]", "<div>", "s>", "<|", "hello", ""])
def test_other_tokens_are_not_special(token):
    assert not is_special(token)
