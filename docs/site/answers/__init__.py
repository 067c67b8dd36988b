"""Answers of the library about masks, inputs, kernels, mechanisms and caches, for the tables of capabilities.md."""
