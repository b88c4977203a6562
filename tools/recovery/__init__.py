"""Jobs whose processes are killed, stopped and started again, for tools/benchmarks/recovery.py."""
