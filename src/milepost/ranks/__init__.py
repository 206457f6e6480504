"""Several processes that write one run: what they tell each other, and never through the training.

Nothing here uses the collectives of the training. A background thread that took part in them would
stop the training, or be stopped by it, whenever one of the two is late.
"""
