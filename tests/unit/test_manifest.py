"""Hashes of samples, by which documents and initial weights are compared; files that are replaced
as a whole.
"""

import pytest

from titan_lite.data.listing import HASH_DIGITS, hash_of
from titan_lite.manifest import MAX_WHOLE, replace_text, sampled_digest, sampled_sha256


@pytest.mark.parametrize("size", [1, MAX_WHOLE, MAX_WHOLE + 1, 5 * MAX_WHOLE])
def test_a_sampled_hash_sees_the_first_and_the_last_byte_and_is_one_for_documents_and_weights(
    size, tmp_path
):
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    with path.open("rb") as file:
        assert hash_of(str(path)) == sampled_sha256(file)[:HASH_DIGITS]
    digests = {sampled_digest([path])}
    for position in {0, size - 1}:
        content = bytearray(size)
        content[position] = 1
        path.write_bytes(content)
        digests.add(sampled_digest([path]))
    assert len(digests) == 1 + len({0, size - 1})


def test_a_digest_of_files_depends_on_their_names_and_sizes(tmp_path):
    for name, content in (("a", b"x"), ("b", b"x"), ("c", b"")):
        (tmp_path / name).write_bytes(content)
    found = [sampled_digest([tmp_path / name]) for name in "abc"]
    assert len(set(found)) == 3
    both = [tmp_path / "a", tmp_path / "b"]
    assert sampled_digest(both) == sampled_digest(reversed(both))


@pytest.mark.parametrize("durable", [False, True])
def test_a_text_is_replaced_whole_or_not_at_all(durable, tmp_path, monkeypatch):
    path = tmp_path / "file"
    replace_text(path, "before", durable=durable)

    def full(self, text, encoding=None):
        with self.open("w") as file:
            file.write(text[:2])
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(type(path), "write_text", full)
        with pytest.raises(OSError, match="no space left"):
            replace_text(path, "after", durable=durable)
    assert path.read_text() == "before"
    replace_text(path, "after", durable=durable)
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]
