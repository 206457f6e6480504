"""What is on disk, as pure data. No I/O, no clock, no torch."""
