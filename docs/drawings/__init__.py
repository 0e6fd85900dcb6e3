"""Drawings of the documentation. ``python docs/generate.py`` writes them to docs/assets."""
