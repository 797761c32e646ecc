"""Benchmarks: `make bench-...`; they write JSON into runs/bench/."""
