"""The model of a folder of weights as keys of [model]: it fills a recipe, and a key that differs is
an error.
"""

import base64
import dataclasses
import json

import pytest
import torch
from tiny import DEBUG, DEBUG_TOKENIZER

from titan_lite.config import ConfigError, flatten, load_config, to_toml
from titan_lite.config.families import LLAMA3, ModelConfig, RopeScaling, find_family
from titan_lite.config.from_weights import keys_of_config_json
from titan_lite.data.special_tokens import CHARACTERS
from titan_lite.data.tokenizer import load_tokenizer
from titan_lite.data.tokenizer_json import to_json
from titan_lite.models.huggingface import config_from_hf, config_to_hf
from titan_lite.models.shapes import shape_of
from titan_lite.rules import check_all, check_keys

JSON = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 20_000.0,
    "tie_word_embeddings": True,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 64,
}
JSON_SCALED = {**JSON, "rope_scaling": SCALING}
SHAPE = ModelConfig(
    dim=64,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    hidden_dim=96,
    vocab_size=2048,
    tied_embeddings=True,
    rope_theta=20_000.0,
    rope_scaling=RopeScaling(8.0, 1.0, 3.0, 64),
    norm_eps=1e-6,
    max_seq_len=512,
)
RECIPE = "[training]\nseq_len = 64\n"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "theirs"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(JSON_SCALED))
    (path / "tokenizer.model").write_bytes(DEBUG_TOKENIZER.read_bytes())
    return path


def load(tmp_path, text, *options):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text)
    config = load_config(recipe, options)
    check_keys(config)
    return config


def mistakes(tmp_path, text, *options):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text, *options)
    return error.value.args


@pytest.mark.parametrize("flavor", ["", '[model]\nflavor = "from_weights"\n'])
def test_model_and_tokenizer_are_those_of_the_folder(folder, tmp_path, flavor):
    text = f'{flavor}{RECIPE}[checkpoint]\ninitial_load_path = "theirs"\n'
    config = load(tmp_path, text)
    assert shape_of(config.model) == SHAPE
    assert config.model.tokenizer_path == str(folder / "tokenizer.model")
    assert config.origin("model.norm_eps") == str(folder / "config.json")
    # What is resolved is a recipe of its own, with the same values, whether the folder is there.
    resolved = to_toml(config)
    assert flatten(load(tmp_path, resolved)) == flatten(config)
    (folder / "config.json").unlink()
    assert "has no weights" in mistakes(tmp_path, resolved)[0]
    steps = tmp_path / "outputs/recipe/checkpoint/step-2"
    steps.mkdir(parents=True)
    options = [f"--job.dump_folder={tmp_path / 'outputs/recipe'}", "--checkpoint.enable"]
    assert shape_of(load(tmp_path, resolved, *options).model) == SHAPE


def test_a_tokenizer_json_comes_first_and_one_that_is_set_stays(folder, tmp_path):
    (folder / "tokenizer.json").write_text("{}")
    path = f"--checkpoint.initial_load_path={folder}"
    assert load(tmp_path, RECIPE, path).model.tokenizer_path == str(folder / "tokenizer.json")
    mine = f"--model.tokenizer_path={DEBUG_TOKENIZER}"
    assert load(tmp_path, RECIPE, path, mine).model.tokenizer_path == str(DEBUG_TOKENIZER)


def test_without_a_tokenizer_in_the_folder_one_is_asked_for(folder, tmp_path):
    (folder / "tokenizer.model").unlink()
    (message,) = mistakes(tmp_path, RECIPE, f"--checkpoint.initial_load_path={folder}")
    assert message == (
        f'default: model.tokenizer_path = "" names no file, and {folder}'
        " (checkpoint.initial_load_path) has neither tokenizer.json nor tokenizer.model; use"
        " the model's tokenizer.json or tokenizer.model (docs/first-real-run.md, step 2), or"
        ' "../assets/tokenizer/debug.model"'
    )


FLAVOR_DEBUG = ["--model.flavor=debug", "--model.tokenizer_path="]


def test_an_empty_path_is_the_tokenizer_of_the_folder_with_any_flavor(folder, tmp_path):
    content = config_to_hf(LLAMA3.flavors["debug"], torch.bfloat16)
    (folder / "config.json").write_text(json.dumps(content))
    path = f"--checkpoint.initial_load_path={folder}"
    config = load(tmp_path, RECIPE, path, *FLAVOR_DEBUG)
    assert config.model.flavor == "debug"
    assert config.model.tokenizer_path == str(folder / "tokenizer.model")
    check_all(config, 1)
    # also beside weights of torchtitan, which give no shape
    (folder / "config.json").unlink()
    (folder / ".metadata").touch()
    config = load(tmp_path, RECIPE, path, *FLAVOR_DEBUG)
    assert config.model.tokenizer_path == str(folder / "tokenizer.model")


def test_the_family_is_that_of_the_folder_with_any_flavor(folder, tmp_path):
    """The flavors of the default family have other names."""
    small = find_family("qwen3").flavors["0.6B"]
    (folder / "config.json").write_text(json.dumps(config_to_hf(small, torch.bfloat16)))
    path = f"--checkpoint.initial_load_path={folder}"
    config = load(tmp_path, RECIPE, path, "--model.flavor=0.6B")
    assert config.model.name == "qwen3"
    assert config.origin("model.name") == str(folder)
    assert shape_of(config.model).dim == small.dim
    message = mistakes(tmp_path, RECIPE, path, "--model.flavor=8B", "--model.name=llama3")[0]
    assert 'model.name = "llama3" is not that of checkpoint.initial_load_path' in message


def test_a_missing_tokenizer_is_told_with_that_of_the_folder(folder, tmp_path):
    missing = tmp_path / "llama3/tokenizer.model"
    more = [f"--checkpoint.initial_load_path={folder}", f"--model.tokenizer_path={missing}"]
    config = load(tmp_path, RECIPE, *more)
    with pytest.raises(ConfigError) as error:
        check_all(config, 1)
    assert str(error.value) == (
        f'command line: model.tokenizer_path = "{missing}" is not there, but'
        f" checkpoint.initial_load_path has {folder}/tokenizer.model; use that, or"
        ' tokenizer_path = ""'
    )


def test_a_run_with_steps_whose_weights_are_gone_is_told_the_way_on(folder, tmp_path):
    run = tmp_path / "run"
    options = [f"--job.dump_folder={run}", "--checkpoint.enable"]
    options.append(f"--checkpoint.initial_load_path={folder}")
    resolved = to_toml(load(tmp_path, RECIPE, *options))
    (folder / "config.json").unlink()
    (message,) = mistakes(tmp_path, RECIPE, *options)
    assert message.endswith(
        "has no weights; use a Hugging Face folder, a checkpoint or a run's folder"
    )
    (run / "checkpoint/step-20").mkdir(parents=True)
    (run / "config.toml").write_text(resolved)
    (message,) = mistakes(tmp_path, RECIPE, *options)
    assert message.endswith(
        f"; with {run}/config.toml as recipe the run resumes from its own step-20 without weights"
    )
    config = load_config(run / "config.toml")
    check_keys(config)
    assert shape_of(config.model) == SHAPE


def test_every_key_that_differs_is_told_at_once(folder, tmp_path):
    text = f"{RECIPE}[model]\nrope_theta = 5e5\nnorm_eps = 1e-5\ndim = 64\nmax_seq_len = 99\n"
    told = mistakes(
        tmp_path,
        text,
        "--model.tied_embeddings=no",
        "--model.rope_scaling_factor=4",
        f"--checkpoint.initial_load_path={folder}",
    )
    recipe, there = tmp_path / "recipe.toml", f"{folder}/config.json has"
    for line in (
        f"{recipe}: model.rope_theta = 500000.0 is not that of checkpoint.initial_load_path:"
        f" {there} 20000.0; use rope_theta = 20000.0, or remove it",
        f"{recipe}: model.norm_eps = 1e-05 is not that of checkpoint.initial_load_path: {there}"
        " 1e-06; use norm_eps = 1e-06, or remove it",
        'command line: model.tied_embeddings = "no" is not that of checkpoint.initial_load_path:'
        f' {there} "yes"; use tied_embeddings = "yes", or remove it',
        "command line: model.rope_scaling_factor = 4.0 is not that of"
        f" checkpoint.initial_load_path: {there} 8.0; use rope_scaling_factor = 8.0, or remove it",
    ):
        assert line in told
    assert len(told) == 4


def test_a_flavor_that_the_weights_are_not_is_told_with_all_that_differs(folder, tmp_path):
    path = f"--checkpoint.initial_load_path={folder}"
    with pytest.raises(ConfigError) as error:
        check_keys(load_config(DEBUG, [path]))
    (message,) = error.value.args
    assert message == (
        f'{DEBUG}: model.flavor = "debug" is not that of checkpoint.initial_load_path'
        f" ({folder}/config.json): dim = 256 (not 64), n_layers = 6 (not 3), n_heads = 8 (not 4),"
        ' n_kv_heads = 4 (not 2), hidden_dim = 768 (not 96), tied_embeddings = "no" (not "yes"),'
        " rope_theta = 500000.0 (not 20000.0), norm_eps = 1e-05 (not 1e-06), head_dim = 32 (not 16),"
        ' rope_scaling_factor = 1.0 (not 8.0); use "from_weights"'
    )
    assert shape_of(load_config(DEBUG, [path, "--model.flavor=from_weights"]).model) == SHAPE


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--model.flavor=from_weights"],
            'command line: model.flavor = "from_weights" needs checkpoint.initial_load_path; use a',
        ),
        (["--checkpoint.initial_load_path=PATH/nowhere"], 'nowhere": is not a folder; use a'),
        (["--checkpoint.initial_load_path=PATH"], "has no weights; use a Hugging Face folder"),
        (["--checkpoint.initial_load_path=PATH/titan"], 'titan": a checkpoint of torchtitan does'),
        (
            ["--checkpoint.initial_load_path=PATH/gpt"],
            "gpt\": config.json: model_type = 'gpt2': expected 'llama' or 'qwen3' or 'qwen3_moe'; hidden_size = None",
        ),
        (
            ["--checkpoint.initial_load_path=PATH/classes"],
            "architectures = ['LlamaForSequenceClassification']: expected ['LlamaForCausalLM'] with"
            " model_type = 'llama'",
        ),
        (["--checkpoint.initial_load_path=PATH/text"], 'text": config.json is not JSON'),
        (
            ["--checkpoint.initial_load_path=PATH/wide"],
            "config.json: model.hidden_dim = 9999999: expected an integer",
        ),
    ],
)
def test_a_folder_that_gives_no_model_is_told(tmp_path, options, words):
    for name, file, text in (
        ("titan", ".metadata", ""),
        ("gpt", "config.json", '{"model_type": "gpt2"}'),
        (
            "classes",
            "config.json",
            json.dumps({**JSON, "architectures": ["LlamaForSequenceClassification"]}),
        ),
        ("text", "config.json", "{"),
        ("wide", "config.json", json.dumps({**JSON, "intermediate_size": 9_999_999})),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    options = [option.replace("PATH", str(tmp_path)) for option in options]
    assert any(words in message for message in mistakes(tmp_path, RECIPE, *options))


def test_a_family_that_is_set_stays_and_another_one_is_refused(folder, tmp_path):
    """Also that of the default, which is none of a recipe that does not name it."""
    content = {**JSON, "model_type": "qwen3", "head_dim": 32}
    (folder / "config.json").write_text(json.dumps(content))
    path = f"--checkpoint.initial_load_path={folder}"
    assert load(tmp_path, RECIPE, path).model.name == "qwen3"
    (message,) = mistakes(tmp_path, RECIPE, path, "--model.name=llama3")
    assert message == (
        'command line: model.name = "llama3" is not that of checkpoint.initial_load_path:'
        f' {folder / "config.json"} has "qwen3"; use name = "qwen3", or remove it'
    )


def test_a_step_or_the_newest_of_a_run_gives_model_and_tokenizer(tmp_path):
    shape = {**dataclasses.asdict(SHAPE), "n_layers": 2}
    recipe = {"model": {"tokenizer_path": str(DEBUG_TOKENIZER)}}
    for number in (9, 10):
        step = tmp_path / f"run/checkpoint/step-{number}"
        step.mkdir(parents=True)
        model = {**shape, "n_layers": number}
        state = {"identity": {"model": model, "recipe": recipe}}
        (step / "state.json").write_text(json.dumps(state))
    for path, layers in (("run", 10), ("run/checkpoint/step-9", 9)):
        config = load(tmp_path, RECIPE, f"--checkpoint.initial_load_path={tmp_path / path}")
        assert shape_of(config.model) == dataclasses.replace(SHAPE, n_layers=layers)
        assert config.model.tokenizer_path == str(DEBUG_TOKENIZER)


def test_a_step_that_does_not_say_its_family_is_refused(tmp_path):
    model = dataclasses.asdict(SHAPE)
    del model["family"]
    (tmp_path / "state.json").write_text(json.dumps({"identity": {"model": model}}))
    path = f"--checkpoint.initial_load_path={tmp_path}"
    (message,) = mistakes(tmp_path, RECIPE, path)
    assert message.endswith("state.json has no 'family'")


def token_of(line):
    """Return the token of a line in tiktoken's format, as tokenizer.json has it."""
    token = base64.b64decode(line.split()[0])
    return "".join(CHARACTERS[byte] for byte in token)


def other_tokenizer(folder, tmp_path, lines):
    """Return what the error for a tokenizer of these lines says beside the names of the files."""
    other = tmp_path / "other.model"
    ranked = (f"{line.split()[0]} {rank}\n" for rank, line in enumerate(lines))
    other.write_text("".join(ranked))
    options = (f"--checkpoint.initial_load_path={folder}", f"--model.tokenizer_path={other}")
    config = load(tmp_path, RECIPE, *options)
    with pytest.raises(ConfigError) as error:
        check_all(config, 1)
    before = (
        f'command line: model.tokenizer_path = "{other}" gives text other ids than the tokenizer of'
        f" checkpoint.initial_load_path, {folder}/tokenizer.json"
    )
    after = '; use that, or tokenizer_path = ""'
    assert str(error.value).startswith(before)
    assert str(error.value).endswith(after)
    return str(error.value)[len(before) : -len(after)]


def test_two_tokens_that_changed_their_ids_make_another_tokenizer(folder, tmp_path):
    """Also bytes, which are no text alone."""
    theirs = to_json(load_tokenizer(DEBUG_TOKENIZER))
    (folder / "tokenizer.json").write_text(json.dumps(theirs))
    lines = DEBUG_TOKENIZER.read_text().splitlines()
    one, two = 0x80, 0x81
    lines[one], lines[two] = lines[two], lines[one]
    words = f' (first {one}: "{token_of(lines[one])}", and there "{token_of(lines[two])}")'
    assert other_tokenizer(folder, tmp_path, lines) == words


def test_a_tokenizer_may_have_other_names_of_special_tokens_and_more_tokens(folder, tmp_path):
    content = to_json(load_tokenizer(DEBUG_TOKENIZER))
    added = content["added_tokens"]
    assert added[2]["content"] == "<|reserved_special_token_0|>"
    added[2]["content"] = "<|think|>"
    added.append({**added[-1], "id": added[-1]["id"] + 1, "content": "more", "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    options = (
        f"--checkpoint.initial_load_path={folder}",
        f"--model.tokenizer_path={DEBUG_TOKENIZER}",
    )
    config = load(tmp_path, RECIPE, *options)
    check_all(config, 1)


ROPE = {
    "rope_scaling beside rope_parameters": (
        {"rope_scaling": SCALING, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        (20_000.0, RopeScaling(8.0, 1.0, 3.0, 64)),
    ),
    "rope_parameters with scaling beside rope_scaling without": (
        {"rope_scaling": {"rope_type": "default"}, "rope_parameters": SCALING},
        (20_000.0, None),
    ),
    "an empty rope_scaling": (
        {"rope_scaling": {}, "rope_parameters": {**SCALING, "rope_theta": 5e5}},
        (5e5, RopeScaling(8.0, 1.0, 3.0, 64)),
    ),
    "no original length": (
        {"rope_scaling": {**SCALING, "original_max_position_embeddings": ...}},
        (20_000.0, RopeScaling(8.0, 1.0, 3.0, 512)),
    ),
    "an original length beside": (
        {"rope_scaling": SCALING, "original_max_position_embeddings": 128},
        (20_000.0, RopeScaling(8.0, 1.0, 3.0, 128)),
    ),
    "type, its earlier name": (
        {"rope_scaling": {**SCALING, "rope_type": ..., "type": "llama3"}},
        (20_000.0, RopeScaling(8.0, 1.0, 3.0, 64)),
    ),
    "a theta in rope_parameters": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        (5e5, None),
    ),
}


def with_rope(case):
    """config.json with the settings of a case."""
    settings = {
        key: {name: inner for name, inner in value.items() if inner is not ...}
        if isinstance(value, dict)
        else value
        for key, value in ROPE[case][0].items()
    }
    return {**JSON, **settings}


@pytest.mark.parametrize("case", ROPE)
def test_rotary_settings_are_read_as_transformers_reads_them(case):
    shape = config_from_hf(with_rope(case))
    assert (shape.rope_theta, shape.rope_scaling) == ROPE[case][1]


def test_rotary_settings_are_those_that_transformers_computes_with(tmp_path):
    from in_transformers import in_files

    from titan_lite.models.transformer import Transformer

    transformers = pytest.importorskip("transformers")
    content = with_rope("an empty rope_scaling")
    shape = config_from_hf(content)
    (tmp_path / "config.json").write_text(json.dumps(content))
    theirs = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(tmp_path))
    ours = Transformer(shape)
    ours.init_weights(seed=0)
    theirs.load_state_dict(in_files(ours, shape), strict=False)
    tokens = torch.arange(400)[None] * 37 % 2048
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type = 'yarn': expected"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear': expected"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters: expected the same settings for all layers",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: expected 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_theta": float("inf")}, "rope_theta = inf: expected a number above 0"),
        ({"rope_scaling": {**SCALING, "factor": None}}, "rope_scaling: factor = None: expected"),
        ({"rope_scaling": {**SCALING, "factor": 0.5}}, "rope_scaling: factor = 0.5: expected"),
        (
            {"rope_scaling": {**SCALING, "low_freq_factor": 3.0}},
            "rope_scaling: high_freq_factor is not above low_freq_factor",
        ),
    ],
)
def test_rotary_settings_that_are_not_ours_are_refused(change, words):
    with pytest.raises(ValueError) as error:
        keys_of_config_json({**JSON, **change})
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--model.rope_scaling_low_freq_factor=2"],
            "model.rope_scaling_factor = 0.0 leaves the rotary frequencies as they are, so"
            " rope_scaling_low_freq_factor has no effect",
        ),
        (
            ["--model.rope_scaling_low_freq_factor=4", "--model.rope_scaling_factor=8"],
            "model.rope_scaling_high_freq_factor = 4.0 is not above rope_scaling_low_freq_factor ="
            " 4.0; use at least 8.0",
        ),
    ],
)
def test_scaling_that_is_none_is_told(options, words):
    with pytest.raises(ConfigError) as error:
        check_keys(load_config(DEBUG, options))
    assert words in str(error.value)


FULL = "full_attention"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"layer_types": [FULL, "sliding_attention", FULL]},
            "layer_types has 'sliding_attention': expected 'full_attention' for all layers",
        ),
        ({"use_sliding_window": True}, "use_sliding_window = True: expected False"),
        ({"is_causal": False}, "is_causal = False: expected True"),
        (
            {"embedding_multiplier": 12.0},
            "embedding_multiplier = 12.0: may change what the model computes, and is not known here;"
            " remove it if it does not",
        ),
        ({"auto_map": {"AutoModel": "own.Model"}}, "auto_map = {'AutoModel': 'own.Model'}: may"),
    ],
)
def test_a_key_that_may_change_what_is_computed_is_refused(change, words):
    with pytest.raises(ValueError) as error:
        keys_of_config_json({**JSON, **change})
    assert str(error.value) == words or (words.endswith("may") and words in str(error.value))


OWN_FAMILY = """
from dataclasses import replace
from titan_lite.config.families import LLAMA3
from titan_lite.models.llama3 import build_block

format = LLAMA3.huggingface
fixed = {**format.fixed, "logits_scaling": 1.0}
FAMILY = replace(LLAMA3, huggingface=replace(format, model_type="mine", fixed=fixed))
"""


def test_a_family_of_ones_own_says_which_keys_it_knows(tmp_path):
    family = tmp_path / "mine.py"
    family.write_text(OWN_FAMILY)
    content = {**JSON, "model_type": "mine", "logits_scaling": 1.0}
    assert keys_of_config_json(content, str(family))["name"] == str(family)
    with pytest.raises(ValueError, match=r"logits_scaling = 2\.0: expected 1\.0$"):
        keys_of_config_json({**content, "logits_scaling": 2.0}, str(family))
    words = r"residual = 0\.5: may .* does not, or give it to HuggingFace\(fixed=\.\.\.\) of the"
    with pytest.raises(ValueError, match=words):
        keys_of_config_json({**content, "residual": 0.5}, str(family))


@pytest.mark.parametrize("kind", ["LlamaConfig", "Qwen3Config"])
def test_what_transformers_writes_is_known(kind):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, kind)(
        num_hidden_layers=3, attention_dropout=0.1, sliding_window=4096
    )
    content = json.loads(config.to_json_string(use_diff=False))
    assert keys_of_config_json({**content, "layer_types": [FULL] * 3})["n_layers"] == 3


def test_a_null_is_as_absent_where_transformers_has_it_so():
    found = keys_of_config_json({**JSON, "num_key_value_heads": None, "head_dim": None})
    assert found["n_kv_heads"] == 4
