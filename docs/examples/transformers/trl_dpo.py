"""TRL's DPOTrainer on adapters, with one line more: the model, reference included, is sharded when training begins.

accelerate launch --config_file docs/examples/two_processes.yaml docs/examples/transformers/trl_dpo.py
"""

from __future__ import annotations

import torch
from _tiny import make_model, make_preferences, make_tokenizer
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

from streamshard.integrations.transformers import StreamShardTrainerMixin


class Trainer(StreamShardTrainerMixin, DPOTrainer):
    pass


def main(directory: str = "dpo-out", steps: int = 4) -> list[float]:
    arguments = DPOConfig(
        output_dir=directory,
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        max_length=32,
        report_to=[],
        bf16=torch.accelerator.is_available(),
        use_cpu=not torch.accelerator.is_available(),
    )
    trainer = Trainer(
        model=make_model(),
        args=arguments,
        train_dataset=make_preferences(32),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
