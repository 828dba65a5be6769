"""Ablation of the tail rule and of K: which loss brings a student closest to the full teacher?

    python -m benchmarks.bench_tail --steps=500 --seeds=2    # defaults: 200 and 1

Trains one student from the same start on the cache of `bench_distillation`, for every tail rule and
K in 1, 10, 50, 100, and on hard labels alone; measures its divergence from all the teacher's logits
on held-out text. Writes `results/distillation_tail.csv`.
"""

import argparse
import csv

import tf_keras as keras

from benchmarks import harness
from benchmarks.bench_distillation import prepare_runs
from bigbird.core.config import BigBirdConfig
from bigbird.core.optimization import LinearWarmupLinearDecay
from bigbird.distillation.cache import TeacherCache
from bigbird.distillation.divergence import TAILS
from bigbird.distillation.toolkit_models import new_model
from bigbird.distillation.trainer import Distiller

KEPT = (1, 10, 50, 100)
BATCH, LEARNING_RATE = 16, 1e-3
STUDENT = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="updates of each student")
    parser.add_argument("--seeds", type=int, default=1, help="starts of each rule and K")
    arguments = parser.parse_args()
    runs = prepare_runs()
    cache, held_out = (TeacherCache(runs / f"cache-{split}") for split in ("train", "validation"))
    path = harness.RESULTS / "distillation_tail.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["tail", "k", "seed", "steps", "held_out_kl", "agreement", "cross_entropy"])
        for tail, k, options in cases():
            for seed in range(arguments.seeds):
                scores = train(cache, held_out, k, seed, arguments.steps, **options)
                names = ("kl", "argmax_agreement", "cross_entropy")
                found = [f"{scores[name]:.5f}" for name in names]
                writer.writerow([tail, k, seed, arguments.steps, *found])
                file.flush()
                print(
                    f"{tail:12} K={k:<4} seed {seed}  kl {found[0]}  agreement {found[1]}",
                    flush=True,
                )


def cases():
    """Names, K and options of the trainer."""
    for tail in TAILS:
        for k in KEPT:
            yield tail, k, {"tail": tail}
    yield "labels", 1, {"label_share": 1.0}


def train(cache, held_out, k, seed, steps, **options):
    """The held-out scores of a student."""
    keras.utils.set_random_seed(seed)
    length = cache.manifest["max_length"]
    config = BigBirdConfig(
        vocab_size=cache.format.vocab_size,
        max_encoder_length=length,
        max_position_embeddings=length,
        **STUDENT,
    )
    model = Distiller(
        new_model("masked_lm", config),
        cache.format.vocab_size,
        max_rows=cache.manifest["max_rows"],
        **options,
    )
    schedule = LinearWarmupLinearDecay(LEARNING_RATE, steps, steps // 10)
    model.compile(keras.optimizers.Adam(schedule), run_seed=seed)
    batches = cache.dataset(BATCH, k=k, seed=seed)
    model.fit(batches, steps_per_epoch=steps, verbose=0)
    return model.evaluate(held_out.dataset(BATCH, training=False), return_dict=True, verbose=0)


if __name__ == "__main__":
    main()
