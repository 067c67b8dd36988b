"""Makes the Chinese font that comes with saccade: ``python tests/viz/han_font.py NotoSansSC_400Regular.ttf``."""

import sys
from pathlib import Path

from fontTools.subset import Options, Subsetter
from fontTools.ttLib import TTFont

_FAMILY = "Saccade Han"
_TABLES_OF_LAYOUT = ["GPOS", "GSUB", "BASE", "GDEF", "STAT", "vhea", "vmtx", "prep", "gasp"]


def wanted() -> set[str]:
    """ASCII, signs, kana, the 3,755 commonest characters of Chinese (level 1 of GB 2312), and 熵, entropy."""
    rows = (*range(1, 6), *range(16, 56))
    pairs = (bytes((row + 0xA0, cell + 0xA0)) for row in rows for cell in range(1, 95))
    return {chr(code) for code in range(0x20, 0x7F)}.union(*(pair.decode("gb2312", "ignore") for pair in pairs), "熵")


def main(source: Path, to: Path) -> None:
    """Write the subset under its own name, which the licence lets us give: "Source" alone is reserved."""
    font = TTFont(source)
    options = Options(hinting=False, layout_features=[], drop_tables=[*Options().drop_tables, *_TABLES_OF_LAYOUT])
    options.notdef_outline, options.name_IDs = True, [0, 1, 2, 3, 4, 5, 6, 7, 13, 14]
    subsetter = Subsetter(options)
    subsetter.populate(text="".join(sorted(wanted())))
    subsetter.subset(font)
    for number, name in {1: _FAMILY, 3: "SaccadeHan-Regular", 4: f"{_FAMILY} Regular", 6: "SaccadeHan-Regular"}.items():
        font["name"].setName(name, number, 3, 1, 0x409)
    font["post"].formatType = 3.0  # without the names of glyphs
    font["head"].modified = font["head"].created  # the same bytes each time
    font.recalcTimestamp = False
    font.save(to)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(__file__).parents[2] / "src/saccade/viz/han/SaccadeHan-Regular.ttf")
