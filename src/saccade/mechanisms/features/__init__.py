"""What Linear and Performer share: sums over keys of features, which never meet pair by pair."""

__all__: list[str] = []
