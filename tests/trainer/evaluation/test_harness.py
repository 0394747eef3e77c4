"""lm-evaluation-harness itself on a checkpoint, with a task and data that are made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from tests.support.small_store import text_store
from tests.support.trainer_command import TrainerCommand
from trainer.evaluation.harness import scores_of

WORDS = ("the library", "a name of", "it returns", "one or more", "this module", "in the same way", "if there is")
QUESTIONS = [
    {"question": f"{first} {second}", "choices": [" the value", " qzxj vkw", " of a thing"], "answer": number % 3}
    for number, (first, second) in enumerate((first, second) for first in WORDS for second in WORDS)
]


def write_task(folder: Path) -> Path:
    folder.mkdir()
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS), encoding="utf-8")
    task = {
        "task": "endings",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "endings.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    return folder


def accuracy(folder: Path) -> float:
    """How often the likeliest ending is the one that is called right, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

    def likelihood(question: str, ending: str) -> float:
        begun = len(tokenizer(question)["input_ids"])
        ids = torch.tensor([tokenizer(question + ending)["input_ids"]])
        with torch.no_grad():
            scores = torch.log_softmax(model(ids).logits[0, :-1].float(), dim=-1)
        return float(scores.gather(1, ids[0, 1:, None])[begun - 1 :].sum())

    right = 0
    for each in QUESTIONS:
        found = [likelihood(str(each["question"]), ending) for ending in each["choices"]]
        right += found.index(max(found)) == each["answer"]
    return right / len(QUESTIONS)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_task_of_ones_own_by_the_harness_and_by_transformers_agree(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    trainer = TrainerCommand(text_store(), tmp_path)
    trainer("--node-id", "a", "--max-steps", "60", "--holdout", "1", "--eval-every", "0")
    places = ("--node-id", "a", "--checkpoint-dir", trainer.checkpoints)
    tasks = ("--tasks", "endings", "--tasks-dir", write_task(tmp_path / "tasks"))
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = trainer.other("eval", *places, *tasks, "--json", "--device", "cpu", **offline)
    told = json.loads(done.stdout)
    assert told["held_out"]["num_tokens"] > 30_000
    trainer.other("export", "--checkpoint-dir", trainer.checkpoints, "--to", "hf", tmp_path / "hf-model")
    assert told["tasks"]["endings"]["acc"] == pytest.approx(accuracy(tmp_path / "hf-model"))
    done = trainer.other("eval", *places, "--tasks", "no_such_task", expect=2, **offline)
    assert "--tasks: expected names that the harness knows" in done.stderr.splitlines()[-1]


def test_scores_are_the_finite_numbers() -> None:
    found = {"a": {"alias": "a", "acc,none": 0.25, "acc_stderr,none": "N/A", "f1,strict": 1, "sample_len": 3}}
    assert scores_of({**found, "b": {"perplexity,none": float("inf")}}) == {
        "a": {"acc": 0.25, "f1,strict": 1.0, "sample_len": 3.0},
        "b": {},
    }
