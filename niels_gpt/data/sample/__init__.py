"""A small corpus written for this project, in the layout of a mirror. Its files are edited by hand."""
