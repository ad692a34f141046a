"""Effects of rotations and methods on a model: tables, plots, and the divergence of its predictions."""
