"""Models of packages on PyPI, each file for one package or a family of them."""
