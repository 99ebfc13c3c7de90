"""A picture of the ranks' loads by step, before and after replication."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from training import FreeRun

NO_MATPLOTLIB = (
    "--picture needs matplotlib; run: .venv/bin/pip install -c constraints.txt -e '.[examples]'"
)


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_loads(run: FreeRun, path: Path) -> None:
    """Write a picture to ``path``: a line for each rank, a column for each layer."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    before, after = torch.stack(run.at_home), torch.stack(run.computed)  # [steps, layers, G]
    layers, ranks = before.shape[1:]
    figure, axes = plt.subplots(
        2, layers, figsize=(1 + 4 * layers, 5.6), sharex=True, sharey=True, squeeze=False
    )
    for row, (rows, text) in enumerate(
        ((before, "experts at home only"), (after, "with replicas"))
    ):
        relative = rows / rows.mean(2, keepdim=True)
        for layer in range(layers):
            axis = axes[row][layer]
            for rank in range(ranks):
                axis.plot(relative[:, layer, rank], label=f"rank {rank}", linewidth=1.2)
            axis.set_title(f"MoE layer {layer}, {text}", fontsize=10)
            axis.grid(alpha=0.3)
            axis.set_ylim(bottom=0)
        axes[row][0].set_ylabel("tokens of a rank / mean")
    for axis in axes[-1]:
        axis.set_xlabel("step")
    axes[0][-1].legend(fontsize=8, ncols=2, loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
