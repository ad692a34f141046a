"""Rotations on disk and on the hub: reads and writes folders in two layouts, and finds a model's rotations."""
