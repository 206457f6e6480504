"""The moments of a training at which callbacks and algorithms are called.

The loop, with every event at its place::

    INIT                                     # at the end of the Trainer's construction
    FIT_START
    while the maximum duration is not reached:
        EPOCH_START                          # not when an epoch is gone on with
        for batch in the loader:
            AFTER_DATALOADER                 # state.batch is the whole batch
            BATCH_START
            BEFORE_TRAIN_BATCH
            for microbatch in batch:         # state.batch is the microbatch
                BEFORE_FORWARD
                outputs = model(batch)
                AFTER_FORWARD
                BEFORE_LOSS
                loss = loss(outputs, batch)
                AFTER_LOSS
                BEFORE_BACKWARD
                backward(loss)
                AFTER_BACKWARD
            optimizer.step()
            AFTER_TRAIN_BATCH
            timer counts the batch; schedulers step, if they step after every batch
            BATCH_END
            evaluate, if due
            BATCH_CHECKPOINT                 # then save, if due
        timer counts the epoch; schedulers step, if they step after every epoch
        EPOCH_END
        evaluate, if due
        EPOCH_CHECKPOINT                     # then save, if due
    FIT_END

    evaluate:
        EVAL_START
        for batch in the evaluator's loader:
            EVAL_BATCH_START
            EVAL_BEFORE_FORWARD
            outputs = model(batch)
            EVAL_AFTER_FORWARD
            EVAL_BATCH_END
        EVAL_END

At each event the algorithms come first, in the order given, then the callbacks. The checkpoint
events come after the evaluation, and the save after the event, so that a checkpoint holds the
fresh metrics and whatever the callbacks did.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["Event"]


class Event(str, Enum):
    """A moment of the training. The value is the name of the callback's method."""

    INIT = "init"
    FIT_START = "fit_start"
    EPOCH_START = "epoch_start"
    AFTER_DATALOADER = "after_dataloader"
    BATCH_START = "batch_start"
    BEFORE_TRAIN_BATCH = "before_train_batch"
    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    BEFORE_LOSS = "before_loss"
    AFTER_LOSS = "after_loss"
    BEFORE_BACKWARD = "before_backward"
    AFTER_BACKWARD = "after_backward"
    AFTER_TRAIN_BATCH = "after_train_batch"
    BATCH_END = "batch_end"
    BATCH_CHECKPOINT = "batch_checkpoint"
    EPOCH_END = "epoch_end"
    EPOCH_CHECKPOINT = "epoch_checkpoint"
    EVAL_START = "eval_start"
    EVAL_BATCH_START = "eval_batch_start"
    EVAL_BEFORE_FORWARD = "eval_before_forward"
    EVAL_AFTER_FORWARD = "eval_after_forward"
    EVAL_BATCH_END = "eval_batch_end"
    EVAL_END = "eval_end"
    FIT_END = "fit_end"

    def __str__(self) -> str:
        return self.value
