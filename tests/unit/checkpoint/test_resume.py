"""Differences between a run and the one that saved its step: what is refused, what restarts,
what is noted.
"""

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from tiny import DEBUG_TOKENIZER, RECIPES

import titan_lite
from titan_lite.checkpoint import run_identity as identity_module
from titan_lite.checkpoint.resume import (
    FIELDS,
    Change,
    changes_of_sources,
    compare,
)
from titan_lite.checkpoint.run_identity import (
    NUMERIC_VARIABLES,
    RunIdentity,
    documents_of_run,
    git_revision,
    list_documents,
    run_identity,
    source_digest,
    with_machine,
)
from titan_lite.checkpoint.state import RunState, SavedState, read_state, write_state
from titan_lite.config import Checkpoint, ConfigError, is_unset, load_config
from titan_lite.config.effects import Effect
from titan_lite.config.families import FAMILIES
from titan_lite.config.nearest import RENAMED
from titan_lite.data.source_identity import digest_of, source_keys
from titan_lite.data.tokenizer import load_tokenizer
from titan_lite.distributed.layout import Layout
from titan_lite.models.shapes import config_from_fields
from titan_lite.optim.lr_scheduler import decay_of

DEBUG = Path(__file__).parents[3] / "train_configs/debug_model.toml"
FACTS = {
    "model": {
        "family": "llama3",
        "dim": 256,
        "n_layers": 6,
        "rope_scaling": None,
        "max_seq_len": 8192,
    },
    "tokenizer": "a" * 64,
    "sequences": 8,
    "documents": "b" * 64,
    "shares": (1.0,),
    "world_size": 2,
    "mesh": {"dp_shard": 2, "tp": 1, "ep": 1},
    "device": "CPU",
    "numerics": {"threads": 1, "CPU capability": "AVX512"},
    "versions": {"torch": "2.13.0", "python": "3.11.2"},
    "sources": "f" * 64,
    "git": "c" * 40,
}


def identity(*overrides, **facts):
    config = load_config(DEBUG, overrides)
    decay = decay_of(config.lr_scheduler, config.training.steps, 2048)
    known = {**FACTS, "decay": decay._asdict(), **facts}
    return RunIdentity(recipe=config.model_dump(), **known)


def saved(*overrides, tensors=("model", "optimizer"), **facts):
    """The state of step 50, as it is read."""
    was = json.loads(json.dumps(dataclasses.asdict(identity(*overrides, **facts))))
    return SavedState(
        RunIdentity.from_json(was), folder=Path("out/step-50"), step=50, tensors=tensors
    )


def compared(step, now):
    """The differences of a run on the documents of the step."""
    return compare(step, now, {})


def differences(*overrides, was=(), **facts):
    """[(effect, text), ...] of a run beside the one that saved step 50."""
    changes = compared(saved(*was), identity(*overrides, **facts))
    return sorted(
        ((change.effect, change.text) for change in changes.changes),
        key=lambda change: list(Effect).index(change[0]),
    )


def test_every_field_of_an_identity_has_an_effect():
    fields = {field.name for field in dataclasses.fields(RunIdentity)}
    assert FIELDS.keys() == fields - {"recipe", "added_tensors", "total_steps"}


@pytest.mark.parametrize("key", ["model.tokenizer_path", "training.steps", "data.sources"])
def test_a_change_of_any_key_is_told(key):
    was, now = saved(), identity()
    section, _, name = key.partition(".")
    other = [{"dataset": "c4"}] if key == "data.sources" else "something else"
    was.identity.recipe[section][name] = other
    texts = [change.text for change in compared(was, now).changes]
    value = now.recipe[section][name]
    words = f"{key} is not set" if is_unset(key, value) else f"{key} = {json.dumps(value)}"
    assert texts == [f"{words}, was {json.dumps(other)}"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.n_layers", 3),
        ("lr_scheduler.decay_begin", 400),
        ("training.spike_window", 50),
    ],
)
def test_a_value_that_stands_for_none_is_not_set(key, value):
    section, _, name = key.partition(".")
    was, now = saved(), saved()
    now.identity.recipe[section][name] = value
    texts = [change.text for change in compared(was, now.identity).changes]
    assert f"{key} = {json.dumps(value)}, was not set" in texts
    texts = [change.text for change in compared(now, was.identity).changes]
    assert f"{key} is not set, was {json.dumps(value)}" in texts


def test_a_key_that_has_another_name_since_is_the_same_key():
    step = saved("--fault_tolerance.replica_groups=3")
    was = dataclasses.asdict(step.identity)
    for old, new in RENAMED.items():
        table, name = old.split(".")
        was["recipe"][table][name] = was["recipe"][table].pop(new.removeprefix(f"{table}."))
    step = dataclasses.replace(step, identity=RunIdentity.from_json(was))
    now = "--fault_tolerance.replica_groups=2"
    assert compared(step, identity(now)).describe() == [
        "changed: fault_tolerance.replica_groups = 2, was 3"
    ]


@pytest.mark.parametrize(
    ("components", "enable"),
    [(["model", "loss"], "enable"), (["model"], "enable")],
)
def test_the_compiled_components_of_an_older_run_are_known_by_the_key_of_now(components, enable):
    was = dataclasses.asdict(saved("--compile.enable").identity)
    was["recipe"]["compile"]["components"] = components
    step = dataclasses.replace(saved(), identity=RunIdentity.from_json(was))
    assert compared(step, identity(f"--compile.{enable}")).changes == ()


def test_components_without_the_model_were_a_model_in_eager_mode():
    was = dataclasses.asdict(saved("--compile.enable").identity)
    was["recipe"]["compile"]["components"] = ["loss", "optimizer"]
    step = dataclasses.replace(saved(), identity=RunIdentity.from_json(was))
    assert compared(step, identity()).describe() == [
        'changed: compile.components is not set, was ["loss", "optimizer"]'
    ]


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ((1.0, -1, 100), []),
        ((0.25, -1, 100), ["--lr_scheduler.decay_length=25%"]),
        ((0.0, -1, 100), ["--lr_scheduler.decay_length=0"]),
        ((0.25, 400, 400), ["--lr_scheduler.decay_begin=300", "--lr_scheduler.decay_length=100"]),
        ((1.0, 400, 400), ["--lr_scheduler.decay_begin=10", "--lr_scheduler.decay_length=390"]),
    ],
)
def test_the_decay_of_an_older_run_is_known_by_the_keys_of_now(was, now):
    ratio, total_steps, resolved = was
    whole = "--lr_scheduler.decay_length="  # the debug recipe has another one
    now = identity(whole, *now)
    older = json.loads(json.dumps(dataclasses.asdict(now)))
    del older["decay"], older["recipe"]["lr_scheduler"]["decay_begin"]
    del older["recipe"]["lr_scheduler"]["decay_length"]
    older["recipe"]["lr_scheduler"] |= {"decay_ratio": ratio, "total_steps": total_steps}
    older["total_steps"] = resolved
    step = dataclasses.replace(saved(), identity=RunIdentity.from_json(older))
    assert compared(step, now).changes == ()


@pytest.mark.parametrize("key", ["compile.buckets", "training.global_batch_ramp"])
def test_a_removed_key_is_told_if_it_was_set(key):
    section, _, name = key.partition(".")
    was = saved()
    was.identity.recipe[section][name] = []
    assert compared(was, saved().identity).changes == ()
    was.identity.recipe[section][name] = ["64 until 1000"]
    assert compared(was, saved().identity).describe() == [
        f'changed: {key} is not set, was ["64 until 1000"]'
    ]


def test_nothing_differs():
    changes = compared(saved(), identity())
    assert changes.describe() == ["nothing differs from the run that saved it"]
    assert not changes.restarts_data
    assert not changes.restarts_optimizer
    changes.refuse_unless_accepted(Checkpoint())


CASES = [
    (["--metrics.log_freq=1"], {}, [(Effect.NOTED, "metrics.log_freq = 1, was 5")]),
    (["--training.seq_len=512"], {}, [(Effect.NOTED, "training.seq_len = 512, was 256")]),
    (
        [],
        {"mesh": {**FACTS["mesh"], "dp_shard": 4, "ep": 2}},
        [
            (Effect.ROUNDING, "ranks along dp_shard: 4, was 2"),
            (Effect.ROUNDING, "ranks along ep: 2, was 1"),
        ],
    ),
    (
        [],
        {"versions": {"torch": "2.11.0", "python": "3.11.2"}},
        [(Effect.ROUNDING, 'version of torch: "2.11.0", was "2.13.0"')],
    ),
    (
        [],
        {"versions": {"torch": "2.13.0", "python": "3.12.1"}},
        [(Effect.NOTED, 'version of python: "3.12.1", was "3.11.2"')],
    ),
    ([], {"device": "NVIDIA H100"}, [(Effect.ROUNDING, 'device: "NVIDIA H100", was "CPU"')]),
    (
        [],
        {"numerics": {"threads": 2, "CPU capability": "DEFAULT", "MKL_CBWR": "COMPATIBLE"}},
        [
            (Effect.ROUNDING, "threads: 2, was 1"),
            (Effect.ROUNDING, 'CPU capability: "DEFAULT", was "AVX512"'),
            (Effect.ROUNDING, 'MKL_CBWR: "COMPATIBLE", was not set'),
        ],
    ),
    ([], {"numerics": {}}, []),  # not known
    (["--compile.enable"], {}, [(Effect.ROUNDING, "compile.enable = true, was false")]),
    (
        ["--optimizer.state_dtype=bfloat16"],
        {},
        [(Effect.ROUNDING, 'optimizer.state_dtype = "bfloat16", was "float32"')],
    ),
    ([], {"git": ""}, []),  # not looked up on this rank
    (
        ["--training.steps=200"],
        {},
        [
            (Effect.NOTED, "training.steps = 200, was 100"),
            (Effect.NOTED, "begin of the learning rate's decay (lr_scheduler): 100, was 50"),
            (Effect.NOTED, "steps of the learning rate's decay (lr_scheduler): 100, was 50"),
        ],
    ),
    (["--data.path=/b"], {}, [(Effect.NOTED, 'data.path = "/b", was "/a"')]),  # the same files
    (
        ["--optimizer.name=Muon", "--optimizer.max_preconditioner_dim=9"],
        {},
        [
            (Effect.RESTARTS_OPTIMIZER, 'optimizer.name = "Muon", was "AdamW"'),
            (Effect.NOTED, "optimizer.max_preconditioner_dim = 9, was 1024"),
        ],
    ),
    (
        ["--model.flavor=1B"],
        {"model": {**FACTS["model"], "dim": 2048, "rope_scaling": {"factor": 8.0}}},
        [
            (Effect.REFUSED, "the model's dim ([model]): 2048, was 256"),
            (Effect.REFUSED, "the model's rope_scaling.factor ([model]): 8.0, was not set"),
            (Effect.NOTED, 'model.flavor = "1B", was "debug"'),
        ],
    ),
    (
        ["--model.flavor=1B"],
        {},
        [(Effect.NOTED, 'model.flavor = "1B", was "debug"')],
    ),  # another name for the same
    (
        [],
        {"model": {**FACTS["model"], "max_seq_len": 512}},
        [(Effect.NOTED, "the model's max_seq_len ([model]): 512, was 8192")],
    ),
    (
        [],
        {"tokenizer": "e" * 64},
        [(Effect.REFUSED, f"SHA-256 of model.tokenizer_path: {'e' * 12}, was {'a' * 12}")],
    ),
]
LOCAL = ["--data.dataset=local", "--data.path=/a"]


@pytest.mark.parametrize(("overrides", "facts", "expected"), CASES)
def test_what_a_difference_does(overrides, facts, expected):
    assert differences(*LOCAL, *overrides, was=LOCAL, **facts) == expected


def test_of_a_step_that_is_older_than_an_entry_nothing_is_told():
    was = saved()
    del was.identity.model["max_seq_len"]
    del was.identity.mesh["ep"]
    assert not compared(was, saved().identity).changes


QWEN3 = ["--model.name=qwen3_moe", f"--model.tokenizer_path={DEBUG_TOKENIZER}"]


def identity_of(config, layout):
    documents = documents_of_run(list_documents(config))
    return run_identity(config, layout, load_tokenizer(config.model.tokenizer_path), documents)


def test_the_identity_of_a_run_has_the_limit_of_its_flavor_and_the_degree_of_its_experts():
    config = load_config(DEBUG, [*QWEN3, "--parallelism.expert_parallel_degree=2"])
    layout = Layout.from_config(config, 2)
    found = identity_of(config, layout)
    assert found.mesh["ep"] == 2
    assert found.model["max_seq_len"] == 40_960


def test_a_step_without_the_models_limit_has_that_of_its_family():
    shape = dataclasses.asdict(FAMILIES["qwen3"].flavors["0.6B"])
    del shape["max_seq_len"]
    assert config_from_fields(shape, "state.json").max_seq_len == 40_960


@pytest.mark.parametrize(
    ("key", "was"), [("max_preconditioner_dim", 1024), ("start_preconditioning_step", 10)]
)
def test_of_shampoo_the_size_of_blocks_and_the_first_roots_are_of_its_state(key, was):
    shampoo = ["--optimizer.name=Shampoo"]
    assert differences(*shampoo, f"--optimizer.{key}=9", was=shampoo) == [
        (Effect.RESTARTS_OPTIMIZER, f"optimizer.{key} = 9, was {was}")
    ]


def test_a_step_that_does_not_know_its_run_is_refused():
    converted = SavedState(
        RunIdentity(model=FACTS["model"]), folder=Path("step-0"), step=0, tensors=("model",)
    )
    with pytest.raises(ConfigError, match=r"^step-0/state\.json does not have the recipe of a run"):
        compared(converted, identity())


def refused(changes, **accepting):
    with pytest.raises(ConfigError) as error:
        changes.refuse_unless_accepted(Checkpoint(**accepting))
    return str(error.value)


def test_another_model_or_tokenizer_is_refused_whatever_the_recipe_accepts():
    changes = compared(saved(), identity(model={**FACTS["model"], "dim": 2048}))
    assert (
        refused(changes, restart_data=True, accept_model_only=True)
        == "out/step-50: it cannot resume: the model's dim ([model]): 2048, was 256; "
        "use the old value, or another job.dump_folder"
    )


def test_other_data_is_refused_unless_it_may_restart():
    changes = compared(saved(), identity("--debug.seed=3"))
    assert changes.restarts_data
    assert (
        refused(changes, accept_model_only=True)
        == "out/step-50: the data restarts: debug.seed = 3, was 0; use the old value, or "
        "checkpoint.restart_data = true, which starts the recipe's data at its first document"
    )
    changes.refuse_unless_accepted(Checkpoint(restart_data=True))


def test_a_step_without_optimizer_is_refused_unless_that_is_accepted_or_the_step_is_the_last():
    changes = compared(saved(tensors=("model",)), identity())
    assert (
        "a checkpoint that has the optimizer's state, or checkpoint.accept_model_only = true"
        in refused(changes, restart_data=True)
    )
    changes.refuse_unless_accepted(Checkpoint(accept_model_only=True))
    last = compared(saved(tensors=("model",)), identity("--training.steps=50"))
    last.refuse_unless_accepted(Checkpoint())


def test_what_restarts_is_not_loaded():
    tensors = {"model.w": 1, "optimizer.w.exp_avg": 2, "between.w": 3}
    needs = {"between": {"dp_replicate": 2, "rank": 8}}
    state = saved(tensors=("model", "optimizer", "between"), added_tensors=needs)
    same = compared(state, identity(added_tensors=needs))
    assert same.tensors_to_load(tensors) == tensors
    assert same.describe() == ["nothing differs from the run that saved it"]
    others = {"between": {"dp_replicate": 2, "rank": 4}}
    other_rank = compared(state, identity(added_tensors=others))
    assert other_rank.tensors_to_load(tensors).keys() == {"model.w", "optimizer.w.exp_avg"}
    assert other_rank.describe() == [
        "tensors begin anew: errors of compressed gradients (parallelism.replicate_compression):"
        " rank 4, was 8"
    ]
    muon = compared(state, identity("--optimizer.name=Muon", added_tensors=needs))
    assert muon.tensors_to_load(tensors).keys() == {"model.w", "between.w"}


def test_lines_begin_with_what_matters_most():
    others = ("--training.steps=200", "--data.no-shuffle", "--optimizer.name=Muon")
    assert compared(saved(), identity(*others, "--compile.enable")).describe() == [
        "the data restarts: data.shuffle = false, was true",
        'the optimizer restarts: optimizer.name = "Muon", was "AdamW"',
        "results differ by floating-point rounding: compile.enable = true, was false",
        "changed: training.steps = 200, was 100",
        "changed: begin of the learning rate's decay (lr_scheduler): 100, was 50",
        "changed: steps of the learning rate's decay (lr_scheduler): 100, was 50",
    ]


LINEAR = ["--lr_scheduler.warmup_steps=0", "--lr_scheduler.decay_length="]  # to zero
CONSTANT = ["--lr_scheduler.warmup_steps=0", "--lr_scheduler.decay_length=0"]


@pytest.mark.parametrize(
    ("was", "now", "jump"),
    [
        (
            [*LINEAR, "--lr_scheduler.decay_begin=0", "--lr_scheduler.decay_length=99"],
            CONSTANT,
            "0.001, was 0.0005",
        ),
        (CONSTANT, [*CONSTANT, "--lr_scheduler.warmup_steps=100"], "0.0005, was 0.001"),
        (CONSTANT, [*CONSTANT, "--optimizer.lr=2e-3"], "0.002, was 0.001"),
        (
            [*LINEAR, "--training.steps=50"],
            [*LINEAR, "--training.steps=99"],
            "0.0005, was 1.96e-05",
        ),
        # the same rate at the step, whatever follows
        (CONSTANT, [*CONSTANT, "--training.steps=200"], None),
        (CONSTANT, ["--lr_scheduler.warmup_steps=9", "--lr_scheduler.decay_length=10%"], None),
    ],
)
def test_a_jump_of_the_learning_rate_is_told(was, now, jump):
    common = ["--optimizer.lr=1e-3", "--lr_scheduler.min_lr_factor=0"]
    lines = compared(saved(*common, *was), identity(*common, *now)).describe()
    told = [line.partition("learning rate at step 50: ")[2] for line in lines]
    assert list(filter(None, told)) == ([jump] if jump else [])


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_git_revision_is_of_the_checkout_that_holds_the_package(tmp_path, monkeypatch):
    def git(*arguments):
        names = ["-c", "user.name=n", "-c", "user.email=e@e"]
        return subprocess.run(
            ["git", "-C", tmp_path, *names, *arguments], check=True, capture_output=True, text=True
        ).stdout

    module = tmp_path / "package/resume.py"
    module.parent.mkdir()
    module.write_text("first")
    monkeypatch.setattr(identity_module, "__file__", str(module))
    assert git_revision.__wrapped__() == ""
    git("init", "-q")
    assert git_revision.__wrapped__() == ""  # a checkout of something else
    git("add", ".")
    git("commit", "-qm", "first")
    git("tag", "v1")
    head = git("rev-parse", "HEAD").strip()
    assert git_revision.__wrapped__() == head
    module.write_text("second")
    assert git_revision.__wrapped__() == f"{head}+changes"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_revision.__wrapped__() == ""  # without git


def test_an_identity_has_what_rounding_depends_on(monkeypatch):
    for name in NUMERIC_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("LOG_RANK", "0")  # of no number
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = with_machine(identity())
    finally:
        torch.set_num_threads(threads)
    assert found.numerics.keys() == {
        "threads",
        "CPU capability",
        "processor",
        "NVIDIA_TF32_OVERRIDE",
    }
    assert found.numerics["threads"] == 2
    assert found.numerics["CPU capability"] == torch.backends.cpu.get_cpu_capability()
    assert found.versions["torch"] == torch.__version__
    assert len(found.sources) == 64


def numerics_of(*options, recipe=DEBUG):
    config = load_config(recipe, options)
    layout = Layout.from_config(config, 2)
    return identity_of(config, layout).numerics


def test_a_step_whose_biases_of_experts_drifted_says_that_bits_differ():
    options = ["--experts.balance=bias"]
    now = numerics_of(*options, recipe=RECIPES / "qwen3_moe_debug.toml")
    before = {name: value for name, value in now.items() if name != "biases of experts"}
    step = saved(*options, numerics=before)
    (change,) = compared(step, identity(*options, numerics=now)).changes
    assert change == Change(
        Effect.ROUNDING, 'biases of experts: "centred on their mean", was not set'
    )


def test_buckets_that_gather_weights_more_often_say_that_bits_differ():
    options = ["--compile.enable", "--training.local_batch_size=2"]
    was = numerics_of(*options)
    now = numerics_of(*options, "--compile.bucketing=greedy")
    (change,) = compared(saved(numerics=was), identity(numerics=now)).changes
    assert change == Change(
        Effect.ROUNDING, 'gradients are summed once a: "microbatch", was "step"'
    )
    assert (
        compared(saved(numerics={"threads": 1}), identity(numerics={"threads": 1} | now)).changes
        == ()
    )


def test_a_changed_source_file_is_another_program(monkeypatch, tmp_path):
    package = tmp_path / "titan_lite"
    shutil.copytree(Path(titan_lite.__file__).parent, package, ignore=lambda *_: {"__pycache__"})
    here = source_digest.__wrapped__()
    monkeypatch.setattr(titan_lite, "__file__", str(package / "__init__.py"))
    assert source_digest.__wrapped__() == here  # a copy in another folder
    with (package / "optim/adamw.py").open("a") as file:
        file.write("# one line\n")
    assert source_digest.__wrapped__() != here


def test_a_changed_file_of_ones_own_family_is_told():
    step = saved(family_file="a" * 64)
    assert compared(step, identity(family_file="a" * 64)).changes == ()
    assert compared(step, identity(family_file="b" * 64)).describe() == [
        "changed: SHA-256 of the Python file of model.name: bbbbbbbbbbbb, was aaaaaaaaaaaa"
    ]
    here, there = ({**FACTS["model"], "family": f"/{folder}/own.py"} for folder in "ab")
    assert compared(saved(model=here), identity(model=there)).changes == ()


def test_a_validation_set_of_ones_own_may_be_added_if_as_many_documents_stay_held_out():
    path = "--validation.path=/v.jsonl"
    refused = compared(saved(), identity(path))
    with pytest.raises(
        ConfigError, match=r"data.validation_fraction = 0.0, was 0.05; use the old value, or"
    ):
        refused.refuse_unless_accepted(Checkpoint())
    kept = compared(saved(), identity(path, "--data.validation_fraction=0.05"))
    kept.refuse_unless_accepted(Checkpoint())
    assert not kept.restarts_data


def test_a_key_that_the_step_is_older_than_is_no_change_at_its_default():
    was = saved()
    for name in ("split", "sources", "text_field"):
        del was.identity.recipe["validation"][name]
    assert compared(was, identity()).changes == ()
    (change,) = compared(was, identity("--validation.split=test")).changes
    assert change.text == 'validation.split = "test", was not set'


# The documents of a step


@pytest.fixture
def corpus(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"corpus/{name}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / f"corpus/{name}.txt").write_text(f"text {name}")
    return tmp_path / "corpus"


def run_on(corpus, *options):
    """(identity, documents) of a run on a corpus."""
    options = ("--data.dataset=local", f"--data.path={corpus}", *options)
    documents = documents_of_run(list_documents(load_config(DEBUG, options)))
    digests = {name: digest_of(sources) for name, sources in documents.items()}
    return identity(*options, **digests), documents


def step_of(corpus, folder, *options):
    """A step that a run on the corpus has saved."""
    saves, documents = run_on(corpus, *options)
    folder.mkdir()
    write_state(folder, 50, ("model", "optimizer"), RunState(saves, documents=documents))
    return read_state(folder)


def resumed(step, corpus, *options):
    """The differences of a run on the corpus that goes on from the step."""
    now, documents = run_on(corpus, *options)
    return compare(step, now, documents)


def test_a_corpus_edited_between_stop_and_resume_is_refused(corpus, tmp_path):
    step = step_of(corpus, tmp_path / "step-50")
    assert resumed(step, corpus).changes == ()
    (corpus / "a.txt").write_text("text x")
    (corpus / "c.txt").write_text("more")
    (corpus / "b.txt").unlink()
    changes = resumed(step, corpus)
    assert changes.restarts_data
    with pytest.raises(ConfigError) as error:
        changes.refuse_unless_accepted(Checkpoint())
    text = (
        "the documents of [data]: 1 file was changed (a.txt); 1 file was added (c.txt); 1 file was"
        " removed (b.txt)"
    )
    assert text in str(error.value)
    assert "checkpoint.restart_data = true" in str(error.value)
    changes.refuse_unless_accepted(Checkpoint(restart_data=True))
    assert f"the data restarts: {text}" in changes.describe()


def sources_of(folder, *names):
    tables = (f'{{dataset = "local", path = "{folder / name}"}}' for name in names)
    return f"--data.sources=[{', '.join(tables)}]"


def test_a_source_is_known_by_its_documents_and_its_name(corpus, tmp_path):
    """Others are new or gone, and the data goes on; the same name with other documents is refused."""
    for name in ("web", "books"):
        shutil.copytree(corpus, tmp_path / name)
        (tmp_path / name / "own.txt").write_text(name)
    saves, documents = run_on(corpus, sources_of(tmp_path, "web", "books"))
    positions = {"sources": [list(key) for key in source_keys(documents["documents"])]}
    positions["sources"].append(["code", "e" * 64])  # of an earlier phase
    state = RunState(saves, {"loader": positions}, documents=documents)
    (tmp_path / "step-50").mkdir()
    write_state(tmp_path / "step-50", 50, ("model", "optimizer"), state)
    step = read_state(tmp_path / "step-50")

    def sources(*names):
        changes = resumed(step, corpus, sources_of(tmp_path, *names))
        return changes, [line for line in changes.describe() if "source " in line]

    (tmp_path / "books").rename(tmp_path / "renamed")
    assert sources("renamed", "web")[1] == []
    changes, lines = sources("renamed", "corpus")
    changes.refuse_unless_accepted(Checkpoint())
    assert lines == [
        "changed: source corpus is new, from its first document on",
        "changed: source web is gone; the checkpoint has its position",
    ]
    (tmp_path / "web/own.txt").write_text("edited")
    changes, lines = sources("web", "renamed")
    assert lines == [
        "the data restarts: the documents of [data]: source web: 1 file was changed (own.txt)"
    ]
    with pytest.raises(ConfigError, match="source web: 1 file was changed"):
        changes.refuse_unless_accepted(Checkpoint())


def test_a_phase_may_replace_documents_by_others_of_the_same_last_part(tmp_path):
    """They are a new source: nothing is refused at the boundary."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}/web.txt").write_text(name)
    (tmp_path / "recipe.toml").write_text(
        f"""
[model]
tokenizer_path = "{DEBUG_TOKENIZER}"
[data]
dataset = "local"
path = "a/web.txt"
[checkpoint]
enable = true
[[phases]]
begin = 50
data.path = "b/web.txt"
"""
    )
    first, second = (
        documents_of_run(list_documents(phase))["documents"]
        for phase in load_config(tmp_path / "recipe.toml").phases
    )
    known = source_keys(first)
    changes = [change.text for change in changes_of_sources(known, first, second)]
    assert changes == [
        "source web_2 is new, from its first document on",
        "source web is gone; the checkpoint has its position",
    ]


def test_other_documents_to_validate_on_are_noted_and_change_no_training(corpus, tmp_path):
    own = tmp_path / "own.txt"
    own.write_text("one")
    own_set = f"--validation.path={own}"
    step = step_of(corpus, tmp_path / "step-50", own_set)
    own.write_text("two")
    changes = resumed(step, corpus, own_set)
    assert changes.describe() == [
        "changed: the documents of [validation]: 1 file was changed (own.txt)"
    ]
    assert not changes.restarts_data
    held_out = step_of(corpus, tmp_path / "step-60", "--data.validation_fraction=0")
    changes = resumed(held_out, corpus, own_set)  # the step has no such documents
    assert not any("the documents" in line for line in changes.describe())


def test_damaged_documents_of_a_step_are_an_error(corpus, tmp_path):
    step = step_of(corpus, tmp_path / "step-50")
    (corpus / "a.txt").write_text("text x")
    file = tmp_path / "step-50/documents.json"
    for damage in ("{", "[]", "{}", '{"documents": [5]}', '{"documents": [{"settings": {}}]}'):
        file.write_text(damage)
        with pytest.raises(ConfigError, match=r"step-50: documents\.json"):
            resumed(step, corpus)
    file.unlink()
    with pytest.raises(ConfigError, match=r"step-50: documents\.json is missing"):
        resumed(step, corpus)
