"""Search one's own text: an index, and the service around it.

index.py opens and searches an index, by index_search.py; changes.py changes it, sync.py follows its
files; table.py holds its rows, state.py what is true of them. folder_index.py keeps the index of a
folder in the cache. server/ has the HTTP service, its page, and MCP.
"""
