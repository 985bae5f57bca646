"""No keys: model.name is every family's."""

KEYS = ()
TENSORS: dict[str, str] = {}
