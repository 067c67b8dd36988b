"""What the attention of published language models uses, counted over the configurations of transformers."""
