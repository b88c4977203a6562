"""A differential tester: random Keras programs under tfps beside plain Keras; see tools/fuzz_programs.py."""
