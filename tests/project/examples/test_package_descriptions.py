"""Descriptions of packages are read as apt keeps them."""

from pathlib import Path

PATH = Path(__file__).parents[3] / "examples" / "package_descriptions.py"
LISTS = """Package: alpha-doc
Description-md5: 11
Description-en: game of letters - manual
 Alpha is a game.
 It has two
 lines.
 .
 Features:
  * many: letters
    of all kinds
  * few words

Package: beta
Description-md5: 22
Description-en: server
 Serves.
"""


def test_a_list_is_read(example):
    found = example.parsed(LISTS)
    assert list(found) == ["11", "22"]
    alpha = found["11"]
    assert (alpha.package, alpha.family, alpha.summary) == ("alpha-doc", "alpha", "game of letters - manual")
    assert alpha.paragraphs == (
        "Alpha is a game. It has two lines.", "Features:", "* many: letters of all kinds", "* few words",
    )  # fmt: skip
    assert found["22"].paragraphs == ("Serves.",)


def test_translations_stand_beside_their_texts_and_families_are_held_out_whole(example):
    english, german = example.parsed(LISTS), {"22": example.Description("beta", "Server", ("Dient.",))}
    assert example.pairs({"en": english, "de": german}, "de") == [(english["22"], german["22"])]
    names = [f"{family}-{part}" for family in range(2000) for part in ("a", "b")]
    kept = [example.Description(name, "", ()).is_held_out for name in names]
    assert kept[::2] == kept[1::2]
    assert 0.07 < sum(kept) / len(kept) < 0.13
