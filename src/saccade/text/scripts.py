"""Detect the script that a text is written in."""


def is_mostly_chinese(text: str) -> bool:
    """Return whether more than half of the characters of a text, except spaces, are Chinese."""
    chinese = sum("\u4e00" <= character <= "\u9fff" for character in text)
    return 2 * chinese > sum(not character.isspace() for character in text)
