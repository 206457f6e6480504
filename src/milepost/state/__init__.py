"""What is saved: capture and restore of models, optimizers, loaders, generators, user objects."""
