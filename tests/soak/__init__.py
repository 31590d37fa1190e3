"""The counts of docs/reliability.md: thousands of random attempts to break the package, in one resumable run."""
