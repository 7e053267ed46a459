"""Rows without padding: which pieces share a row, and how attention keeps them apart."""
