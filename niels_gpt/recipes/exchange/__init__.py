"""Caches from and to other tools: what `import` makes of a folder, and exports as recipes."""
