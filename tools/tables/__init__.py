"""Jobs that train embeddings whose rows live on pservers, and their peers, for tools/benchmarks/tables.py."""
