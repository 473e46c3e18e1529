"""Draws a trace: when a rank computes, waits and communicates; and memory by the number of ranks."""

from __future__ import annotations

import os
from typing import Any

from streamshard.tools.spans import FOR_GRADS, FOR_OWNERS, FOR_WEIGHTS, Trace, lanes_of

_LOOKS = {  # by activity: color and words
    "cast": ("#c7b95a", "casts weights"),
    "forward": ("#74a9cf", "computes forward"),
    "loss": ("#a6cfe0", "computes the loss"),
    "backward": ("#2b6ca8", "computes backward"),
    "optimizer": ("#b5a8d5", "optimizer"),
    FOR_WEIGHTS: ("#d62728", "waits for weights"),
    FOR_GRADS: ("#ff9f1c", "waits for gradients"),
    FOR_OWNERS: ("#8c564b", "waits for whole parameters"),
    "all_gather": ("#3a9d5d", "all-gather"),
    "reduce_scatter": ("#7f4fa3", "reduction"),
    "all_reduce": ("#b07cc6", "average over replicas"),
    "flags": ("#999999", "which gradients exist"),
    "all_to_all": ("#a0785a", "exchange of whole parameters"),
    "copy": ("#bcbd22", "copies between host and device"),
    "step": ("#9467bd", "optimizer, a chunk"),
    "norms": ("#7f7f7f", "norms"),
}
_WIDTH_IN, _LETTER_IN = 15.0, 0.11
_SPANS_WITH_EDGES = 200  # of a lane with more, white edges would hide the spans


def draw(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Draw `trace`. The suffix of `path` is the format, such as ".png"."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = lanes_of(trace)
    figure: Any = Figure((_WIDTH_IN, 1.8 + 0.4 * len(lanes)), dpi=110, layout="constrained")
    title = f"{trace.about}: {trace.summary()['step_s'] * 1e3:.1f} ms a step"
    limits: dict[str, Any] = {"xlim": (0, trace.total_us / 1e3), "ylim": (len(lanes) - 0.5, -0.5)}
    axes = figure.add_subplot(title=title, xlabel="ms", **limits)
    rows = {row: height for height, (row, _) in reversed([*enumerate(lanes)])}  # by the height of the first lane
    axes.set_yticks([*rows.values()], [*rows])
    axes.spines[["left", "right", "top"]].set_visible(False)
    for height, (_, lane) in enumerate(lanes):
        starts, lengths = (
            [span.start_us / 1e3 for span in lane],
            [(span.stop_us - span.start_us) / 1e3 for span in lane],
        )
        edges: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.6 if len(lane) < _SPANS_WITH_EDGES else 0.0}
        colors = [_LOOKS[span.activity][0] for span in lane]
        axes.barh([height] * len(lane), lengths, left=starts, color=colors, **edges)
        for span, start, length in zip(lane, starts, lengths, strict=True):
            label = trace.units[span.unit].rpartition(".")[2] if span.unit else ""
            if len(label) * _LETTER_IN < length * 1e3 / trace.total_us * _WIDTH_IN:
                axes.text(start + length / 2, height, label, ha="center", va="center", fontsize=8, color="white")
    activities = dict.fromkeys(span.activity for span in trace.spans)
    patches = [Patch(color=color, label=words) for color, words in map(_LOOKS.__getitem__, activities)]
    figure.legend(handles=patches, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path)


_SYSTEMS = {"fsdp2": ("FSDP2", "#74a9cf"), "streamshard": ("StreamShard", "#2b6ca8")}
_GPU_GIB = 80e9 / 2**30


def draw_memory(moments: dict[str, dict[str, dict[str, float]]], path: str | os.PathLike[str]) -> None:
    """Draw GiB per rank at each moment of a step, by number of ranks and system. DDP is the same for all of them.

    Args:
        moments: by moment, number of ranks and system.
        path: its suffix is the format, such as ".svg".
    """
    import matplotlib
    from matplotlib.figure import Figure

    figure: Any = Figure((9.0, 3.2), layout="constrained")
    figure.suptitle("Llama 3 8B with AdamW: GiB per rank, without activations", fontsize=12)
    for axes, (moment, computed) in zip(figure.subplots(1, len(moments), sharey=True), moments.items(), strict=True):
        axes.set(title=moment, ylim=(0, 82), yticks=[])
        for place, (system, (words, color)) in enumerate(_SYSTEMS.items()):
            heights = [row[system] for row in computed.values()]
            at = [group + 0.4 * (place - 0.5) for group in range(len(heights))]
            bars = axes.bar(at, heights, width=0.38, color=color, label=words)
            axes.bar_label(bars, [f"{gib:.1f}" for gib in heights], fontsize=8, padding=1)
        axes.axhline(_GPU_GIB, color="#d62728", linestyle="--", linewidth=1, zorder=0, label="a GPU with 80 GB")
        axes.set_xticks(range(len(computed)), [*computed], fontsize=10)
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.tick_params(bottom=False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=11)
    with matplotlib.rc_context({"svg.hashsalt": "streamshard"}):  # the same data give the same file
        figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)
