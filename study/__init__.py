"""The paper's argument on a small scale: probes of one layer, a grid of trained models, and a report."""
