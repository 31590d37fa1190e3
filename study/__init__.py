"""The paper's argument re-made on a small scale: probes of one layer, a grid of trained models, a report of both."""
