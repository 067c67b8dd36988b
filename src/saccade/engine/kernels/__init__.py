"""How a product is run: one kernel a file, and what each computes and holds."""

__all__: list[str] = []
