import logging

import pytest


@pytest.fixture(autouse=True)
def no_record_of_each_trace(monkeypatch):
    """pytest would keep every record of torch's structured log."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "level", logging.ERROR)
