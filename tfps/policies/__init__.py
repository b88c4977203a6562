"""Modes and places of updates, one object each; see policy.py."""
