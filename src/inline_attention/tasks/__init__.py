"""The tasks. Each has a folder with its configuration, data, model, losses and evaluation."""
