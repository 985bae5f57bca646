"""The values that buckets by the cost model add to compile.bucketing. Imports no torch."""

KEYS = ()
VALUES = {
    "compile.bucketing": {
        "greedy": "as many as fit under the computation before them, by the cost model of machine",
        "auto": "Inductor's overlap scheduler, with the same cost model",
    }
}
TENSORS: dict[str, str] = {}
