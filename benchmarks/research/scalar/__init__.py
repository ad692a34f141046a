"""Codes that may beat scalar quantization: trellises, a lattice, widths per channel, prediction and a second gain."""
