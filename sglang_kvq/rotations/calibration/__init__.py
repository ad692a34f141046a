"""Rotations, clip ratios and sensitivities measured on a model and a text. Needs transformers."""
