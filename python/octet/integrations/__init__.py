"""octet inside other libraries, each by one call of `register()`: transformers, diffusers."""
