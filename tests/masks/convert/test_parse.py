"""Masks from text: the same as those made by hand, and a sentence that points at what is wrong."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade import masks
from saccade.masks import Causal, Documents, Full, Global, Mask, Padding, Prefix, Strided, Window, parse
from saccade.testing.cases import CASES

SAID = {
    "causal": Causal(),
    "causal()": Causal(),
    "full": Full(),
    "window(4, 0)": Window(4, 0),
    "window(4, 2)": Window(4, 2),
    "window(4)": Window(4, 4),
    "window(0004)": Window(4, 4),
    f"window({'0' * 5000}4)": Window(4, 4),
    "sliding(5)": masks.from_sliding_window(5),
    "documents(128, 200)": Documents([128, 200]),
    "documents(3)": Documents([3]),
    "padding(5, 7)": Padding([5, 7]),
    "prefix(10)": Prefix(10),
    "global(0, 5)": Global([0, 5]),
    "strided(4)": Strided(4),
    "streaming(4, 1024)": masks.streaming(4, 1024),
    "longformer(256)": masks.longformer(256),
    "longformer(256, 0)": masks.longformer(256, [0]),
    "longformer(256, 3, 9)": masks.longformer(256, [3, 9]),
    "causal | prefix(3) & window(1, 1)": Causal() | (Prefix(3) & Window(1, 1)),
    "prefix(3) & window(1, 1) | causal": (Prefix(3) & Window(1, 1)) | Causal(),
    "(causal | prefix(3)) & window(1, 1)": (Causal() | Prefix(3)) & Window(1, 1),
    "~causal & full": ~Causal() & Full(),
    "~(causal & full)": ~(Causal() & Full()),
    "~~causal": Causal(),
    "~~~causal": ~Causal(),
    "causal & full & prefix(1)": Causal() & Full() & Prefix(1),
    "causal|full|prefix(1)": Causal() | Full() | Prefix(1),
    " \n causal\t&window ( 4 ,0 ) ": Causal() & Window(4, 0),
    "(" * 64 + "causal" + ")" * 64: Causal(),
    "&".join(["causal"] * 5000): masks.And((Causal(),) * 5000),
    "~" * 5000 + "causal": Causal(),
}
KNOWN = r"\nHint: use causal, full, window, sliding, .*, longformer$"
WRONG = {
    "": r"have a mask here; got the end\.",
    "   ": r"have a mask here; got the end\.",
    "causal &": r"have a mask here; got the end\.\n    causal &\n            \^",
    "& causal": r"have a mask here; got &\.\n    & causal\n    \^",
    "3": r"have a mask here; got 3\.",
    "causal and full": r"continue with & or \|, or end; got and\.\n    causal and full\n           \^",
    "causal full": r"continue with & or \|, or end; got full\.",
    "causal)": r"continue with & or \|, or end; got \)\.",
    "causal ** 2": r"continue with & or \|, or end; got \*\.",
    "causal & windw(2)": r"name known masks; got windw\.\n    causal & windw\(2\)\n             \^" + KNOWN,
    "Causal": r"name known masks; got Causal\.",
    "窗口(3)": r"name known masks; got 窗口\.",
    "__import__('os')": r"name known masks; got __import__\.",
    "(causal": r"close each bracket with \); got the end\.\n    \(causal\n           \^",
    "(causal full)": r"close each bracket with \); got full\.",
    "window(4": r"continue with a comma or close the bracket with \); got the end\.",
    "window(4 0)": r"continue with a comma or close the bracket with \); got 0\.",
    "window(": r"have a whole number here; got the end\.",
    "window(4,)": r"have a whole number here; got \)\.",
    "window(-1)": r"have a whole number here; got -\.\n    window\(-1\)\n           \^",
    "window(1.5)": r"continue with a comma or close the bracket with \); got \.\.",
    "window(٣)": r"have a whole number here; got ٣\.",
    "window(causal)": r"have a whole number here; got causal\.",
    "window("
    + "9" * 5000
    + ")": r"contain numbers of at most 19 digits; got 9{32}\.\.\.\.\n    window\(9{32}\.\.\.\n           \^$",
    "causal & prefix(9999999999999999999)": r"contain numbers that the mask accepts; got "
    r"prefix\.\n.*\n {13}\^\n    Prefix:",
    "window": r"contain numbers that the mask accepts; got window\.(.|\n)*Hint: write window\(left, right\) or",
    "window(1, 2, 3)": r"contain numbers that the mask accepts; got window\.(.|\n)*must be at most 2",
    "causal(3)": r"contain numbers that the mask accepts; got causal\.(.|\n)*Hint: write causal$",
    "full(3)": r"contain numbers that the mask accepts; got full\.(.|\n)*Hint: write full$",
    "prefix": r"contain numbers that the mask accepts; got prefix\.(.|\n)*Hint: write prefix\(length\)",
    "sliding": r"contain numbers that the mask accepts; got sliding\.(.|\n)*Hint: write sliding\(window\)",
    "sliding(0)": r"contain numbers that the mask accepts; got sliding\.(.|\n)*an int of at least 1; got 0",
    "strided(0)": r"contain numbers that the mask accepts; got strided\.(.|\n)*Strided: "
    r"step must be an int of at least 1",
    "streaming(4)": r"contain numbers that the mask accepts; got streaming\.(.|\n)*streaming: window must be given",
    "longformer": r"contain numbers that the mask accepts; got longformer\.(.|\n)*longformer: each_side must be given",
    "documents": r"contain numbers that the mask accepts; got documents\.(.|\n)*not be empty; got none",
    "documents(4000000000)": r"contain numbers that the mask accepts; got documents\.(.|\n)*add up to less than",
    "padding": r"contain numbers that the mask accepts; got padding\.(.|\n)*contain a length for each batch item",
    "causal | padding(1, 2) & padding(1, 2, 3)": r"join masks that fit together; got "
    r"padding\.\n.*\n {13}\^\n.*\[2, 3\]",
    "causal & \x1b[31m": r"have a mask here; got \\x1b\.\n    causal & \\x1b\[31m\n             \^",
    "causal\x00": r"continue with & or \|, or end; got \\x00\.",
    "causal & \u202efull": r"have a mask here; got \\u202e\.",
    "causal \x1c & \x1c windw": r"name known masks; got windw\.\n    causal \\x1c & \\x1c windw\n {23}\^",
    "(" * 65 + "causal" + ")" * 65: r"nest at most 64 brackets",
    "(" * 100_000: r"nest at most 64 brackets",
}


@pytest.mark.parametrize("text", SAID, ids=lambda text: text[:40])
def test_text_says_the_mask_made_by_hand(text: str) -> None:
    assert parse(text) == SAID[text]


@pytest.mark.parametrize("text", WRONG, ids=lambda text: ascii(text[:40]))
def test_syntax_errors_point_at_the_place(text: str) -> None:
    with pytest.raises(ValueError, match=r"^parse: text must " + WRONG[text]) as refused:
        parse(text)
    assert str(refused.value).replace("\n", "").isprintable()
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("text", [None, b"causal", 3, Causal()], ids=str)
def test_text_is_text(text: Any) -> None:
    with pytest.raises(TypeError, match=r"^parse: text must be a string; got"):
        parse(text)


MASKS = {str(case.mask): case.mask for case in CASES if case.mask is not None}
UNREADABLE = {text: mask for text, mask in MASKS.items() if re.search(r"Dense\(|Predicate\(", text)}


@pytest.mark.parametrize("text", [text for text in MASKS if text not in UNREADABLE], ids=lambda text: text[:60])
def test_a_printed_mask_is_read(text: str) -> None:
    assert parse(text) == MASKS[text]
    assert parse(f"~({text})") == ~MASKS[text]


def test_every_mask_is_read_as_it_is_printed() -> None:
    kinds = [getattr(masks, name) for name in masks.__all__]
    kinds = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Mask)]
    names = {kind.__name__ for kind in kinds} - {"Mask", "And", "Or", "Not", "After"}  # those are printed as signs
    assert names == {name for text in MASKS for name in re.findall(r"\b([A-Z]\w+)\(", text)}


@pytest.mark.parametrize("text", UNREADABLE)
def test_masks_that_print_a_part_of_their_contents_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"text must contain masks that print all of their contents; got (Dense|Pred)"):
        parse(text)


PRINTED = {
    "Causal() & Window(255, 0)": Causal() & Window(255, 0),
    "Global([0, 5], seen=False) | causal": Global([0, 5], seen=False) | Causal(),
    "(~Causal()).after(2).after(1)": (~Causal()).after(2).after(1),
    "Documents((3, 4), rule=((Causal() | prefix(2))))": Documents([3, 4], rule=Causal() | Prefix(2)),
    "PerItem((Causal(), ~(full)))": masks.PerItem([Causal(), ~Full()]),
    "PerItem(((Causal()), (prefix(2) | Window(1, 0)) & full))": masks.PerItem(
        [Causal(), (Prefix(2) | Window(1, 0)) & Full()]
    ),
    'Padding((5,), side="left", padded_len=9,)': Padding([5], side="left", padded_len=9),
}


@pytest.mark.parametrize("text", PRINTED)
def test_python_arguments_are_read(text: str) -> None:
    assert parse(text) == PRINTED[text]


WRONG_ARGUMENTS = {
    "Window(4": r"continue with a comma or close the bracket with \); got the end\.",
    "Window(4,": r"have a mask here; got the end\.",
    "Window(left=)": r"have a mask here; got \)\.",
    "Window(lefft=4)": r"contain numbers that the mask accepts; got Window\.(.|\n)*lefft",
    "Window(2.5, 0)": r"continue with a comma or close the bracket with \); got \.\.",
    "Window(-x, 0)": r"have a whole number here; got x\.",
    "Window(__import__('os'))": r"name known masks; got __import__\.",
    "Global([0)": r"continue with a comma or close the bracket with \]; got \)\.",
    "Global(positions=(causal, 0))": r"contain numbers that the mask accepts; got Global\.(.|\n)*\(Causal\(\), 0\)",
    "Global((3))": r"have a mask here; got 3\.",
    "Window(left=4, right=0, right=1)": r"give each argument once; got right\.\n(.|\n)*\n {28}\^$",
    "Window(right=0, 4)": r"name every argument after a named one; got 4\.",
    "Window(4)": r"contain numbers that the mask accepts; got Window\.(.|\n)*Hint: write Window\(left, right\)$",
    "Padding((3,), side='middle')": r"contain numbers that the mask accepts; got Padding\.(.|\n)*side",
    "Padding((3,), side='left)": r"have a mask here; got '\.",
    "Causal().after": r"have a bracket here; got the end\.",
    "Causal().before(2)": r"continue with & or \|, or end; got \.\.",
    "Causal().after(-2)": r"contain numbers that the mask accepts; got after\.",
    "Mask()": r"name known masks; got Mask\.",
    "Global(" + "(" * 100_000: r"nest at most 64 brackets",
    "Documents(lengths=" + "[" * 100_000: r"nest at most 64 brackets",
}


@pytest.mark.parametrize("text", WRONG_ARGUMENTS, ids=lambda text: text[:40])
def test_wrong_arguments_are_pointed_at(text: str) -> None:
    with pytest.raises(ValueError, match=r"^parse: text must " + WRONG_ARGUMENTS[text]) as refused:
        parse(text)
    assert len(str(refused.value)) < 500


def _joined(inner: st.SearchStrategy[tuple[str, Mask]]) -> st.SearchStrategy[tuple[str, Mask]]:
    pair = st.tuples(inner, inner)
    return st.one_of(
        pair.map(lambda ab: (f"({ab[0][0]}) & ({ab[1][0]})", ab[0][1] & ab[1][1])),
        pair.map(lambda ab: (f"({ab[0][0]})|({ab[1][0]})", ab[0][1] | ab[1][1])),
        inner.map(lambda a: (f"~({a[0]})", ~a[1])),
    )


NAMES = ["causal", "full", "window(3, 1)", "prefix(2)", "global(0, 4)", "strided(3)", "documents(4, 5)"]


@settings(deadline=None)
@given(st.recursive(st.sampled_from(NAMES).map(lambda text: (text, parse(text))), _joined, max_leaves=8))
def test_any_formula(drawn: tuple[str, Mask]) -> None:
    text, mask = drawn
    assert parse(text) == mask


@settings(deadline=None)
@given(st.recursive(st.sampled_from(NAMES), lambda inner: st.tuples(inner, st.sampled_from("&|"), inner).map("".join)))
def test_signs_bind_as_in_python(text: str) -> None:
    made = {name.split("(")[0]: parse(name) for name in NAMES}
    python = text
    for name in NAMES:
        python = python.replace(name, name.split("(")[0].replace("global", "globals_"))
    made["globals_"] = made.pop("global")
    assert parse(text) == eval(python, {"__builtins__": {}}, made)


@settings(deadline=None)
@given(st.text(st.sampled_from("causlwindo()&|~, 0129\x1b\n窗"), max_size=30))
def test_any_other_text_is_refused_in_a_sentence(text: str) -> None:
    try:
        found: object = parse(text)
    except ValueError as error:
        found = str(error)
    assert isinstance(found, Mask) or str(found).startswith("parse: text must ")


def test_brackets_are_counted_one_inside_the_other() -> None:
    assert parse(" & ".join(["(causal)"] * 100)) == masks.And((Causal(),) * 100)
    assert parse("(" * 64 + "causal" + ")" * 64) == Causal()
    with pytest.raises(ValueError, match="nest at most 64 brackets"):
        parse("(" * 65 + "causal" + ")" * 65)
    with pytest.raises(ValueError, match="nest at most 64 brackets"):
        parse("(causal) & " * 3 + "(" * 65 + "causal" + ")" * 65)
    with pytest.raises(ValueError, match="nest at most 64 brackets"):
        parse("(" * 40 + "(causal) & " + "(" * 40 + "causal" + ")" * 80)
    assert parse("(causal) & " + "(" * 64 + "full" + ")" * 64) == Causal() & Full()
