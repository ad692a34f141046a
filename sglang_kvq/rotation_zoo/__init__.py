"""Calibrated rotations and their registry; imported as ``sglang_kvq.rotation_zoo``."""
