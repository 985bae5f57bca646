"""Objects over ranks; over several of them, all tests with more than one process show it."""

from titan_lite.ranks import gather_objects


def test_a_process_without_a_group_has_its_own_alone():
    assert gather_objects("value") == ["value"]
