"""Semantic segmentation: heads, data, metrics, and the task for the loop."""
