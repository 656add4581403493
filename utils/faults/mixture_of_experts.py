"""Lesson 12: mistakes in routing, the experts, their balance, capacity and size."""

from utils.exercises.mixture_of_experts import (
    MixtureOfExperts,
    balancing_bias,
    block_with_experts,
    drop_over_capacity,
    load_balancing_loss,
    moe_parameters,
    top_k_routing,
)

# top_k_routing ------------------------------------------------------------------------

AMONG_THE_KEPT = "torch.softmax(kept, dim=-1)"


def shared_out(masked):
    """An edit: softmax over scores of which those not kept are masked."""
    return (
        f"return {AMONG_THE_KEPT}, experts",
        f"masked = {masked}\n"
        "    return torch.softmax(masked, dim=-1).gather(1, experts), experts",
    )


top_k_routing.fault(
    "one_is_always_one",
    "With k = 1 the softmax over the kept score is 1, always. A constant has no slope, "
    "so the router would never learn. Take its probability among all experts.",
    ("if k == 1:", "if False:"),
)
top_k_routing.fault(
    "not_renormalised",
    "The weights are the probabilities among *all* experts. With k of 2 and more they "
    "are softmax over the kept scores, and sum to 1.",
    ("if k == 1:", "if True:"),
)
top_k_routing.fault(
    "softmax_twice",
    "Softmax is taken twice: over all scores, and over the k probabilities that were "
    "kept. Probabilities lie close together, so the weights come out nearly equal.",
    (
        "kept, experts = logits.topk(k, dim=-1)",
        "kept, experts = torch.softmax(logits, dim=-1).topk(k, dim=-1)",
    ),
)
top_k_routing.fault(
    "over_the_tokens",
    "Softmax runs over the tokens instead of the experts.",
    ("torch.softmax(logits, dim=-1)", "torch.softmax(logits, dim=0)"),
    (AMONG_THE_KEPT, "torch.softmax(kept, dim=0)"),
)
top_k_routing.fault(
    "smallest_chosen",
    "The experts with the *lowest* scores are chosen.",
    ("topk(k, dim=-1)", "topk(k, dim=-1, largest=False)"),
)
top_k_routing.fault(
    "zero_instead_of_minus_infinity",
    "The scores that are not kept are set to 0 and still take their share of the "
    "softmax: e⁰ is 1.",
    shared_out("torch.zeros_like(logits).scatter(1, experts, kept)"),
)
top_k_routing.fault(
    "hidden_by_a_number",
    "The scores that are not kept are set to −10,000, and real ones can be as low. "
    "−inf is below them all; or let softmax see the k kept scores alone.",
    shared_out("torch.full_like(logits, -10_000).scatter(1, experts, kept)"),
)
top_k_routing.fault(
    "sigmoids_divided_by_their_sum",
    "Each score becomes a sigmoid, and the k sigmoids are divided by their sum. Some "
    "models do that; here the k weights share a softmax.",
    (AMONG_THE_KEPT, "nn.functional.normalize(torch.sigmoid(kept), p=1, dim=-1)"),
)

# MixtureOfExperts ---------------------------------------------------------------------

ROUTED = "weights, chosen = top_k_routing(self.router(tokens), self.k)"

MixtureOfExperts.inherits(top_k_routing, "one_is_always_one", "not_renormalised")
MixtureOfExperts.fault(
    "not_weighted",
    "The experts' results are added without their weights, so that the router has no "
    "influence but by its choice, and gets no gradient.",
    ("share * expert", "expert"),
)
MixtureOfExperts.fault(
    "weights_in_the_experts",
    "The weight multiplies what goes *into* the expert. SwiGLU is not linear, so that "
    "is something else than weighting what comes out.",
    ("share * expert(tokens[token])", "expert(share * tokens[token])"),
)
MixtureOfExperts.fault(
    "overwritten",
    "An expert's result overwrites what another one gave the same token. Assigning to "
    "`out[token]` keeps the last; the k results are to be added.",
    ("index_add", "index_copy"),
)
MixtureOfExperts.fault(
    "first_choice_only",
    "Only the first of the k experts is used.",
    ("chosen == i", "chosen[:, :1] == i"),
)

# load_balancing_loss ------------------------------------------------------------------

COUNTS = "torch.bincount(experts.flatten(), minlength=n_experts)"
MEAN = "probabilities.mean(dim=0)"

load_balancing_loss.fault(
    "sums_to_k",
    "f is divided by the number of tokens, so that it sums to k. Some libraries do "
    "that; here f is a share of all N·k choices, and even use gives 1 whatever k is.",
    ("experts.numel()", "len(experts)"),
)
load_balancing_loss.fault(
    "softmax_twice",
    "A softmax runs over the probabilities once more, which makes them nearly equal. "
    "They come in as softmax already.",
    (MEAN, "torch.softmax(probabilities, dim=-1).mean(dim=0)"),
)
load_balancing_loss.fault(
    "as_many_as_occur",
    "The number of experts is read off the ids. If the last experts are chosen by "
    "nobody, they are missing.",
    (COUNTS, "torch.bincount(experts.flatten())"),
)

# drop_over_capacity -------------------------------------------------------------------

QUEUE = "queue = experts.T.flatten()"
BACK = ".view(experts.T.shape).T"

drop_over_capacity.fault(
    "row_by_row",
    "The queue is read row by row: a token's second choice comes before the next "
    "token's first. First choices come first, for all tokens.",
    (QUEUE, "queue = experts.flatten()"),
    (BACK, ".view(experts.shape)"),
)
drop_over_capacity.fault(
    "wrong_view",
    "The queue was read column by column and its result filled in row by row, so that "
    "the marks stand at other tokens.",
    (BACK, ".view(experts.shape)"),
)
drop_over_capacity.fault(
    "a_queue_for_each_column",
    "Each of the k columns has a queue of its own, so that an expert serves up to k "
    "times its capacity.",
    (
        QUEUE,
        "if experts.shape[1] > 1:\n"
        "        columns = experts.split(1, dim=1)\n"
        "        sizes = n_experts, capacity\n"
        "        return torch.cat([drop_over_capacity(c, *sizes) for c in columns], 1)\n"
        f"    {QUEUE}",
    ),
)
drop_over_capacity.fault(
    "queues_added_up",
    "The queues of all experts are added up: a choice stands in line behind those of "
    "other experts too.",
    (" * chose)", ")"),
)

# moe_parameters -----------------------------------------------------------------------

TOTAL = "(n_experts - 1) * expert + router"
ACTIVE = "(k - 1) * expert + router"

moe_parameters.fault(
    "whole_models",
    "The whole model is multiplied by the number of experts, attention and embedding "
    "too. Only the feed-forward network is there several times.",
    (
        f"dense + config.n_layers * ({TOTAL})",
        "n_experts * dense + config.n_layers * router",
    ),
    (f"dense + config.n_layers * ({ACTIVE})", "k * dense + config.n_layers * router"),
)
moe_parameters.fault(
    "router_not_active",
    "Active counts only k rows of the router. Every token meets all of it: each expert "
    "needs its score.",
    (ACTIVE, "(k - 1) * expert + config.d_model * k"),
)
moe_parameters.fault(
    "share_of_everything",
    "Active is k/E of the whole. Attention, embedding, norms and router are met by "
    "every token; only the experts are chosen.",
    (f"dense + config.n_layers * ({ACTIVE})", "total * k // n_experts"),
)

# balancing_bias -----------------------------------------------------------------------

MISSING = "load.float().mean() - load"
STEP = "torch.sign(missing)"

balancing_bias.fault(
    "wrong_way",
    "Experts that are chosen too often rise, and idle ones fall. The bias is added to the "
    "score: a higher one is chosen more.",
    (MISSING, "load - load.float().mean()"),
)
balancing_bias.fault(
    "as_long_as_the_difference",
    "The step grows with the difference from the mean. Only its sign counts.",
    (STEP, "missing"),
)
balancing_bias.fault(
    "starts_anew",
    "The result is the step alone. It is added to the bias that was given, or nothing "
    "would add up.",
    ("bias + rate", "rate"),
)
balancing_bias.fault(
    "only_up",
    "Idle experts rise, but those that are chosen too often do not fall.",
    (STEP, f"{STEP}.clamp(min=0)"),
)
balancing_bias.fault(
    "equal_falls",
    "An expert at the mean moves. Its bias stays.",
    (STEP, "(2.0 * (missing > 0) - 1)"),
)

# The parts together -------------------------------------------------------------------

block_with_experts.fault(
    "residual_twice",
    "The experts add their input to their result, and the block adds it once more.",
    ("return out.reshape(x.shape)", "return x + out.reshape(x.shape)"),
    edited="MixtureOfExperts",
)
block_with_experts.fault(
    "routing_not_shared",
    "`top_k_routing` weights with probabilities among all experts; the experts' own "
    "weights are softmax over the kept.",
    ("if k == 1:", "if True:"),
    edited="top_k_routing",
)
