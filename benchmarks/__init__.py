"""Benchmarks: `python -m benchmarks [NAME ...] [--json FILE] [--quick]`; each module has `run(quick) -> list[Row]`."""
