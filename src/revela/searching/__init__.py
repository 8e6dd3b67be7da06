"""Search your own text: an index, and the service around it.

index.py opens and searches an index (index_search.py); changes.py changes it, and sync.py updates
it from its files. table.py holds its rows, state.py their version and counts. folder_index.py keeps
the index of a folder in the cache. server/ has the HTTP service, its page, and MCP.
"""
