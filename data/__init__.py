"""Images on their way to the device: sources, decoding, augmentation, and the order in which they come."""
