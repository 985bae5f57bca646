"""Tasks of lm-evaluation-harness from local files: multiple choice, perplexity, generation.

folder = write_tasks(tmp_path)
options = [f"--evaluation.tasks={','.join(TASKS)}", f"--evaluation.task_folder={folder}"]
"""

import json

TASKS = ("choice", "rolling", "until")
PYTHON = "import os\n\ndef read(path):\n    with open(path) as file:\n        return file.read()\n"
CHOICES = [  # question, choices of unequal lengths, the right one
    ("", [" import", " the", " a longer one of several words"], 0),
    ("The sum of 1 and 2 is", [" 3", " 4 or more", " no number"], 0),
    (PYTHON * 3, [" read", " return file.read()\n", " x"], 1),  # longer than the context
    ("def f(x): ", ["return x", "pass"], 0),  # ends with a space
    ("import", [" os", " sys", " json"], 2),
]
TEXTS = [PYTHON, PYTHON * 4, "x", "The standard library of Python has many modules."]
PROMPTS = ["import", "The", PYTHON * 2, "def read(path):\n    return"]

YAML = {
    "choice": """\
task: choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "rolling": """\
task: rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "until": """\
task: until
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{prompt}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
DOCUMENTS = {
    "choice": [dict(question=q, choices=c, answer=a) for q, c, a in CHOICES],
    "rolling": [dict(text=text) for text in TEXTS],
    "until": [dict(prompt=prompt) for prompt in PROMPTS],
}


def write_tasks(folder):
    """Write the tasks and their documents, and return their folder as a string."""
    tasks = folder / "tasks"
    tasks.mkdir()
    for name, text in YAML.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(each) + "\n" for each in DOCUMENTS[name]))
        (tasks / f"{name}.yaml").write_text(
            f"{text}dataset_path: json\ntest_split: test\nmetadata: {{version: 1}}\n"
            f"dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {folder}/cache}}\n"
        )
    return str(tasks)
