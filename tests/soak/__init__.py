"""Thousands of random attempts to break the package, in one resumable run. docs/reliability.md shows the counts."""
