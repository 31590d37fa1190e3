"""What can be trained: one folder for each task, with its configuration, data, model, losses and evaluation."""
