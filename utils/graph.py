"""Reads autograd's record of which operation needed the result of which."""


def longest_chain(result) -> int:
    """The most operations behind `result` of which each had to wait for the one before.

    result: a tensor that requires gradients; its graph is walked, nothing is run.
    """
    length, waiting = {}, [result.grad_fn]
    while waiting:
        node = waiting[-1]
        before = [n for n, _ in node.next_functions if n is not None]
        missing = [n for n in before if n not in length]
        waiting += missing
        if not missing:
            length[node] = 1 + max((length[n] for n in before), default=0)
            waiting.pop()
    return length[result.grad_fn]
