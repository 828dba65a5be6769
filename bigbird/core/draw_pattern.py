"""Command: draws the attention pattern that the flags describe as a PNG.

bigbird-draw-pattern --max_encoder_length=2048 --block_size=64 --pattern_file=pattern.png
"""

from __future__ import annotations

import numpy as np

from bigbird.core import flags
from bigbird.core.block_layout import BlockLayout, input_layout, model_layout

FLAGS = flags.FLAGS


def draw_layout(layout: BlockLayout, path: str, head: int = 0) -> None:
    """Draws which key blocks each query block of one head sees, and how often it counts them."""
    # Imported here because only drawing needs it.
    from matplotlib.figure import Figure

    seen = layout.multiplicity()[head]
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(seen, cmap="Blues", vmin=0, vmax=max(2, seen.max()), interpolation="none")
    axes.set(
        xlabel="key block",
        ylabel="query block",
        title=f"{layout.num_blocks} blocks of {layout.block_size} tokens, head {head}: "
        f"{np.count_nonzero(seen) / seen.size:.0%} of all pairs",
    )
    figure.colorbar(image, ticks=range(max(2, seen.max()) + 1), shrink=0.7, label="times counted")
    figure.savefig(path, dpi=120)


def main(_):
    """Draws the pattern of `--layer` and `--head` to `--pattern_file`."""
    config = flags.model_config()
    choose = model_layout if config.pattern_length == "model" else input_layout
    length = config.max_encoder_length + -config.max_encoder_length % config.block_size
    layout = choose(
        length,
        config.block_size,
        config.num_rand_blocks,
        config.num_attention_heads,
        seed=FLAGS.layer,
        options=config.pattern,
    )
    if layout is None:
        raise ValueError(
            f"max_encoder_length={length} with block_size={config.block_size} is attended in full: "
            "there is no pattern to draw; take a longer input or smaller blocks."
        )
    if not 0 <= FLAGS.head < config.num_attention_heads:
        raise ValueError(
            f"--head={FLAGS.head}: expected 0 to {config.num_attention_heads - 1}, below "
            "--num_attention_heads."
        )
    draw_layout(layout, FLAGS.pattern_file, FLAGS.head)
    print(f"Drew {FLAGS.pattern_file}.")


def define_flags():
    """Defines the flags of this command."""
    flags.DEFINE_integer("max_encoder_length", 4096, "Tokens of a document, at most.")
    flags.DEFINE_integer("layer", 0, "Layer whose pattern is drawn.")
    flags.DEFINE_integer("head", 0, "Head whose pattern is drawn.")
    flags.DEFINE_string("pattern_file", "pattern.png", "Image file to write.")


def run():
    """Entry of the installed command."""
    define_flags()
    flags.run(main)


if __name__ == "__main__":
    run()
