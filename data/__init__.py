"""Sources of images, decoding, augmentation, the order of images, reading ahead, mixing on the device.

`base.Image` stands between sources and transforms: its size is known and its pixels are requested by box, so a box is
drawn before anything is decoded, and both readers get the box from the same function. Micro batches are channels-last
in memory, as decoders and resizing produce them; the cast on the device makes planes in the same pass. In a worker
that would cost as much as resizing. Mixing gives float32 images of 0 to 255, which the model's first block accepts as
well as uint8.
"""
