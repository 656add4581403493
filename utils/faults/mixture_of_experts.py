"""Lesson 12: mistakes in routing, the experts, their balance, capacity and size."""

from utils.exercises.mixture_of_experts import (
    MixtureOfExperts,
    block_with_experts,
    drop_over_capacity,
    load_balancing_loss,
    moe_parameters,
    top_k_routing,
)

# top_k_routing ------------------------------------------------------------------------

CHOICE = "kept, experts = logits.topk(k, dim=-1)"
ALONE = "torch.softmax(logits, dim=-1).gather(1, experts)"  # with k = 1
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
    ("return torch.softmax(kept", f"kept = {ALONE}\n    return torch.softmax(kept"),
)
top_k_routing.fault(
    "over_the_tokens",
    "Softmax runs over the tokens instead of the experts.",
    (ALONE, ALONE.replace("-1", "0")),
    (AMONG_THE_KEPT, "torch.softmax(kept, dim=0)"),
)
top_k_routing.fault(
    "smallest_chosen",
    "The experts with the *lowest* scores are chosen.",
    ("topk(k, dim=-1)", "topk(k, dim=-1, largest=False)"),
)
top_k_routing.fault(
    "lowest_of_the_kept_first",
    "The k experts come with the lowest kept score first. The highest is the first "
    "choice, and `drop_over_capacity` will rely on it.",
    (CHOICE, "kept, experts = (y.flip(-1) for y in logits.topk(k, dim=-1))"),
)
top_k_routing.fault(
    "sorted_by_id",
    "The experts are sorted by their ids. The highest score comes first.",
    (
        CHOICE,
        "experts = logits.topk(k, dim=-1).indices.sort(dim=-1).values\n"
        "    kept = logits.gather(1, experts)",
    ),
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
    "equal_scores_kept_too",
    "Everything as high as the k-th score shares the softmax. Where scores are equal "
    "that is more than k experts, and the weights of the k sum to less than 1. Equal "
    "scores are common in half precision.",
    shared_out("logits.masked_fill(logits < kept[:, -1:], -torch.inf)"),
)
top_k_routing.fault(
    "scores_as_weights",
    "The weights are the scores themselves, without a softmax.",
    (ALONE, "kept"),
    (AMONG_THE_KEPT, "kept"),
)
top_k_routing.fault(
    "sigmoids",
    "Each weight is a sigmoid of its own score. Some models do that; here the k "
    "weights share a softmax.",
    (ALONE, "torch.sigmoid(kept)"),
    (AMONG_THE_KEPT, "torch.sigmoid(kept)"),
)
top_k_routing.fault(
    "sigmoids_divided_by_their_sum",
    "Each score becomes a sigmoid, and the k sigmoids are divided by their sum. Some "
    "models do that; here the k weights share a softmax.",
    (AMONG_THE_KEPT, "nn.functional.normalize(torch.sigmoid(kept), p=1, dim=-1)"),
)
top_k_routing.fault(
    "scores_divided_by_their_sum",
    "The scores are divided by their sum, without an exponential: negative ones make "
    "negative weights.",
    (AMONG_THE_KEPT, "kept / kept.sum(dim=-1, keepdim=True)"),
)
top_k_routing.fault(
    "results_exchanged",
    "The two results are in the other order: weights first, then expert ids.",
    (f"{AMONG_THE_KEPT}, experts", f"experts, {AMONG_THE_KEPT}"),
)
top_k_routing.fault(
    "as_wide_as_the_experts",
    "The weights have a column for each expert, zeros where it was not chosen. Two "
    "narrow tensors `(N, k)` are asked for.",
    (
        f"return {AMONG_THE_KEPT}",
        f"return torch.zeros_like(logits).scatter(1, experts, {AMONG_THE_KEPT})",
    ),
)
top_k_routing.fault(
    "overflow",
    "The exponential is taken of the scores as they are. Above 88 it is infinite in "
    "float32, and far below it is 0, so that the division gives NaN.",
    (ALONE, "kept.exp() / logits.exp().sum(dim=-1, keepdim=True)"),
    (AMONG_THE_KEPT, "kept.exp() / kept.exp().sum(dim=-1, keepdim=True)"),
)
top_k_routing.fault(
    "one_maximum_for_all",
    "One maximum is subtracted from all rows. A row far below it becomes 0 after the "
    "exponential, and 0 / 0 is NaN: each row needs its own.",
    (CHOICE, f"logits = logits - logits.max()\n    {CHOICE}"),
    (ALONE, "kept.exp() / logits.exp().sum(dim=-1, keepdim=True)"),
    (AMONG_THE_KEPT, "kept.exp() / kept.exp().sum(dim=-1, keepdim=True)"),
)
top_k_routing.fault(
    "chosen_by_probability",
    "The experts are chosen by their probabilities. Where scores lie far apart several "
    "of these are 0, and zeros have no order: choose by the scores.",
    (
        CHOICE,
        "experts = torch.softmax(logits, dim=-1).topk(k, dim=-1).indices\n"
        "    kept = logits.gather(1, experts)",
    ),
)

# MixtureOfExperts ---------------------------------------------------------------------

ROUTED = "weights, chosen = top_k_routing(self.router(tokens), self.k)"
WHERE = "token, place = torch.where(\n                chosen == i\n            )"
SHARE = "share = weights[token, place, None]"
ADDED = "out = out.index_add(0, token, share * expert(tokens[token]))"
RETURNED = "return out.reshape(x.shape)"

MixtureOfExperts.inherits(
    top_k_routing,
    "one_is_always_one",
    "not_renormalised",
    "over_the_tokens",
    "smallest_chosen",
)
MixtureOfExperts.fault(
    "experts_in_a_list",
    "The experts are in a plain Python list, where PyTorch does not find their "
    "parameters: no optimizer will train them.",
    (
        "nn.ModuleList(SwiGLU(d_model, d_ff) for _ in range(n_experts))",
        "[SwiGLU(d_model, d_ff) for _ in range(n_experts)]",
    ),
)
MixtureOfExperts.fault(
    "not_weighted",
    "The experts' results are added without their weights, so that the router has no "
    "influence but by its choice, and gets no gradient.",
    ("share * expert", "expert"),
)
MixtureOfExperts.fault(
    "weighted_twice",
    "The weight is multiplied in twice, so that its square counts.",
    ("share * expert", "share**2 * expert"),
)
MixtureOfExperts.fault(
    "softmax_twice",
    "A softmax runs over the weights once more. `top_k_routing` has made it already.",
    (ROUTED, f"{ROUTED}\n        weights = torch.softmax(weights, dim=-1)"),
)
MixtureOfExperts.fault(
    "routed_by_probabilities",
    "`top_k_routing` is given probabilities. It takes scores, and makes the softmax "
    "itself.",
    ("(self.router(tokens),", "(torch.softmax(self.router(tokens), dim=-1),"),
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
MixtureOfExperts.fault(
    "weight_of_the_first_place",
    "Every expert is weighted by the token's *first* weight. Which of the k places an "
    "expert has differs from token to token.",
    (SHARE, "share = weights[token, :1]"),
)
MixtureOfExperts.fault(
    "weights_of_the_first_rows",
    "The weights of the first rows are taken, as many as an expert has tokens. Select "
    "weights by the same token numbers as the tokens themselves.",
    (SHARE, "share = weights[torch.arange(len(token)), place, None]"),
)
MixtureOfExperts.fault(
    "residual_inside",
    "The input is added to the result. The block adds it, one level up; here it would "
    "count twice.",
    (RETURNED, "return x + out.reshape(x.shape)"),
)
MixtureOfExperts.fault(
    "divided_by_k",
    "The sum is divided by k. The weights sum to 1 already.",
    (RETURNED, "return out.reshape(x.shape) / self.k"),
)
MixtureOfExperts.fault(
    "not_a_matrix_fails",
    "It reads a fixed number of sizes from the shape of x. The last one is d_model, "
    "and anything may stand before it.",
    ("tokens = x.reshape", "b, t, d = x.shape\n        tokens = x.reshape"),
)
MixtureOfExperts.fault(
    "stops_at_an_unused_expert",
    "The loop ends at the first expert that nobody chose: `break`, or a `return`, "
    "where `continue` is meant. Those behind it never run.",
    (SHARE, f"if len(token) == 0:\n                break\n            {SHARE}"),
)
MixtureOfExperts.fault(
    "every_expert_on_every_token",
    "Every expert computes every token, and most results are multiplied by 0. The "
    "values are right, but it costs as much as if all experts were one network, and "
    "the point of routing is that it does not.",
    (SHARE, "share = (weights * (chosen == i)).sum(dim=1, keepdim=True)"),
    (ADDED, "out = out + share * expert(tokens)"),
)
MixtureOfExperts.fault(
    "token_by_token",
    "Every token calls its experts by itself. The values are right, but a thousand "
    "small products take far longer than one large one: collect the tokens of an "
    "expert.",
    (
        ADDED,
        "for n, w in zip(token, share):\n"
        "                out = out.index_add(0, n, w * expert(tokens[n])[None])",
    ),
)
MixtureOfExperts.fault(
    "place_by_place",
    "Each expert runs once for each of the k places. Search all k columns at once for "
    "an expert's tokens, and it runs once.",
    (WHERE, "pass"),
    (
        SHARE,
        "for j in range(self.k):\n                token = (chosen[:, j] == "
        "i).nonzero()[:, 0]",
    ),
    (
        ADDED,
        "    out = out.index_add(0, token, weights[token, j, None] * "
        "expert(tokens[token]))",
    ),
)
MixtureOfExperts.fault(
    "weights_detached",
    "The weights are cut from the graph: experts learn, the router never does.",
    ("share * expert", "share.detach() * expert"),
)
MixtureOfExperts.fault(
    "router_input_detached",
    "The router's input is cut from the graph, so that the stream gets only a part of "
    "its gradient.",
    ("self.router(tokens)", "self.router(tokens.detach())"),
)
MixtureOfExperts.fault(
    "experts_input_detached",
    "What the experts are given is cut from the graph, so that the stream gets only "
    "the router's part of its gradient.",
    ("expert(tokens[token])", "expert(tokens[token].detach())"),
)

# load_balancing_loss ------------------------------------------------------------------

COUNTS = "torch.bincount(experts.flatten(), minlength=n_experts)"
MEAN = "probabilities.mean(dim=0)"

load_balancing_loss.fault(
    "factor_missing",
    "The factor E is missing: even use then gives 1/E, and the loss weighs less the "
    "more experts there are.",
    ("n_experts * (f", "(f"),
)
load_balancing_loss.fault(
    "sums_to_k",
    "f is divided by the number of tokens, so that it sums to k. Some libraries do "
    "that; here f is a share of all N·k choices, and even use gives 1 whatever k is.",
    ("experts.numel()", "len(experts)"),
)
load_balancing_loss.fault(
    "divided_by_k_twice",
    "It is divided by k once too often. Shares of all N·k choices sum to 1 already, "
    "and P is a mean over N tokens.",
    (MEAN, f"{MEAN} / experts.shape[1]"),
)
load_balancing_loss.fault(
    "softmax_twice",
    "A softmax runs over the probabilities once more, which makes them nearly equal. "
    "They come in as softmax already.",
    (MEAN, "torch.softmax(probabilities, dim=-1).mean(dim=0)"),
)
load_balancing_loss.fault(
    "coefficient_inside",
    "It is multiplied by 0.01, as Switch does where it adds the loss to the other. "
    "That is for whoever adds it.",
    ("n_experts * (f", "0.01 * n_experts * (f"),
)
load_balancing_loss.fault(
    "counts_not_shares",
    "f is the number of choices, not their share: the loss grows with the batch.",
    ("(counts / experts.numel())", "counts"),
)
load_balancing_loss.fault(
    "sum_not_mean",
    "P is the sum of the probabilities over the tokens, not their mean: the loss grows "
    "with the batch.",
    (MEAN, "probabilities.sum(dim=0)"),
)
load_balancing_loss.fault(
    "mean_of_everything",
    "P is the mean over tokens and experts, 1/E whatever the router thinks, so that "
    "the loss is 1 always. It is a mean over the tokens, one number for each expert.",
    (MEAN, "probabilities.mean()"),
)
load_balancing_loss.fault(
    "each_expert_apart",
    "E numbers come back. They are to be summed.",
    (f"(f * {MEAN}).sum()", f"(f * {MEAN})"),
)
load_balancing_loss.fault(
    "e_squared",
    "E is there twice: as a factor, and by a sum that is not a mean, or the other way "
    "round.",
    ("n_experts * (f", "n_experts**2 * (f"),
)
load_balancing_loss.fault(
    "first_choice_only",
    "f counts the first choices alone. All k count.",
    (COUNTS, COUNTS.replace("experts.flatten()", "experts[:, 0]")),
    ("experts.numel()", "len(experts)"),
)
load_balancing_loss.fault(
    "f_squared",
    "f meets f. A count has no slope, so that nothing could be learned from it.",
    (MEAN, "f"),
)
load_balancing_loss.fault(
    "p_squared",
    "P meets P. Where the tokens really went has no part in it.",
    (f"(f * {MEAN})", f"{MEAN}.square()"),
)
load_balancing_loss.fault(
    "choices_ignored",
    "f is counted from the probabilities' maximum and not from the ids that were "
    "given.",
    (
        "experts.flatten()",
        "probabilities.topk(experts.shape[1]).indices.flatten()",
    ),
)
load_balancing_loss.fault(
    "never_below_one",
    "1 is taken for the smallest value, and what is below it is cut off, its gradient "
    "too. The loss can be below 1.",
    (".sum()", ".sum().clamp(min=1 / n_experts)"),
)
load_balancing_loss.fault(
    "as_many_as_occur",
    "The number of experts is read off the ids. If the last experts are chosen by "
    "nobody, they are missing.",
    (COUNTS, "torch.bincount(experts.flatten())"),
)
load_balancing_loss.fault(
    "counted_in_the_dtype_of_the_probabilities",
    "Choices are counted one by one in the dtype of the probabilities. In bfloat16 "
    "256 + 1 is 256: count in whole numbers, and convert the share.",
    (
        COUNTS,
        "probabilities.new_zeros(n_experts).index_add(0, experts.flatten(), "
        "probabilities.new_ones(experts.numel()))",
    ),
)

# drop_over_capacity -------------------------------------------------------------------

QUEUE = "queue = experts.T.flatten()"
BACK = ".view(experts.T.shape).T"

drop_over_capacity.fault(
    "one_too_few",
    "One place of each expert stays empty: where the queue is counted from 1, its last "
    "place has the number `capacity`.",
    ("place <= capacity", "place < capacity"),
)
drop_over_capacity.fault(
    "one_too_many",
    "Each expert serves one more than it has places.",
    ("place <= capacity", "place <= capacity + 1"),
)
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
    "capacity_times_k",
    "Each expert serves k times its capacity. `capacity` is the number of its places "
    "for first, second and all other choices together.",
    ("place <= capacity", "place <= capacity * experts.shape[1]"),
)
drop_over_capacity.fault(
    "full_experts_serve_nobody",
    "An expert that is asked too often drops all its tokens. It serves as many as it "
    "has places.",
    ("place <= capacity", "chose.sum(dim=0)[queue] <= capacity"),
)
drop_over_capacity.fault(
    "queues_added_up",
    "The queues of all experts are added up: a choice stands in line behind those of "
    "other experts too.",
    (" * chose)", ")"),
)
drop_over_capacity.fault(
    "nothing_dropped",
    "Nothing is dropped. If the count runs across the k choices of a token, it never "
    "goes beyond 1, since no token chooses an expert twice: count down the queue.",
    ("cumsum(dim=0)", "cumsum(dim=1)"),
)
for dtype, sentence in (
    ("bfloat16", "In bfloat16 256 + 1 is 256."),
    ("float16", "In float16 2048 + 1 is 2048."),
    ("int8", "int8 ends at 127."),
    ("uint8", "uint8 ends at 255."),
):
    drop_over_capacity.fault(
        f"counted_in_{dtype}",
        f"The queue is counted in a dtype that is too small for it. {sentence}",
        ("cumsum(dim=0)", f"cumsum(dim=0).to(torch.{dtype})"),
    )

# moe_parameters -----------------------------------------------------------------------

DENSE = "dense = count_parameters(config)"
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
    "router_forgotten",
    "The router is not counted: d_model·E numbers in each block.",
    ("router = config.d_model * n_experts", "router = 0"),
)
moe_parameters.fault(
    "router_not_active",
    "Active counts only k rows of the router. Every token meets all of it: each expert "
    "needs its score.",
    (ACTIVE, "(k - 1) * expert + config.d_model * k"),
)
moe_parameters.fault(
    "router_left_out_of_active",
    "Active leaves the router out. Every token meets all of it: each expert needs its "
    "score.",
    (ACTIVE, "(k - 1) * expert"),
)
moe_parameters.fault(
    "share_of_everything",
    "Active is k/E of the whole. Attention, embedding, norms and router are met by "
    "every token; only the experts are chosen.",
    (f"dense + config.n_layers * ({ACTIVE})", "total * k // n_experts"),
)
moe_parameters.fault(
    "one_row_of_the_embedding",
    "Active counts one row of the embedding. Here all of it counts, as in the "
    "published number.",
    ("active = dense", "active = dense - (config.vocab_size - 1) * config.d_model"),
)
moe_parameters.fault(
    "embedding_left_out",
    "Active leaves the embedding out. Here everything but the experts that a token "
    "does not go to counts as active, as in the published number.",
    ("active = dense", "active = dense - config.vocab_size * config.d_model"),
)
moe_parameters.fault(
    "dense_network_kept",
    "One network too many in each block: the block's own is counted beside the "
    "experts, which stand in its place.",
    (TOTAL, "n_experts * expert + router"),
    (ACTIVE, "k * expert + router"),
)
moe_parameters.fault(
    "one_block",
    "The experts of one block are counted. Each block has its own.",
    (f"config.n_layers * ({TOTAL})", TOTAL),
    (f"config.n_layers * ({ACTIVE})", ACTIVE),
)
moe_parameters.fault(
    "router_of_one_block",
    "One router is counted for the whole model. Each block has its own.",
    (f"({TOTAL})", TOTAL),
    (f"({ACTIVE})", ACTIVE),
)
moe_parameters.fault(
    "two_matrices",
    "An expert is counted with two matrices. `SwiGLU` has three.",
    ("3 * config", "2 * config"),
)
moe_parameters.fault(
    "experts_alone",
    "Only the experts and routers are counted, not the rest of the decoder.",
    (DENSE, "dense = config.n_layers * expert"),
)
moe_parameters.fault(
    "exchanged",
    "Total and active are exchanged.",
    ("return total, active", "return active, total"),
)

# The parts together -------------------------------------------------------------------


def differs(part, name, sentence, *edits):
    block_with_experts.fault(name, sentence, *edits, edited=part)


differs(
    "MixtureOfExperts",
    "residual_twice",
    "The experts add their input to their result, and the block adds it once more.",
    (RETURNED, "return x + out.reshape(x.shape)"),
)
differs(
    "MixtureOfExperts",
    "time_lost",
    "The experts return batch and time as one dimension.",
    (RETURNED, "return out"),
)
differs(
    "MixtureOfExperts",
    "one_is_always_one",
    "With k = 1 every weight is 1.",
    (ROUTED, f"{ROUTED}\n        weights = weights / weights.sum(dim=1, keepdim=True)"),
)
differs(
    "MixtureOfExperts",
    "routed_by_the_whole",
    "The experts are chosen from a mean over all tokens, later ones included.",
    ("self.router(tokens)", "self.router(tokens - 0.5 * tokens.mean(0))"),
)
differs(
    "MixtureOfExperts",
    "router_cut_off",
    "The experts' weights are cut from the graph.",
    ("share * expert", "share.detach() * expert"),
)
differs(
    "top_k_routing",
    "routing_not_shared",
    "`top_k_routing` weights with probabilities among all experts; the experts' own "
    "weights are softmax over the kept.",
    ("if k == 1:", "if True:"),
)
differs(
    "load_balancing_loss",
    "balance_without_gradient",
    "The balancing loss has no gradient.",
    (MEAN, f"{MEAN}.detach()"),
)
differs(
    "drop_over_capacity",
    "one_place_too_few",
    "`drop_over_capacity` leaves a place of each expert empty.",
    ("place <= capacity", "place < capacity"),
)
differs(
    "moe_parameters",
    "count_without_router",
    "`moe_parameters` leaves the router out.",
    ("router = config.d_model * n_experts", "router = 0"),
)
