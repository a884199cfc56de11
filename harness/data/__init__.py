"""From a name in the config to one sample's pixels: storage, decoding, geometry."""
