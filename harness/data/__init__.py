"""The data room opens data sets, decodes their images and augments them."""
