"""Every language model of the installed transformers, small and random, held against the claims of an audit."""
