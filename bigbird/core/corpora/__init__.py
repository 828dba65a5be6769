"""Where documents come from: an address to records of files, TFDS and the built-in documents."""
