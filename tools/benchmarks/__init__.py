"""The benchmarks that tools/bench.py runs, one module each."""
