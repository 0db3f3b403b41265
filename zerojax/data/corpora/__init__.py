"""Corpora as people publish them: other columns, several files with weights, larger than memory."""
