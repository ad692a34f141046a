"""Rotations outside a process: folders in two layouts, the hub, and which ones belong to a model."""
