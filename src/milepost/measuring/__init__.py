"""What a place can do, what Milepost makes of it, and what checkpoints would cost there."""
