"""The attention of the field, judged by the laws at small sizes and at the sizes of models."""
