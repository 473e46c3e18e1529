"""transformers' Trainer, with one line changed: trains, evaluates, saves, and goes on.

accelerate launch --config_file docs/examples/two_processes.yaml docs/examples/transformers/trainer.py [resume]
"""

from __future__ import annotations

import sys

import torch
from _tiny import make_examples, make_model
from transformers import TrainingArguments

from streamshard.integrations.transformers import StreamShardTrainer as Trainer  # from transformers import Trainer


def main(directory: str = "trainer-out", steps: int = 8, resume: bool = False) -> list[float]:
    arguments = TrainingArguments(
        output_dir=directory,
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        load_best_model_at_end=True,
        report_to=[],
        use_cpu=not torch.accelerator.is_available(),
    )
    trainer = Trainer(
        model=make_model(), args=arguments, train_dataset=make_examples(64), eval_dataset=make_examples(8, seed=1)
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main(resume="resume" in sys.argv[1:])
