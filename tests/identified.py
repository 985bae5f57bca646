"""The identity of documents.

digest_of(identify(Data(dataset="local", path="corpus")))
"""

from titan_lite.data.listing import list_sources


def identify(data):
    """The identity of each source, as its documents are now."""
    return [listing.identity for listing in list_sources(data)]
