"""The data room opens datasets, decodes their images and augments them."""
