"""The same small Keras programs under several strategies: see tools/compare_strategies.py."""
