"""A small GPT learns the source text of Python's standard library, and survives being stopped.

    python examples/chars.py                # press Ctrl-C or kill it at any moment ...
    python examples/chars.py                # ... and start it again: it goes on where it was

The training loop is an ordinary one. What Milepost adds are the four lines marked with "<-".
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import milepost as mp

CONTEXT = 64
WIDTH = 96
HEADS = 4
LAYERS = 2


class Chunks(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text: CONTEXT bytes, and the same moved on by one.

    Shapes:
        item: ([CONTEXT] int64, [CONTEXT] int64)
    """

    def __init__(self, text: bytes) -> None:
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.data) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * CONTEXT
        piece = self.data[start : start + CONTEXT + 1].long()
        return piece[:-1], piece[1:]


class SmallGPT(nn.Module):
    """A decoder-only transformer over bytes.

    Shapes:
        tokens: [batch, CONTEXT] int64 -> logits: [batch, CONTEXT, 256]
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight  # tied: stored once, tied again when loaded
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the byte after each place."""
        hidden = self.tokens(tokens) + self.places.weight
        hidden = self.blocks(hidden, mask=self.mask, is_causal=True)
        return self.head(self.norm(hidden))


def standard_library(max_bytes: int) -> bytes:
    """Return the source text of the standard library's modules, one after the other."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return text[:max_bytes]


def main() -> None:
    """Train, or go on training."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/chars"))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--kilobytes", type=int, default=256, help="how much text to learn")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = SmallGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(
        Chunks(standard_library(1000 * options.kilobytes)), batch_size=32, shuffle=True
    )
    steps = options.epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)

    with mp.Checkpointer(  # <-
        options.folder,
        every=["50ba", "1ep"],
        keep=[mp.KeepLast(2), mp.KeepBest(1, "loss", "min")],
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
    ) as run:
        if run.is_resumed:
            print(f"going on from {run.resumed_from}", flush=True)
        for epoch in run.epochs(options.epochs):  # <-
            for tokens, targets in run.batches(loader):  # <-
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                run.log(loss=loss)  # <-
                if run.timer.batch % 25 == 0:
                    print(
                        f"epoch {epoch}, batch {run.timer.batch} of {steps}: {loss:.3f}", flush=True
                    )


if __name__ == "__main__":
    main()
