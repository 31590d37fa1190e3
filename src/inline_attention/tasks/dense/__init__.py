"""Segmentation and detection on the registered backbones: heads, data, metrics, and their tasks for the loop."""
