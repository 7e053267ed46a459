"""A small corpus written for this project, in the mirror layout; `generate` makes its files again, byte for byte."""
