"""Counts of the attention features of published language models, over the configurations of transformers."""
