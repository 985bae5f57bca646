"""[validation] with documents of its own: the same keys as [data], and nothing of [data] held out."""

import json
import shutil

import pytest
from tiny import DEBUG, DEBUG_TOKENIZER

from titan_lite.config import ConfigError, Data, load_config, to_toml
from titan_lite.data.tokenizer import load_tokenizer
from titan_lite.rules import check_all, check_keys
from titan_lite.tools.prepare import prepare


@pytest.fixture
def corpus(tmp_path):
    """Ten documents to train on, in two files, and four to validate on."""
    (tmp_path / "train").mkdir()
    for name, numbers in (
        ("train/a.jsonl", range(5)),
        ("train/b.jsonl", range(5, 10)),
        ("val.jsonl", range(10, 14)),
    ):
        lines = (json.dumps({"text": f"document {i}", "body": f"body {i}"}) for i in numbers)
        (tmp_path / name).write_text("".join(line + "\n" for line in lines))
    return tmp_path


def on(corpus, *options):
    """The debug recipe with training on files."""
    paths = ["--data.dataset=local", f"--data.path={corpus}/train"]
    return load_config(DEBUG, [*paths, *options])


def checked(config):
    check_keys(config)
    check_all(config, 2)
    return config


def test_a_path_is_enough(corpus):
    config = checked(on(corpus, f"--validation.path={corpus}/val.jsonl"))
    data = config.validation_data
    assert (data.dataset, data.path) == ("local", f"{corpus}/val.jsonl")
    assert data.key("path") == "validation.path"
    assert data.key("num_workers") == "data.num_workers"
    assert config.data.validation_fraction == 0  # nothing is held out
    again = corpus / "again.toml"
    again.write_text(to_toml(config))
    assert load_config(again).model_dump() == config.model_dump()


def test_a_path_turns_it_on_where_the_recipe_does_not_say(corpus):
    quiet = corpus / "quiet.toml"
    quiet.write_text(f'[model]\ntokenizer_path = "{DEBUG_TOKENIZER}"\n')
    path = f"--validation.path={corpus}/val.jsonl"
    assert not load_config(quiet).validation.enable
    assert checked(load_config(quiet, [path])).validation.enable
    assert not checked(load_config(quiet, [path, "--validation.no-enable"])).validation.enable


def test_without_documents_of_its_own_some_are_held_out(corpus):
    config = checked(on(corpus))
    assert config.validation_data is config.data
    assert config.data.validation_fraction == 0.05


def test_documents_are_held_out_beside_them_if_asked(corpus):
    options = [f"--validation.path={corpus}/val.jsonl", "--data.validation_fraction=0.2"]
    config = checked(on(corpus, *options))
    assert config.data.validation_fraction == 0.2
    assert config.validation_data.validation_fraction == 1


def test_other_keys_are_as_of_data(corpus):
    options = [f"--validation.path={corpus}/val.jsonl", "--data.text_field=body"]
    assert checked(on(corpus, *options)).validation_data.text_field == "body"
    options += ["--validation.text_field=text", "--data.shuffle_buffer=7"]
    data = checked(on(corpus, *options)).validation_data
    assert (data.text_field, data.shuffle_buffer) == ("text", 7)
    hub = on(corpus, "--validation.dataset=owner/name", "--validation.subset=en").validation_data
    assert (hub.dataset, hub.subset, hub.split) == ("owner/name", "en", "validation")


def test_a_mixture_to_train_on_has_one_set_to_validate_on_or_several(corpus):
    two = f'[{{dataset = "local", path = "{corpus}/train/a.jsonl"}}, {{dataset = "stdlib"}}]'
    config = load_config(DEBUG, [f"--data.sources={two}", f"--validation.path={corpus}/val.jsonl"])
    assert checked(config).validation_data.source_names() == []
    assert [part.validation_fraction for _, part in config.data.mixture()] == [0, 0]
    some = f'[{{dataset = "local", path = "{corpus}/val.jsonl"}}, {{dataset = "c4", weight = 3}}]'
    data = load_config(DEBUG, [f"--validation.sources={some}"]).validation_data
    assert data.source_names() == ["val", "c4"]
    assert [share for share, _ in data.mixture()] == [0.25, 0.75]
    parts = [part for _, part in data.mixture()]
    assert [part.key("path") for part in parts] == [
        "validation.sources[1].path",
        "validation.sources[2].path",
    ]
    assert [part.validation_fraction for part in parts] == [1, 1]


WRONG = {
    "nothing to read": (
        ["--validation.text_field=x"],
        'validation.text_field = "x" has no effect without documents of its own; use',
    ),
    "path that is not read": (
        ["--validation.dataset=c4", "--validation.path=V"],
        'validation.path = "V" is not read for validation.dataset = "c4"',
    ),
    "no file": (
        ["--validation.path=V.absent"],
        'validation.path = "V.absent": no such file',
    ),
    "the files of training": (
        ["--validation.path=T/b.jsonl"],
        'validation.path = "T/b.jsonl" has a file of data.path, or a copy (b.jsonl); use documents that are not trained on',
    ),
    "more files of training, linked": (
        ["--validation.path=L"],
        'validation.path = "L" has 2 files of data.path, or copies (a.jsonl); use',
    ),
    "what is trained on of another kind": (
        ["--data.dataset=stdlib", "--data.path=", "--validation.dataset=stdlib"],
        'validation.dataset = "stdlib" has documents of data.dataset (',
    ),
}


@pytest.mark.parametrize("about", WRONG)
def test_what_cannot_be_is_one_line(about, corpus):
    options, words = WRONG[about]
    names = {"V": str(corpus / "val.jsonl"), "T": str(corpus / "train"), "L": str(corpus / "link")}
    (corpus / "link").symlink_to(corpus / "train")

    def named(text):
        for letter, path in names.items():
            text = text.replace(f"={letter}", f"={path}").replace(f'"{letter}', f'"{path}')
            text = text.replace(f"({letter}", f"({path}")
        return text

    arguments = [named(option) for option in options]
    paths = ["--data.dataset=local", f"--data.path={corpus}/train"]
    with pytest.raises(ConfigError) as error:
        checked(load_config(DEBUG, [*paths, *arguments]))
    (message,) = error.value.args
    assert named(words) in message


def message_of(config):
    with pytest.raises(ConfigError) as error:
        checked(config)
    (message,) = error.value.args
    return message


def test_a_copy_of_what_is_trained_on_is_one_line_with_both_names(corpus):
    copy = corpus / "copy.jsonl"
    shutil.copy(corpus / "train" / "b.jsonl", copy)
    assert message_of(on(corpus, f"--validation.path={copy}")) == (
        f'command line: validation.path = "{copy}" has a file of data.path, or a copy'
        " (copy.jsonl is b.jsonl there); use documents that are not trained on"
    )
    shutil.copytree(corpus / "train", corpus / "copies")
    sources = f'[{{dataset = "local", path = "{corpus}/copies/*.jsonl"}}]'
    message = message_of(on(corpus, f"--validation.sources={sources}"))
    assert "validation.sources[1].path" in message
    assert "has 2 files of data.path, or copies (a.jsonl); use" in message


def test_sources_with_the_same_documents_hold_none_out(corpus):
    """The names of a document differ, by which it is held out of one source and not of the other."""
    (corpus / "train/sub").mkdir()
    shutil.move(corpus / "train/b.jsonl", corpus / "train/sub/b.jsonl")
    paths = [f"{corpus}/train", f"{corpus}/train/sub"]

    def mixed(*options, fields=("text", "text")):
        sources = ", ".join(
            f'{{dataset = "local", path = "{path}", text_field = "{field}"}}'
            for path, field in zip(paths, fields, strict=True)
        )
        return load_config(DEBUG, [f"--data.sources=[{sources}]", *options])

    assert message_of(mixed("--validation.enable")) == (
        f'command line: data.sources[2].path = "{paths[1]}" has a file of data.sources[1].path, or'
        " a copy (b.jsonl is sub/b.jsonl there): what is held out of one source may be trained on in"
        " the other; use sources without common documents, or validation.path"
    )
    checked(mixed("--validation.enable", fields=("text", "body")))
    paths[1] = f"{corpus}/train/**/b.jsonl"  # with the same names
    checked(mixed("--validation.enable"))
    paths[1] = f"{corpus}/train/sub"
    checked(mixed("--validation.no-enable"))
    checked(mixed(f"--validation.path={corpus}/val.jsonl"))


def test_empty_files_are_no_copies_of_each_other(corpus):
    own = corpus / "own"
    own.mkdir()
    shutil.copy(corpus / "val.jsonl", own / "val.jsonl")
    for folder in (own, corpus / "train"):
        (folder / "empty.jsonl").write_text("")
    checked(on(corpus, f"--validation.path={own}"))


def prepared(corpus, source, name):
    """Prepare documents and return the folder."""
    data = Data(dataset="local", path=str(source), num_workers=0)
    prepare(data, load_tokenizer(str(DEBUG_TOKENIZER)), corpus / name, workers=0)
    return corpus / name


def test_a_copy_of_what_is_prepared_is_known_and_other_documents_are_not(corpus):
    training = prepared(corpus, corpus / "train", "prepared")
    own = prepared(corpus, corpus / "val.jsonl", "own")
    copy = shutil.copytree(training, corpus / "copy")
    options = ["--data.dataset=prepared", f"--data.path={training}"]
    options += ["--validation.dataset=prepared"]
    checked(load_config(DEBUG, [*options, f"--validation.path={own}"]))
    message = message_of(load_config(DEBUG, [*options, f"--validation.path={copy}"]))
    assert f'validation.path = "{copy}" has documents of data.path (' in message


def test_turned_off_its_documents_are_not_read(corpus):
    config = on(corpus, "--validation.path=absent", "--validation.no-enable")
    assert checked(config).data.validation_fraction == 0  # training is the same
