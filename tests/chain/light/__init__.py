"""The pipeline without its mathematics: the real stages, supervisor, store, checkpoint writer and exit table, in seconds.

    program       what stands for `trnpipe` in a job's command; its ranks run `rank`
    rank          the real `pipeline.stages.rank`, with `mathematics` in place of the modules that load torch
    mathematics   a model is a digest, an embedding is a hash of model and tokens
    exchange      collectives of a gang over TCP: a peer that is gone is noticed as in a real one
    stages        health_check, train and evaluate, which are mathematics for the most part

prepare, embed, publish and report are the real modules. Nothing here knows of any fault: those come from outside.
"""
