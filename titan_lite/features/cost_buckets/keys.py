"""The values that buckets by the cost model add to compile.bucketing. Imports no torch."""

KEYS = ()
VALUES = {
    "compile.bucketing": {
        "greedy": "as many as the computation before them hides, by the cost model",
        "auto": "Inductor's overlap scheduler, with that cost model",
    }
}
TENSORS: dict[str, str] = {}
