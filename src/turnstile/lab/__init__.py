"""Each mechanism of a server, with it and without it, on the engine that serves.

::

    parts/        what is shown: each computes a story of sentences, tables, plots and claims
    session       runs parts, shows them, says whether every claim holds
    story         those stories as values; terminal and page (with svg) show them
    load, drive   who asks when, and what became of it, in steps and in seconds
    continuous    the scheduler that serves, a step at a time; policies are what it can be given
    static        batches as they were before; contiguous is the memory they had
    attention     attention over pages in three forms; filling, what a memory holds
    capacity      the most users whose limits are kept
    model, tiny   what computes: any model that can be served, or one made in memory
"""
