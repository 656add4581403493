"""Reference answers of lesson 12."""

import torch
from torch import nn

from solutions.feed_forward import SwiGLU
from solutions.forward_pass import count_parameters


def top_k_routing(logits, k):
    """Which experts a token goes to, and how much each of them counts.

    Args:
        logits: the router's scores, `(N, E)`: tokens, experts.
        k: how many experts each token goes to.

    Returns:
        Weights and expert ids (int64), both `(N, k)`, the highest score first. The
        weights, in the dtype of `logits`, are softmax over the k kept scores; with
        k = 1 the softmax over all scores, so that the router gets a gradient.

    Raises:
        ValueError: if k is not in 1 … E; names both numbers.

    Jiang et al. (2024), "Mixtral of Experts", section 2.1; k = 1: Fedus, Zoph and
    Shazeer (2021), "Switch Transformers", section 2.1.
    """
    n_experts = logits.shape[-1]
    if not 1 <= k <= n_experts:
        raise ValueError(f"k is {k}, but must be in 1 to {n_experts}, the experts")
    ### BEGIN SOLUTION
    kept, experts = logits.topk(k, dim=-1)  # N k, N k
    if k == 1:
        return torch.softmax(logits, dim=-1).gather(1, experts), experts
    return torch.softmax(kept, dim=-1), experts
    ### END SOLUTION


class MixtureOfExperts(nn.Module):
    """Several feed-forward networks, of which each token passes through k.

    Args:
        d_model: width of the stream.
        d_ff: width in between, of each expert.
        n_experts: number of experts.
        k: how many of them each token goes to.

    `router` is a linear map without bias from d_model to the experts' scores,
    `experts` an `nn.ModuleList` of `SwiGLU`.

    Raises:
        ValueError: if k is not in 1 … n_experts; names both numbers.

    Shazeer et al. (2017), "Outrageously Large Neural Networks"; Jiang et al. (2024),
    "Mixtral of Experts".
    """

    def __init__(self, d_model, d_ff, n_experts, k):
        super().__init__()
        if not 1 <= k <= n_experts:
            raise ValueError(f"k is {k}, but must be in 1 to {n_experts}, the experts")
        ### BEGIN SOLUTION
        self.k = k
        self.router = nn.Linear(d_model, n_experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(d_model, d_ff) for _ in range(n_experts))
        ### END SOLUTION

    def forward(self, x):
        """`x` `(…, d_model)` → the same shape.

        For each token the sum of its k experts' results by their weights. Each expert
        runs at most once, on the tokens that chose it and no others.
        """
        ### BEGIN SOLUTION
        tokens = x.reshape(-1, x.shape[-1])  # … D → N D
        weights, chosen = top_k_routing(self.router(tokens), self.k)  # N k, N k
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)  # n, n: who, at which of k places
            share = weights[token, place, None]  # n 1
            out = out.index_add(0, token, share * expert(tokens[token]))
        return out.reshape(x.shape)
        ### END SOLUTION


def load_balancing_loss(probabilities, experts, n_experts):
    """How unevenly the experts are used, as a loss that the router can follow.

    Args:
        probabilities: softmax of the router's scores, `(N, E)`.
        experts: the chosen experts' ids, `(N, k)`.
        n_experts: E.

    Returns:
        A tensor without dimensions, E·Σ f_e·P_e in the dtype of `probabilities`: f_e is
        the share of the N·k choices that fell on expert e, P_e the mean of its
        probability over the tokens. 1 where both are even.

    Fedus, Zoph and Shazeer (2021), "Switch Transformers", section 2.2.
    """
    ### BEGIN SOLUTION
    counts = torch.bincount(experts.flatten(), minlength=n_experts)  # E
    f = (counts / experts.numel()).to(probabilities.dtype)  # E
    return n_experts * (f * probabilities.mean(dim=0)).sum()
    ### END SOLUTION


def drop_over_capacity(experts, n_experts, capacity):
    """Which choices an expert with a limited number of places can serve.

    Args:
        experts: the chosen experts' ids, `(N, k)`, first choice first.
        n_experts: E.
        capacity: the number of places of each expert.

    Returns:
        Boolean `(N, k)`, True = served. All first choices queue before all second ones,
        and so on; within each, tokens queue in their order.

    Raises:
        ValueError: if the capacity is smaller than 1; names it.

    Lepikhin et al. (2020), "GShard", section 2.2; Fedus, Zoph and Shazeer (2021).
    """
    if capacity < 1:
        raise ValueError(f"capacity is {capacity}, but each expert needs a place")
    ### BEGIN SOLUTION
    queue = experts.T.flatten()  # N k → k·N: first choices, then second ones
    chose = nn.functional.one_hot(queue, n_experts)  # k·N E
    place = (chose.cumsum(dim=0) * chose).sum(dim=1)  # k·N, 1 for the first in line
    return (place <= capacity).view(experts.T.shape).T  # N k
    ### END SOLUTION


def moe_parameters(config, n_experts, k):
    """How many numbers a decoder with experts holds, and how many a token meets.

    Args:
        config: a `TransformerConfig` of style "llama"; `d_ff` is one expert's width.
        n_experts: experts in each block, in place of its feed-forward network.
        k: how many of them each token goes to.

    Returns:
        `(total, active)`, two ints. Active is everything but the experts that a token
        does not go to: the whole embedding and router count.

    Raises:
        ValueError: if k is not in 1 … n_experts; names both numbers.

    Jiang et al. (2024), "Mixtral of Experts", section 2.1.
    """
    if not 1 <= k <= n_experts:
        raise ValueError(f"k is {k}, but must be in 1 to {n_experts}, the experts")
    ### BEGIN SOLUTION
    expert = 3 * config.d_model * config.d_ff
    router = config.d_model * n_experts
    dense = count_parameters(config)  # with one expert in each block, and no router
    total = dense + config.n_layers * ((n_experts - 1) * expert + router)
    active = dense + config.n_layers * ((k - 1) * expert + router)
    return total, active
    ### END SOLUTION


def balancing_bias(bias, load, rate=0.001):
    """The experts' biases after one more step: idle experts up, busy ones down.

    Args:
        bias: `(E,)`, what is added to the experts' scores for the choice alone.
        load: `(E,)`, how often each expert was chosen, as counts or shares.
        rate: how far each bias moves.

    Returns:
        New `(E,)` in the dtype of `bias`: plus `rate` where the load is below the mean
        load, minus `rate` where it is above.

    Wang et al. (2024), "Auxiliary-Loss-Free Load Balancing Strategy for
    Mixture-of-Experts", algorithm 1.
    """
    ### BEGIN SOLUTION
    missing = load.float().mean() - load  # E, above 0: chosen too seldom
    return bias + rate * torch.sign(missing).to(bias.dtype)
    ### END SOLUTION
