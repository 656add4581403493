"""Lesson 11."""

MASKED = "a block that nobody is hidden from may be masked too"
NO_ORDER = "a maximum, a minimum and a sum have no order"
TRIED = "speed, or tried where shared memory runs out, which the tests do"
BLOCKS = "block sizes change nothing but memory"
SLICES = "slices end with their tensor"

EQUIVALENT = {
    "online_softmax": {
        "21 argument block.dtype, torch.float32 → torch.float32, block.dtype": (
            "the same dtype"
        ),
        "23 function torch.zeros_like(block[..., 0]) → torch.ones_like(block[..., 0])": (  # noqa: E501
            "multiplied by exp(−inf) before it counts, or of the same shape"
        ),
        "23 constant 0 → -1": (
            "multiplied by exp(−inf) before it counts, or of the same shape"
        ),
        "25 argument maximum, block.amax(dim=-1) → block.amax(dim=-1), maximum": NO_ORDER,  # noqa: E501
        "26 constant 0 → 1": "what is subtracted from −inf does not matter",
        "26 constant 0 → -1": "what is subtracted from −inf does not matter",
    },
    "flash_attention": {
        "40 argument q.dtype, torch.float32 → torch.float32, q.dtype": "the same dtype",
        "40 name q → k": "the same dtype",
        "41 tuple (outputs, lses) → (lses, outputs)": "both are empty lists",
        "48 function q_block.new_zeros((*batch, n)) → q_block.new_ones((*batch, n))": (
            "multiplied by exp(−inf) before it counts"
        ),
        "51 argument min(left + block_k, end) → min(end, left + block_k)": (
            "a minimum has no order, and slices end with their tensor"
        ),
        "51 call min(left + block_k, end) → left + block_k": (
            "a minimum has no order, and slices end with their tensor"
        ),
        "54 operand causal and right > end - n + 1 → causal": MASKED,
        "54 compare right > end - n + 1 → right >= end - n + 1": MASKED,
        "54 arithmetic end - n + 1 → end - n - 1": MASKED,
        "54 operand end - n + 1 → end - n": MASKED,
        "54 operand end - n + 1 → 1": MASKED,
        "54 arithmetic end - n → n - end": MASKED,
        "54 constant 1 → 0": MASKED,
        "57 argument maximum, scores.amax(dim=-1) → scores.amax(dim=-1), maximum": NO_ORDER,  # noqa: E501
        "63 name q → k": "q and k have the same dtype",
        "66 function new_zeros → new_ones": "there are no values in it",
        "66 name q → k": "there are no values in it",
        "66 function q.new_zeros((*batch, 0)) → q.new_ones((*batch, 0))": (
            "there are no values in it"
        ),
        "66 name q → k (2)": "there are no values in it",
    },
    "FlashAttention": {
        "15 argument causal, block_q, → causal,": BLOCKS,
        "15 argument block_q, block_k → block_q": BLOCKS,
        "15 name block_q → block_k": BLOCKS,
        "17 tuple block_q, ctx.block_k → block_k, ctx.block_q": BLOCKS,
        "17 tuple (causal, block_q, block_k) → (causal, block_k, block_q)": BLOCKS,
        "17 name block_q → block_k": BLOCKS,
        "30 call d_output.to(high) → d_output": (
            "promoted in the sum anyway, but for rounding"
        ),
        "30 call output.to(high) → output": (
            "promoted in the sum anyway, but for rounding"
        ),
        "31 loop range(0, t_q, ctx.block_q → reversed(range(0, t_q, ctx.bloc…": NO_ORDER,  # noqa: E501
        "32 argument min(top + ctx.block_q, t_q) → min(t_q, top + ctx.block_q)": SLICES,
        "32 call min(top + ctx.block_q, t_q) → top + ctx.block_q": SLICES,
        "37 loop range(0, end, ctx.block_k → reversed(range(0, end, ctx.bloc…": NO_ORDER,  # noqa: E501
        "38 argument min(left + ctx.block_k, end) → min(end, left + ctx.block_k)": SLICES,  # noqa: E501
        "38 call min(left + ctx.block_k, end) → left + ctx.block_k": SLICES,
        "42 operand causal and keys.stop > end - n … → causal": MASKED,
        "42 compare keys.stop > end - n + 1 → keys.stop >= end - n + 1": MASKED,
        "42 arithmetic end - n + 1 → end - n - 1": MASKED,
        "42 operand end - n + 1 → end - n": MASKED,
        "42 operand end - n + 1 → 1": MASKED,
        "42 arithmetic end - n → n - end": MASKED,
        "42 constant 1 → 0": MASKED,
        "50 statement d_q, d_k, d_v = (d_q.to(q.dtype… → pass": (
            "PyTorch converts gradients to the dtype of their inputs"
        ),
        "50 call d_q.to(q.dtype) → d_q": (
            "PyTorch converts gradients to the dtype of their inputs"
        ),
        "50 call d_k.to(k.dtype) → d_k": (
            "PyTorch converts gradients to the dtype of their inputs"
        ),
        "50 call d_v.to(v.dtype) → d_v": (
            "PyTorch converts gradients to the dtype of their inputs"
        ),
    },
    "hbm_bytes": {
        "34 loop range(0, t, block) → reversed(range(0, t, block))": NO_ORDER,
        "35 argument min(top + block, t) → min(t, top + block)": NO_ORDER,
    },
    "flash_kernel": {
        "78 condition not hasattr(flash_kernel, 'kern… → True": (
            "the kernel is made again, the same"
        ),
        "100 operand tl.num_programs(0) - 1 - tl. → tl.": "programs have no order",
        "101 call (tl.program_id(1) // n_heads).t… → tl.program_id(1) // n_heads": (
            "no larger addresses, and no remainder that counts, in a check"
        ),
        "101 arithmetic tl.program_id(1) // n_heads → tl.program_id(1) / n_heads": (
            "no larger addresses, and no remainder that counts, in a check"
        ),
        "102 call (tl.program_id(1) % n_heads).to… → tl.program_id(1) % n_heads": (
            "no larger addresses in a check"
        ),
        "112 argument t_q, other=0.0 → t_q": "rows that do not exist are not stored",
        "112 constant 0.0 → 1.0": "rows that do not exist are not stored",
        "113 call float('-inf') → '-inf'": "the compiler refuses it",
        "116 arithmetic t_k // K * K → t_k // K / K": "the compiler refuses it",
        "119 argument tl.minimum(first + Q, t_k) → tl.minimum(t_k, first + Q)": MASKED,
        "119 call tl.minimum(first + Q, t_k) → first + Q": MASKED,
        "119 arithmetic (first + 1) // K * K → (first + 1) // K / K": MASKED,
        "119 arithmetic first + 1 → first - 1": MASKED,
        "119 operand first + 1 → first": MASKED,
        "119 operand first + 1 → 1": MASKED,
        "119 constant 1 → 0": MASKED,
        "121 sign whole if MASKED else 0 → whole if not MASKED else 0": MASKED,
        "122 condition MASKED → True": MASKED,
        "124 argument there, other=0.0 → there": "keys that do not exist are hidden",
        "124 constant 0.0 → 1.0": "keys that do not exist are hidden",
        "125 constant 0.0 → 1.0": "their weight is 0",
        "133 arithmetic seen & → seen": (
            "under a causal mask no query sees past the last key"
        ),
        "135 argument maximum, tl.max(scores, 1) → tl.max(scores, 1), maximum": NO_ORDER,  # noqa: E501
        "143 constant 1.0 → 2.0": "0 divided by any number",
        "147 statement output = output.to(out_ptr.dtyp… → pass": "stores convert",
        "147 call output.to(out_ptr.dtype.element… → output": "stores convert",
        "147 name out_ptr → lse_ptr": "stores convert",
        "154 argument 3], dtype=torch.float32, → 3],": (
            "float32 on the CPU is what there is"
        ),
        "154 argument float32, device=q.device → float32": (
            "float32 on the CPU is what there is"
        ),
        "154 name q → k (2)": "float32 on the CPU is what there is",
        "156 tuple 128, 64), (64 → 64, 64), (128": TRIED,
        "156 tuple 64), (64, 32 → 32), (64, 64": TRIED,
        "156 tuple 64, 32), (32 → 32, 32), (64": TRIED,
        "156 tuple 32, 32), (16, 16 → 16, 16), (32, 32": TRIED,
        "156 tuple (128, 64) → (64, 128)": TRIED,
        "156 constant 64 → 65 (2)": TRIED,
        "156 constant 64 → 63 (2)": TRIED,
        "156 constant 64 → 65 (3)": TRIED,
        "156 constant 64 → 63 (3)": TRIED,
        "156 tuple (64, 32) → (32, 64)": TRIED,
        "156 constant 64 → 65 (4)": TRIED,
        "156 constant 64 → 63 (4)": TRIED,
        "156 constant 32 → 33": TRIED,
        "156 constant 32 → 31": TRIED,
        "156 constant 32 → 33 (2)": TRIED,
        "156 constant 32 → 31 (2)": TRIED,
        "156 constant 32 → 33 (3)": TRIED,
        "156 constant 32 → 31 (3)": TRIED,
        "156 constant 16 → 17": TRIED,
        "156 constant 16 → 15": TRIED,
        "156 constant 16 → 17 (2)": TRIED,
        "156 constant 16 → 15 (2)": TRIED,
        "157 statement pairs = [(block_q or n, block_k… → pass": BLOCKS,
        "157 tuple (block_q or n, block_k or m) → (block_k or m, block_q or n)": BLOCKS,
        "157 operand block_q or n → n": BLOCKS,
        "157 name block_q → block_k": BLOCKS,
        "157 operand block_k or m → m": BLOCKS,
        "157 tuple (n, m) → (m, n)": BLOCKS,
        "158 loop pairs → list(pairs)[1:]": TRIED,
        "158 loop pairs → list(pairs)[:-1]": TRIED,
        "158 tuple (n, m) → (m, n)": TRIED,
        "160 condition 8 if n * d_head > 8192 else 4 → 8": TRIED,
        "160 condition 8 if n * d_head > 8192 else 4 → 4": TRIED,
        "160 compare n * d_head > 8192 → n * d_head >= 8192": TRIED,
        "160 compare n * d_head > 8192 → n * d_head < 8192": TRIED,
        "160 compare n * d_head > 8192 → n * d_head == 8192": TRIED,
        "160 arithmetic n * d_head → n / d_head": TRIED,
        "160 arithmetic n * d_head → n + d_head": TRIED,
        "160 operand n * d_head → n": TRIED,
        "160 operand n * d_head → d_head": TRIED,
        "160 constant 8192 → 8193": TRIED,
        "160 constant 8192 → 8191": TRIED,
        "160 constant 8 → 9": TRIED,
        "160 constant 8 → 7": TRIED,
        "160 constant 4 → 5": TRIED,
        "160 constant 4 → 3": TRIED,
        "161 arithmetic 2 + (n > 64) → 2 - (n > 64)": TRIED,
        "161 operand 2 + (n > 64) → 2": TRIED,
        "161 operand 2 + (n > 64) → n > 64": TRIED,
        "161 constant 2 → 3": TRIED,
        "161 constant 2 → 1": TRIED,
        "161 compare n > 64 → n >= 64": TRIED,
        "161 compare n > 64 → n < 64": TRIED,
        "161 compare n > 64 → n == 64": TRIED,
        "161 constant 64 → 65": TRIED,
        "161 constant 64 → 63": TRIED,
        "162 constant True → False": TRIED,
        "165 name q → k": "the same device",
        "166 argument m), **settings → m)": TRIED,
        "174 condition (n, m) == pairs[-1] → True": TRIED,
        "174 statement if (n, m) == pairs[-1]: raise R… → pass": TRIED,
        "174 compare (n, m) == pairs[-1] → (n, m) != pairs[-1]": TRIED,
        "174 tuple (n, m) → (m, n)": TRIED,
        "174 sign -1 → 1": TRIED,
        "174 constant -1 → 0": TRIED,
        "174 constant -1 → -2": TRIED,
    },
}
