"""Moving the bytes: plan, arena, write and read pipelines, saves on their way."""
