"""What Linformer and Nystrom share: attention by way of a few slots or landmarks that stand for many tokens."""

__all__: list[str] = []
