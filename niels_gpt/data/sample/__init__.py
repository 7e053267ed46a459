"""A small corpus written for this project, in the mirror layout; `python -m tools.sample.generate` writes its files."""
