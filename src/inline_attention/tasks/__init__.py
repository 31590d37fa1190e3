"""The tasks. Each folder has the configuration, data, model, losses and evaluation of one."""
