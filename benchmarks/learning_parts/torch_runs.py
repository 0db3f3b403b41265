"""The same fine-tuning with PEFT and TRL: the same folders, and the same order of examples."""

import importlib
import pathlib
from collections.abc import Sequence
from typing import Any

from learning_parts.repeating import LETTERS

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def load(folder: pathlib.Path) -> Any:
    """Return the model in a folder, in float32."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", trust_remote_code=False
    )


def write_adapters(base: pathlib.Path, rank: int, folder: pathlib.Path) -> None:
    """Write new adapters for a model, whose product is 0, as PEFT draws them."""
    import peft
    import torch

    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=TARGETS, task_type="CAUSAL_LM"
    )
    peft.get_peft_model(load(base), config).save_pretrained(str(folder))


def train(
    method: str,
    base: pathlib.Path,
    adapters: pathlib.Path,
    lines: Sequence[dict[str, str]],
    batch_size: int,
    rate: float,
    folder: pathlib.Path,
) -> list[float]:
    """Train adapters on examples in their order, write them, and return each step's loss.

    Args:
      method: "sft" or "dpo".
      base: folder of the model.
      adapters: folder of the adapters to start from.
      lines: examples of all steps, in TRL's columns.
      batch_size: examples of a step.
      rate: learning rate, which is constant.
      folder: folder to write the trained adapters to.
    """
    import datasets
    import peft
    import torch
    import transformers

    # Its modules load names on demand, which pyright does not see.
    trl: Any = importlib.import_module("trl")
    trainer_class, config_class, more = {
        "sft": (trl.SFTTrainer, trl.SFTConfig, {}),
        "dpo": (trl.DPOTrainer, trl.DPOConfig, {"beta": 0.1}),
    }[method]

    class InOrder(trainer_class):
        """A trainer that does not shuffle."""

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    options = config_class(
        output_dir=str(folder.with_name(f"{folder.name}_trainer")),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=batch_size,
        num_train_epochs=1,
        learning_rate=rate,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        weight_decay=0.0,
        logging_steps=1,
        save_strategy="no",
        gradient_checkpointing=False,
        max_length=None,
        disable_tqdm=True,
        **more,
    )
    model = peft.PeftModel.from_pretrained(load(base), adapters, is_trainable=True)
    trainer = InOrder(
        model=model,
        args=options,
        train_dataset=datasets.Dataset.from_list(list(lines)),
        processing_class=transformers.AutoTokenizer.from_pretrained(base, trust_remote_code=False),
    )
    trainer.train()
    trainer.model.save_pretrained(folder, selected_adapters=["default"])
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def answer(base: pathlib.Path, adapters: pathlib.Path | None, prompts: Sequence[str]) -> list[str]:
    """Return the greedy answers of transformers to prompts of one length."""
    import peft
    import torch
    import transformers

    model = load(base)
    if adapters is not None:
        model = peft.PeftModel.from_pretrained(model, adapters)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    ids = torch.tensor([tokenizer.encode(prompt) for prompt in prompts])
    with torch.no_grad():
        full = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=LETTERS + 2,
            do_sample=False,
        )
    return tokenizer.batch_decode(full[:, ids.shape[1] :], skip_special_tokens=True)
