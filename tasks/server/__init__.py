"""The search server: one index answered over HTTP, `POST /retrieve` as Search-R1's clients and server have it.

`python -m tasks.server --index artifacts/index` starts it; `tasks.retrieval.remote` is its client. Concurrent
requests are merged into batches, answers are kept on disk, everything a client sends is bounded, and a request is
answered, refused with a reason or timed out, never kept waiting. This room ranks nothing; that is `tasks.retrieval`.
No stage of the pipeline imports it, so that a change here trains nothing anew.
"""
