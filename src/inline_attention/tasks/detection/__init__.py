"""Detection and instance segmentation: models, COCO and YOLO data, average precision."""
