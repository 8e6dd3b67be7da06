"""HTTP: embeddings in OpenAI's shape, search, and a page to try it on. Nothing else knows
starlette, uvicorn or the metrics' library.
"""
