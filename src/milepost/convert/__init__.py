"""Import and export of other checkpoint files. The only package that may read a pickle."""
