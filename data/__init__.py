"""Sources of images, decoding, augmentation, the order of images, reading ahead, mixing on devices.

`base.Image` has a size, and its pixels are requested by box: a box is drawn before anything is
decoded, by one function for both readers. Micro batches are channels-last in memory, as decoders
and resizing produce them; the cast on the device makes planes in the same pass. Mixing gives
float32 images from 0 to 255, which the model also accepts.
"""
