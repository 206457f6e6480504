"""Train, be killed twice, go on, and prove that nothing was lost.

    python examples/demo.py

A small network with dropout learns scikit-learn's handwritten digits. One training runs without
interruption. Another is killed with SIGKILL in the middle of a save, started again, killed in the
middle of an epoch, and started again. At the end everything that the two trainings consist of is
compared bit for bit: weights, optimizer, schedule, random generators, and the loss of every batch.
Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EPOCHS = 6
DEADLINE_S = 300.0


def train(folder: Path) -> None:
    """Train for 6 epochs, from wherever the run in the folder stands."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import milepost as mp

    class LossHistory(mp.Callback):
        """Keeps the loss of every batch; part of every checkpoint."""

        def __init__(self) -> None:
            self.losses: list[float] = []

        def batch_end(self, state: mp.State) -> None:
            self.losses.append(float(state.loss))

        def state_dict(self) -> dict[str, Any]:
            return {"losses": self.losses}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.losses = state_dict["losses"]

    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    torch.manual_seed(17)
    model = nn.Sequential(
        nn.Linear(64, 1536), nn.ReLU(), nn.Dropout(0.3),
        nn.Linear(1536, 1536), nn.ReLU(), nn.Dropout(0.3),
        nn.Linear(1536, 10),
    )  # fmt: skip
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = EPOCHS * len(loader)
    trainer = mp.Trainer(
        model=model,
        loss_fn=nn.functional.cross_entropy,
        train_dataloader=loader,
        optimizers=optimizer,
        schedulers=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        step_schedulers_every="batch",
        callbacks=LossHistory(),
        max_duration=f"{EPOCHS}ep",
        seed=17,
        save_folder=folder,
        save_interval=["1ep", "10ba"],
        keep=[mp.KeepLast(3), mp.KeepEvery("2ep")],
        resume="auto",
    )
    trainer.fit()


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the training of a folder in a process of its own."""
    return subprocess.Popen([sys.executable, __file__, "--train", str(folder)])  # noqa: S603


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for a training to end well."""
    if process.wait(timeout=DEADLINE_S) != 0:
        sys.exit(f"A training ended with exit code {process.returncode}.")


def kill_when(process: subprocess.Popen[bytes], is_time: Any, what: str) -> None:
    """Send SIGKILL at the moment that a look at the folder asks for."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_time():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            sys.exit(f"The training ended before it could be killed {what}.")
    process.send_signal(signal.SIGKILL)
    process.wait()
    print(f"\n>>> killed with SIGKILL {what}\n", flush=True)


def is_writing(folder: Path, after: str) -> bool:
    """Return whether a checkpoint newer than ``after`` is half written."""
    if not (folder / after / "manifest.json").exists():
        return False
    return any(
        not (claim.parent / "manifest.json").exists()
        and not (claim.parent / "deleted.json").exists()
        and any(claim.parent.glob("*.safetensors"))
        for claim in folder.glob("ba*/attempt.json")
    )


def run_cli(*arguments: str) -> None:
    """Run the command line tool of this environment."""
    command = [sys.executable, "-m", "milepost.cli.app", *arguments]
    print(f"\n$ milepost {' '.join(arguments)}", flush=True)
    subprocess.run(command, check=True)  # noqa: S603


def differences(straight: Path, broken: Path) -> list[str]:
    """Compare the last checkpoints of two runs bit for bit and return what differs."""
    import milepost as mp
    from milepost.testing.asserts import first_difference

    states = []
    for folder in (straight, broken):
        latest = mp.open_run(folder).latest()
        if latest is None or not latest.is_final:
            return [f"{folder} has no final checkpoint"]
        states.append(latest.load())
    one, other = states
    for state in states:
        del state["state"]["timer"]["wall_s"]  # the only thing that may differ
    found = []
    for name in ("model", "optimizers", "schedulers", "callbacks", "loader", "timer"):
        first = first_difference(one["state"][name], other["state"][name])
        print(f"  {name:<12} {'equal, bit for bit' if first is None else first}")
        found += [] if first is None else [f"{name}: {first}"]
    first = first_difference(one["rng"], other["rng"])
    print(f"  {'rng':<12} {'equal, bit for bit' if first is None else first}")
    found += [] if first is None else [f"rng: {first}"]
    losses = one["state"]["callbacks"]["LossHistory"]["losses"]
    print(f"  {len(losses)} losses, from {losses[0]:.4f} to {losses[-1]:.4f}")
    return found


def main() -> None:
    """Run the whole demonstration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=Path, metavar="FOLDER", help="only train, in this folder")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the runs here")
    options = parser.parse_args()
    if options.train is not None:
        train(options.train)
        return

    base = options.keep or Path(tempfile.mkdtemp(prefix="milepost-demo-"))
    straight, broken = base / "straight", base / "killed-twice"
    try:
        print("A training without interruption:", flush=True)
        finish(start(straight))

        print("\nThe same training, killed twice:", flush=True)
        process = start(broken)
        kill_when(process, lambda: is_writing(broken, after="ba20"), "in the middle of a save")
        process = start(broken)
        mid_epoch = broken / "ba70" / "manifest.json"
        kill_when(process, mid_epoch.exists, "in the middle of epoch 3")
        finish(start(broken))

        print("\nThe two trainings at their end:")
        found = differences(straight, broken)
        run_cli("ls", str(broken))
        if found:
            sys.exit("The trainings differ: " + "; ".join(found))
        print("\nThe run that was killed twice equals the one that was not, bit for bit.")
    finally:
        if options.keep is None:
            shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
