"""What segmentation and detection share: backbones, loaders, weights files, colours."""
