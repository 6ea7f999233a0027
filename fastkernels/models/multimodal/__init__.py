"""Language models that read images, too."""
