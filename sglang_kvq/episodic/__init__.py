"""Conversations longer than what a request attends to. Imports neither SGLang nor torch."""
