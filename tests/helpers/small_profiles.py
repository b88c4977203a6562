"""Profiles of models so small that one can compute by hand what a simulation must say of them."""

from __future__ import annotations

from tools.model_profiles import Layer, Profile

MB = 1_000_000


def profile(*layers: tuple[float, float, int]) -> Profile:
    """Layers (forward_s, backward_s, nbytes) named a, b, c..."""
    return Profile("test", tuple(Layer(chr(97 + i), *layer) for i, layer in enumerate(layers)), "made for a test")


TWO_LAYERS = profile((1.0, 0.5, MB), (1.0, 0.5, 2 * MB))
