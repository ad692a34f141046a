"""Calibrated rotations, which ``rotations.storage.zoo`` finds."""
