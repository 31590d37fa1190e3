"""Detection and instance segmentation: models, COCO data, average precision."""
