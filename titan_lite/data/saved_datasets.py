"""Read from a folder of `Dataset.save_to_disk` the tables that are the dataset, and nothing else.

    state.json               {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], ...}
    dataset_info.json
    data-00000-of-00001.arrow
    cache-5d1f6a.arrow       what `map` and `filter` have left there later: no part of the dataset

A `DatasetDict` has such a folder for each split, and dataset_dict.json, which names them.
"""

import json
import posixpath
from collections.abc import Callable, Collection

from titan_lite.config import ConfigError
from titan_lite.config.errors import MachineError, error_because_of, is_of_machine
from titan_lite.data.readers import list_names

STATE = "state.json"
INFO = "dataset_info.json"
SPLITS = "dataset_dict.json"


def without_caches(files: Collection[str], read: Callable[[str], bytes], where: str) -> list[str]:
    """Return the files of a corpus, of each saved dataset its tables alone.

    files: paths with "/". read: returns the content of one. where: the key and its value, for
    messages. Raises ConfigError for a DatasetDict of several splits, which are not to be trained on
    together, and for a dataset whose description cannot be read.
    """
    known = set(files)
    tables: dict[str, set[str]] = {}  # by folder of a dataset
    descriptions = set()  # of DatasetDicts
    for file in files:
        folder, name = posixpath.split(file)
        if name == STATE and posixpath.join(folder, INFO) in known:
            tables[folder] = _tables(file, read, where)
        elif name == SPLITS and (splits := _splits(file, read)):
            descriptions.add(file)
            if len(splits) > 1:
                raise ConfigError(
                    f"{where}: {folder} is a DatasetDict of the splits {list_names(splits)}, which"
                    " are not one corpus; use the folder of one, such as path ="
                    f' "{folder}/{splits[0]}"'
                )
    return [
        file
        for file in files
        if file not in descriptions and file in tables.get(posixpath.dirname(file), known)
    ]


def _tables(state: str, read: Callable[[str], bytes], where: str) -> set[str]:
    """Return the paths of a dataset's tables. Raises ConfigError and MachineError."""
    folder = posixpath.dirname(state)
    try:
        listed = json.loads(read(state))["_data_files"]
        return {posixpath.join(folder, table["filename"]) for table in listed}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise error_because_of(
            error,
            f"{where}: {folder} was written by `datasets`, and its {STATE} cannot be read; save the"
            " dataset again, or use a pattern of its tables, such as path ="
            f' "{folder}/data-*.arrow"',
        ) from None


def _splits(description: str, read: Callable[[str], bytes]) -> list[str]:
    """Return the splits of a DatasetDict; [] for another file of that name. Raises MachineError."""
    try:
        return [str(name) for name in json.loads(read(description))["splits"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if is_of_machine(error):
            raise MachineError(f"{description} cannot be read: {error}") from None
        return []
