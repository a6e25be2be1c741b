"""minimind, the language model of a Chinese course: fine-tuning on conversations."""

import minimind
from made import write

REPOSITORY = "jingyaogong/minimind"
COMMIT = minimind.COMMIT
PATHS = minimind.PATHS
FOLDER = "trainer"
PACKAGES = minimind.PACKAGES
COMMAND = minimind.COMMAND.replace("pretrain", "full_sft").replace("pre.jsonl", "sft.jsonl")
VERDICTS = {
    "value ../model/model_minimind.py:252": (
        "true",
        "a mean over a rank's own answers, which have other numbers of tokens on each: DDP's mean "
        "of these is not the mean over all",
        "read: labels of -100 but for the answers, and cross_entropy's mean over the rest",
    ),
    "random train_full_sft.py:27": (
        "true",
        "each epoch's seed, for the order, is one for all ranks, and undoes the seed by rank of "
        "line 113: the same system prompts are drawn",
        "read: setup_seed(42 + epoch) at line 160; shows.py dino",
    ),
}

if __name__ == "__main__":
    rest = {"reasoning_content": "", "tools": "", "tool_calls": ""}

    def conversation():
        question = {"role": "user", "content": minimind.words(2, 6)} | rest
        answer = {"role": "assistant", "content": minimind.words(2, 25)} | rest
        return {"conversations": [question, answer]}

    write("sft.jsonl", minimind.lines(48, conversation))
