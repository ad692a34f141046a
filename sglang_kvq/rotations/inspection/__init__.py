"""What rotations and methods do to a model: tables, pictures and the divergence of its answers."""
