"""The data package opens datasets, decodes their images and augments them."""
