"""The search server answers searches of one index over HTTP, with the protocol of Search-R1's retrieval server.

`python -m tasks.server --index artifacts/index` starts it; `tasks.retrieval.remote` is its client. Concurrent
requests are merged into batches, answers are kept on disk, and everything a client sends is bounded. A request is
answered, refused with a reason or timed out; it never waits for ever. This room ranks nothing; `tasks.retrieval` does.
No stage of the pipeline imports it, so a change here makes no stage run again.
"""
