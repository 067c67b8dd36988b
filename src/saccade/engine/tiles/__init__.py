"""Operations on tiles: compute the scores of a tile, split tiles, and multiply grouped heads."""

__all__: list[str] = []
