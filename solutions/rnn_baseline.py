"""Reference answers of lesson 01."""

import torch
from torch import nn


def rnn_cell(x, h, w_x, w_h, b):
    """One step of a recurrent network: the next state from input and state.

    Args:
        x: `(B, D)`, the input of this step.
        h: `(B, H)`, the state before it.
        w_x: `(D, H)`, w_h: `(H, H)`, b: `(H,)`.

    Returns:
        `(B, H)`: the state after it. Each of its numbers is the tanh of a weighted sum
        of all inputs and all numbers of the old state, plus a bias.

    J. Elman (1990), Finding Structure in Time.
    """
    ### BEGIN SOLUTION
    return torch.tanh(x @ w_x + h @ w_h + b)
    ### END SOLUTION


def rnn(x, h0, w_x, w_h, b):
    """Run `rnn_cell` over a sequence, each step on the state of the one before.

    Args:
        x: `(B, T, D)`, T at least 1.
        h0: `(B, H)`, the state before the first step.
        w_x: `(D, H)`, w_h: `(H, H)`, b: `(H,)`, the same at every step.

    Returns:
        `(B, T, H)`: the state after each step.
    """
    ### BEGIN SOLUTION
    h, states = h0, []
    for t in range(x.shape[1]):
        h = rnn_cell(x[:, t], h, w_x, w_h, b)  # (B, H)
        states.append(h)
    return torch.stack(states, dim=1)  # T times (B, H) → (B, T, H)
    ### END SOLUTION


def lstm_cell(x, h, c, w_x, w_h, b):
    """One step of an LSTM: gates decide what its memory forgets, takes in and shows.

    Args:
        x: `(B, D)`, the input of this step.
        h: `(B, H)`, what was shown before it.
        c: `(B, H)`, the memory before it.
        w_x: `(D, 4H)`, w_h: `(H, 4H)`, b: `(4H,)`; along the last dimension the four
            blocks are the input gate i, the forget gate f, the candidate g and the
            output gate o, in this order.

    Returns:
        `(h, c)`, both `(B, H)`: what is shown and the memory after the step.

    S. Hochreiter and J. Schmidhuber (1997), Long Short-Term Memory;
    F. Gers, J. Schmidhuber and F. Cummins (2000), Learning to Forget.
    """
    ### BEGIN SOLUTION
    i, f, g, o = (x @ w_x + h @ w_h + b).chunk(4, dim=-1)  # (B, 4H) → 4 × (B, H)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c
    ### END SOLUTION


def gradient_reach(layer, x):
    """How strongly the last output of a layer depends on each input step.

    Args:
        layer: a function or module, `(B, T, D)` → `(B, T, H)`. Its parameters and
            their gradients stay as they are.
        x: `(B, T, D)`; it stays as it is too.

    Returns:
        `(T,)`: for each step t the norm of the gradient of `layer(x)[:, -1].sum()`
        with respect to `x[:, t]`, averaged over the batch.
    """
    x = x.detach().requires_grad_()  # given: your own copy, which asks for gradients
    ### BEGIN SOLUTION
    last = layer(x)[:, -1].sum()  # (B, T, H) → scalar
    (gradient,) = torch.autograd.grad(last, x)  # (B, T, D)
    return gradient.norm(dim=-1).mean(dim=0)  # (B, T, D) → (B, T) → (T,)
    ### END SOLUTION


class RNNLanguageModel(nn.Module):
    """Predicts each next token from one state vector that has read all before it.

    Args:
        vocab_size: V, the number of tokens.
        d_model: D, the width of a token's vector.
        d_hidden: H, the width of the state.

    Parts: `embedding` (V, D), `w_x` (D, H), `w_h` (H, H), `b` (H,) and `head`, a
    linear layer H → V without bias.

    T. Mikolov et al. (2010), Recurrent Neural Network Based Language Model.
    """

    def __init__(self, vocab_size, d_model, d_hidden):
        super().__init__()
        ### BEGIN SOLUTION
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.w_x = nn.Parameter(torch.randn(d_model, d_hidden) / d_model**0.5)
        self.w_h = nn.Parameter(nn.init.orthogonal_(torch.empty(d_hidden, d_hidden)))
        self.b = nn.Parameter(torch.zeros(d_hidden))
        self.head = nn.Linear(d_hidden, vocab_size, bias=False)
        ### END SOLUTION

    def forward(self, ids):
        """`(B, T)` token ids → `(B, T, V)` logits of the token after each."""
        ### BEGIN SOLUTION
        x = self.embedding(ids)  # (B, T) → (B, T, D)
        h0 = x.new_zeros(len(ids), len(self.b))  # (B, H)
        states = rnn(x, h0, self.w_x, self.w_h, self.b)  # (B, T, H)
        return self.head(states)  # (B, T, H) → (B, T, V)
        ### END SOLUTION
