"""Distillation on real text: four modes from one start, and the speed of a cache against a teacher.

    python -m benchmarks.bench_distillation                  # an hour on two cores
    python -m benchmarks.bench_distillation --parts=speed

`modes` runs `distill.sh` in `runs/benchmarks` (what is there is not done again) and writes
`results/distillation_modes.csv` and `.png`: training loss and held-out divergence from the full
teacher. Of another vocabulary (`--pieces=180`) the files bear its size. `speed` times training
steps beside a teacher with four times the student's parameters and from its cache, turn by turn,
with peak memory in fresh processes: `results/distillation_speed.csv`.
"""

import argparse
import csv
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import tensorflow as tf
import tf_keras as keras
from matplotlib.figure import Figure

from benchmarks import harness
from bigbird.core.config import BigBirdConfig
from bigbird.core.corpora import builtin_documents
from bigbird.distillation.cache import TeacherCache, TeacherCacheWriter
from bigbird.distillation.cache_format import RecordFormat
from bigbird.distillation.capture import capture, plan_capture
from bigbird.distillation.report import Run
from bigbird.distillation.toolkit_models import new_model
from bigbird.distillation.topk_teacher import TopKTeacher
from bigbird.distillation.trainer import MODES, Distiller

SCRIPT = pathlib.Path(__file__).parents[1] / "bigbird" / "distillation" / "distill.sh"
LABELS = "labels"
# Of these 68 are special: 100 entries of the other 104 hold 0.997 of the teacher's mass.
PIECES = 172

VOCABULARY, LENGTH, HIDDEN, KEPT, BATCH = 8000, 128, 20, 100, 16
TEACHER = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 1024}
STUDENT = {"num_hidden_layers": 2, "hidden_size": 120, "intermediate_size": 480}
VARIANTS = ("online", "offline_fused")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="modes,speed", help="modes, speed, or both")
    parser.add_argument("--pieces", type=int, default=PIECES, help="of the vocabulary of `modes`")
    parser.add_argument("--repeats", type=int, default=30, help="timed steps of each variant")
    parser.add_argument("--child", nargs=2, metavar=("VARIANT", "CACHE"))
    arguments = parser.parse_args()
    if arguments.child:
        variant, directory = arguments.child
        cache = TeacherCache(directory)
        harness.report_peak_rss(lambda: run_steps(step_of(variant, cache)), calls=1)
        return
    if "modes" in arguments.parts.split(","):
        compare_modes(arguments.pieces)
    if "speed" in arguments.parts.split(","):
        measure_speed(arguments.repeats)


def prepare_runs(pieces=PIECES):
    """Runs the script, whose finished parts are not done again, and returns its directory."""
    runs = pathlib.Path(f"runs/benchmarks/distillation-{pieces}")
    vocabulary = runs / "vocabulary.model"
    if not vocabulary.exists():
        builtin_documents.write_vocabulary(vocabulary, pieces)
    settings = {
        "RUNS": str(runs),
        "PYTHON": sys.executable,
        "VOCAB_MODEL_FILE": str(vocabulary),
        "TEACHER_STEPS": "800",
        "TEACHER_WARMUP_STEPS": "80",
        "COPIES": "4",
        "NUM_TRAIN_STEPS": "600",
        "NUM_WARMUP_STEPS": "60",
        "SAVE_CHECKPOINTS_STEPS": "100",
    }
    subprocess.run([SCRIPT], check=True, env={**os.environ, **settings})
    return runs


def compare_modes(pieces):
    """Curves of the four modes and of hard labels alone, and how far they are apart."""
    directory = prepare_runs(pieces)
    runs = {name: Run.read(str(directory / name)) for name in (*MODES, LABELS)}
    losses = {name: dict(run.curve("train", "loss")) for name, run in runs.items()}
    divergences = {name: dict(run.curve("validation", "kl")) for name, run in runs.items()}
    suffix = "" if pieces == PIECES else f"_{pieces}"
    path = harness.RESULTS / f"distillation_modes{suffix}.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "step", "training_loss", "held_out_kl"])
        for name, by_step in losses.items():
            for step, loss in by_step.items():
                kl = divergences[name].get(step)
                writer.writerow([name, step, f"{loss:.6f}", "" if kl is None else f"{kl:.6f}"])
    draw_curves(losses, divergences, path.with_suffix(".png"))
    offline = [np.array(list(losses[name].values())) for name in MODES if name != "online"]
    apart = max(np.max(np.abs(other / offline[0] - 1)) for other in offline[1:])
    print(f"The offline modes' losses are within {apart:.2e} of each other at every logged step.")
    for name, by_step in divergences.items():
        print(f"{name:24} held-out divergence {list(by_step.values())[-1]:.4f} nats")


def draw_curves(losses, divergences, path):
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    styles = dict(zip(MODES, ("-", "-", "--", ":"), strict=True))
    for name in MODES:
        left.plot(*zip(*losses[name].items(), strict=True), styles[name], label=name)
    for name, by_step in divergences.items():
        style = styles.get(name, "-.")
        right.plot(*zip(*by_step.items(), strict=True), style, marker=".", label=name)
    left.set(xlabel="step", ylabel="nats a token", title="training loss")
    right.set(xlabel="step", ylabel="nats a token", title="held-out divergence from the teacher")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def config(sizes):
    return BigBirdConfig(
        vocab_size=VOCABULARY,
        max_encoder_length=LENGTH,
        max_position_embeddings=LENGTH,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **sizes,
    )


def random_cache(directory):
    """A cache of random sequences; what a teacher thinks of them does not change the speed."""
    rng = np.random.default_rng(0)
    ids = rng.integers(100, VOCABULARY, size=[4 * BATCH, LENGTH]).astype(np.int32)
    mask = np.argsort(rng.random(ids.shape), axis=-1) < HIDDEN
    data = tf.data.Dataset.from_tensor_slices({"input_ids": ids, "mask": mask})
    layout = RecordFormat(VOCABULARY, KEPT, compact=True)
    model = new_model("masked_lm", config(TEACHER))
    teacher = TopKTeacher(model, layout, batch_size=BATCH, max_length=LENGTH)
    with TeacherCacheWriter(directory, **layout.to_json()) as writer:
        capture(teacher, data, plan_capture(data), writer)
    return TeacherCache(directory)


def step_of(variant, cache):
    """A training step: reading a batch from a cache, and an update."""
    student = new_model("masked_lm", config(STUDENT))
    model = Distiller(
        student,
        VOCABULARY,
        mode=variant,
        teacher=new_model("masked_lm", config(TEACHER)) if variant == "online" else None,
        max_rows=cache.manifest["max_rows"],
    )
    model.compile(keras.optimizers.Adam(1e-3), run_seed=0, jit_compile=True)
    batches = iter(cache.dataset(BATCH))
    return lambda: tf.constant(model.train_on_batch(next(batches)))


def run_steps(step, steps=5):
    """Makes some steps; with a student that is made here, its peak is that of its training."""
    return [step() for _ in range(steps)][-1]


def measure_speed(repeats):
    """Steps beside the teacher and from the cache, turn by turn."""
    sizes = {name: parameters(s) for name, s in (("teacher", TEACHER), ("student", STUDENT))}
    print(f"{sizes}: the teacher has {sizes['teacher'] / sizes['student']:.2f} times as many.")
    with tempfile.TemporaryDirectory() as directory:
        cache = random_cache(directory)
        peaks = {
            name: harness.peak_rss_in_fresh_process(__spec__.name, ["--child", name, directory])
            for name in VARIANTS
        }
        steps = {name: step_of(name, cache) for name in VARIANTS}
        timings = harness.measure_in_turn(steps, repeats, warmup=3)
    rows = [
        harness.Row(
            name,
            "xla",
            f"B={BATCH} L={LENGTH} R={HIDDEN} V={VOCABULARY} K={KEPT}",
            "float32",
            timing=timings[name],
            peak_rss_bytes=peaks[name],
        )
        for name in VARIANTS
    ]
    harness.write_csv(harness.RESULTS / "distillation_speed.csv", rows)
    online, cached = (timings[name].p50 for name in VARIANTS)
    print(
        f"Steps a second: online {1 / online:.2f}, cached {1 / cached:.2f}: {online / cached:.2f}x"
    )
    for row in rows:
        print(f"{row.variant}: peak {row.peak_rss_bytes / 2**20:,.0f} MiB above idle")


def parameters(sizes):
    weights = new_model("masked_lm", config(sizes)).weights
    return sum(variable.shape.num_elements() for variable in weights)


if __name__ == "__main__":
    main()
